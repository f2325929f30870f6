"""Runs the adapter of a scheduler of another package so that it can stop nothing, and write only what it may.

Each call runs on a thread of its own, with a time limit. While a call has not ended, no further one begins. If it
raises, hangs or returns something else, the target is degraded and says why, and the other targets go on. The mode is
the policy's, and a write is made here: of the adapter's, it contains only the fields of the object's spec."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

from accountant.wire.policy_models import Policy
from fairshare.core.queues_and_weights import Observation, Pod, TargetQueue, Value, Weight
from fairshare.targets.weight_plan import Adapter, Advice, ObjectQuery, Seen
from gputally.base.background_tasks import error_summary
from gputally.base.errors import ClusterError
from gputally.base.plugins import TakesTooLong, within
from gputally.kubernetes.mig_parts import NO_NODES, MigParts
from gputally.kubernetes.objects import Object
from gputally.kubernetes.scheduler_plugins import SchedulerPlugin

MOST_CALL_S: Final = 10.0
T = TypeVar("T")


class PluginFault(ClusterError):
    """The plug-in of a scheduler cannot be used, or a call of it failed. The message names it and the reason."""

    reason = "PluginFailed"


class BrokenAdapter(Adapter):
    """Stands for an adapter that cannot be loaded."""

    def __init__(self, plugin: SchedulerPlugin, fault: str) -> None:
        self.name, self.prefixes = plugin.name, plugin.prefixes
        self._fault = fault

    def reads(self, _policy: Policy) -> tuple[ObjectQuery, ...]:
        raise PluginFault(self._fault)

    def observe(
        self, _policy: Policy, _seen: Seen, _pods: Sequence[Pod] = (), _parts: MigParts = NO_NODES
    ) -> Observation:
        raise PluginFault(self._fault)

    def spec(self, _queue: TargetQueue, _value: Value) -> Object:
        raise PluginFault(self._fault)


class GuardedAdapter(Adapter):
    """The adapter of another package."""

    def __init__(self, plugin: SchedulerPlugin, adapter: Adapter) -> None:
        self.name, self.prefixes = plugin.name, plugin.prefixes
        self.settings = adapter.settings
        self._plugin = plugin
        self._adapter = adapter
        self._hanging: threading.Event | None = None

    def reads(self, policy: Policy) -> tuple[ObjectQuery, ...]:
        return self._call("reads", tuple, lambda: self._adapter.reads(policy))

    def observe(self, policy: Policy, seen: Seen, pods: Sequence[Pod] = (), parts: MigParts = NO_NODES) -> Observation:
        found = self._call("observe", Observation, lambda: self._adapter.observe(policy, seen, pods, parts))
        own = {kind for versions in self._plugin.kinds for kind in versions}
        strange = next((name for name, queue in found.queues.items() if queue.kind not in own), None)
        if strange is not None:
            raise PluginFault(f"{self.name}: queue {strange} is of a kind that the manifest does not name")
        return found

    def advise(self, policy: Policy) -> tuple[Advice, ...]:
        return self._call("advise", tuple, lambda: tuple(self._adapter.advise(policy)))

    def publishes(self, policy: Policy) -> bool:
        return self._call("publishes", bool, lambda: self._adapter.publishes(policy))

    def express(
        self, policy: Policy, weights: Sequence[Weight], observation: Observation, gpus: float
    ) -> Mapping[str, Value]:
        def call() -> Mapping[str, Value]:
            return dict(self._adapter.express(policy, weights, observation, gpus))

        return self._call("express", dict, call)

    def spec(self, queue: TargetQueue, value: Value) -> Object:
        return self._call("spec", dict, lambda: dict(self._adapter.spec(queue, value)))

    def _call(self, name: str, kind: type[T], call: Callable[[], object]) -> T:
        """Return what the call returns. Raises PluginFault."""
        if self._hanging is not None and not self._hanging.is_set():
            raise PluginFault(f"{self.name}: an earlier call of its plug-in has not ended")
        try:
            result = within(MOST_CALL_S, call)
        except TakesTooLong as error:
            self._hanging = error.done
            raise PluginFault(f"{self.name}: {name} of its plug-in: {error}") from error
        except (Exception, SystemExit) as error:
            raise PluginFault(f"{self.name}: {name} of its plug-in: {error_summary(error)}") from error
        if not isinstance(result, kind):
            text = f"{self.name}: {name} of its plug-in returned a {type(result).__name__}, not a {kind.__name__}"
            raise PluginFault(text)
        return result
