"""Runs the adapter of a scheduler of another package so that it can stop nothing, and write only what it may.

Each call runs on a thread of its own, and the calls of a cycle have one time limit together. While a call has not
ended, no further one begins. If it raises, hangs or returns something else, the target is degraded and says why, and
the other targets go on. The mode is the policy's, and a write is made here: of the adapter's, it contains only one
field of the object's spec, because a write owns each field that it has."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from accountant.wire.policy_models import Policy
from accountant.wire.scheduler_sections import OtherTarget, SchedulerTarget
from fairshare.core.queues_and_weights import ConditionReason, Observation, Pod, TargetQueue, Value, Weight
from fairshare.targets.weight_plan import MOST_WRITES, Adapter, Advice, Faults, ObjectQuery, Seen
from gputally.base.background_tasks import error_summary
from gputally.base.clock import Clock, SystemClock
from gputally.base.errors import ClusterError
from gputally.base.plugins import TakesTooLong, within
from gputally.base.units import MS_PER_SECOND
from gputally.kubernetes.mig_parts import NO_NODES, MigParts
from gputally.kubernetes.objects import CONFIG_MAP, NODE, POD, PRIORITY_CLASS, Kind, Object, leaves
from gputally.kubernetes.scheduler_plugins import SchedulerPlugin

MOST_TEXTS: Final = 1_000
"""How many reasons of conditions are kept."""
MOST_CALLS_S: Final = 10.0
"""How long the calls of an adapter in one cycle may take together."""
_READABLE: Final = (NODE, POD, CONFIG_MAP, PRIORITY_CLASS)
T = TypeVar("T")


class PluginFault(ClusterError):
    """The plug-in of a scheduler cannot be used, or a call of it failed. The message names it and the reason."""

    reason = "PluginFailed"


class BrokenAdapter(Adapter):
    """Stands for an adapter that cannot be loaded. Its section of the policy is not checked."""

    settings = OtherTarget

    def __init__(self, name: str, prefixes: tuple[str, ...], fault: str) -> None:
        self.name, self.prefixes = name, prefixes
        self.fault = fault

    def reads(self, _policy: Policy) -> tuple[ObjectQuery, ...]:
        raise PluginFault(self.fault)

    def observe(
        self, _policy: Policy, _seen: Seen, _pods: Sequence[Pod] = (), _parts: MigParts = NO_NODES
    ) -> Observation:
        raise PluginFault(self.fault)

    def spec(self, _queue: TargetQueue, _value: Value) -> Object:
        raise PluginFault(self.fault)

    def advise(self, _policy: Policy) -> tuple[Advice, ...]:
        raise PluginFault(self.fault)


def _reasons(given: Any) -> tuple[ConditionReason, ...]:
    if not isinstance(given, tuple) or not all(isinstance(each, ConditionReason) for each in given):
        raise TypeError("its `reasons` are not a tuple of ConditionReason")
    return given[:MOST_TEXTS]


def _managers(given: Any) -> dict[str, str]:
    try:
        for text in (found := dict(given)).values():
            text.format(group="", kind="", field="")
    except Exception as error:
        raise TypeError(
            "its `managers` are not texts by the beginning of a manager's name, which may name {group}, {kind} and"
            f" {{field}}: {error_summary(error)}"
        ) from error
    return found


class GuardedAdapter(Adapter):
    """The adapter of another package. Raises TypeError if it is not what an adapter of another package can be.

    clock: measures how long the calls of a cycle take, which begins with `reads`."""

    def __init__(self, plugin: SchedulerPlugin, adapter: Adapter, clock: Clock | None = None) -> None:
        self.name, self.prefixes = plugin.name, plugin.prefixes
        settings: Any = adapter.settings
        most_writes: Any = adapter.most_writes
        if not isinstance(settings, type) or not issubclass(settings, SchedulerTarget):
            raise TypeError(f"its settings are {settings!r}, not a class of SchedulerTarget")
        if not isinstance(most_writes, int) or most_writes < 1:
            raise TypeError(f"its most_writes is {most_writes!r}, not a number from 1")
        if adapter.stop is not None:
            raise TypeError("it has a `stop`, and workloads of schedulers of other packages are stopped by their pods")
        if adapter.extender is not None:
            raise TypeError("it has an `extender`, and schedulers of other packages cannot ask the controller")
        self.settings, self.most_writes = settings, min(most_writes, MOST_WRITES)
        self.reasons, self.managers = _reasons(adapter.reasons), _managers(adapter.managers)
        self._kinds = frozenset(kind for versions in plugin.kinds for kind in versions)
        self._adapter = adapter
        self._clock = clock or SystemClock()
        self._left_ms = 0.0
        self._hanging: threading.Event | None = None

    def reads(self, policy: Policy) -> tuple[ObjectQuery, ...]:
        def call() -> tuple[ObjectQuery, ...]:
            queries = self._adapter.reads(policy)
            self._check((kind for query in queries for kind in query.kinds), _READABLE, "it reads")
            return queries

        return self._call("reads", tuple, call, first=True)

    def observe(self, policy: Policy, seen: Seen, pods: Sequence[Pod] = (), parts: MigParts = NO_NODES) -> Observation:
        def call() -> Observation:
            found = self._adapter.observe(policy, seen, pods, parts)
            queues = (*found.queues.items(), *found.left_behind.items())
            for name, queue in queues:
                self._check((queue.kind,), (), f"queue {name} is")
            for gang in found.gangs:
                if gang.kind.api_version:  # otherwise a name for pods that start together, and no object
                    self._check((gang.kind,), (POD,), f"workload {gang.name} is")
            return found

        return self._call("observe", Observation, call)

    def faults(self, section: OtherTarget) -> Faults:
        return self._call("settings", tuple, lambda: super(GuardedAdapter, self).faults(section), first=True)

    def advise(self, policy: Policy) -> tuple[Advice, ...]:
        return self._call("advise", tuple, lambda: tuple(self._adapter.advise(policy)), first=True)

    def publishes(self, policy: Policy) -> bool:
        return self._call("publishes", bool, lambda: self._adapter.publishes(policy))

    def express(
        self, policy: Policy, weights: Sequence[Weight], observation: Observation, gpus: float
    ) -> Mapping[str, Value]:
        def call() -> Mapping[str, Value]:
            return dict(self._adapter.express(policy, weights, observation, gpus))

        return self._call("express", dict, call)

    def spec(self, queue: TargetQueue, value: Value) -> Object:
        def call() -> Object:
            fields = dict(self._adapter.spec(queue, value))
            if not fields or len(leaves({"spec": fields})) != 1:
                raise TypeError(f"it has the fields {', '.join(map(str, fields)) or 'none'}, and a weight is one field")
            return fields

        return self._call("spec", dict, call)

    def _check(self, kinds: Iterable[Kind], others: Collection[Kind], what: str) -> None:
        """Raise TypeError for a kind that is neither the scheduler's own nor one of `others`."""
        for kind in kinds:
            if kind not in self._kinds and kind not in others:
                raise TypeError(f"{what} of the kind {getattr(kind, 'kind', kind)}, which the manifest does not name")

    def _call(self, name: str, kind: type[T], call: Callable[[], object], *, first: bool = False) -> T:
        """Return what the call returns. first: it is no part of a cycle, or begins one. Raises PluginFault."""
        if self._hanging is not None and not self._hanging.is_set():
            raise PluginFault(f"{self.name}: an earlier call of its plug-in has not ended")
        if first:
            self._left_ms = MOST_CALLS_S * MS_PER_SECOND
        if self._left_ms <= 0:
            raise PluginFault(f"{self.name}: the calls of its plug-in take more than {MOST_CALLS_S:g} s in a cycle")
        began_ms = self._clock.monotonic_ms()
        try:
            result = within(self._left_ms / MS_PER_SECOND, call)
        except TakesTooLong as error:
            self._hanging = error.done
            raise PluginFault(f"{self.name}: {name} of its plug-in: {error}") from error
        except Exception as error:
            raise PluginFault(f"{self.name}: {name} of its plug-in: {error_summary(error)}") from error
        finally:
            self._left_ms -= self._clock.monotonic_ms() - began_ms
        if not isinstance(result, kind):
            text = f"{self.name}: {name} of its plug-in returned the type {type(result).__name__}, not {kind.__name__}"
            raise PluginFault(text)
        return result
