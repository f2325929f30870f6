"""Combines the latest cycle with the pods as they are now, for schedulers that ask the controller while they decide."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cache, cached_property
from math import fsum

from accountant.wire.policy_models import Policy
from fairshare.controller.cycle_report import CycleReport, TargetReport
from fairshare.core.gpu_demand import queues_by_ref
from fairshare.core.gpu_models import OTHERS, parts_of
from fairshare.core.queues_and_weights import Entitlement, Pod, PolicyTree, Standing
from fairshare.laws.weight_calculation import WeightInputs, WeightResult, calculate_weights
from fairshare.targets.extender import ExtenderView, QueueShare, SharesOn, sides_of
from fairshare.targets.pod_index import NO_SIDES, PodIndex, Sides, demands_by_label
from gputally.base.clock import Clock
from gputally.base.gpu_model_names import gpu_model_of_node, most_precise

STALE_MS = 600_000
"""Age of entitlements above which they no longer show which queues are above their shares."""


MOST_COMPUTED = 100
"""Entitlements with additional requests that are kept for one report."""


class ExtenderViews:
    """Combines the latest report with the pods as they are now. Thread-safe."""

    def __init__(self, pods: PodIndex, clock: Clock) -> None:
        self._pods = pods
        self._clock = clock
        self._latest: _Shares | None = None

    def observe(self, report: CycleReport, policy: Policy) -> None:
        """Store the latest report, and the policy that was in force."""
        self._pods.count_by(report.parts)
        self._latest = _Shares(report, policy, self._pods)

    def view(self) -> ExtenderView | None:
        """Return the view; None before the first report. It has no shares during a hold, or if the report is too
        old."""
        latest = self._latest
        if latest is None:
            return None
        report = latest.report
        if report.hold is not None or self._clock.wall_ms() - report.at_ms > STALE_MS:
            return ExtenderView(report.gpus_by_node, self._pods, {}, latest.queues)
        return ExtenderView(
            report.gpus_by_node, self._pods, latest, latest.queues, latest.sides(), latest.with_request,
            shares_on=latest.by_node if latest.report.model_by_node else None,
        )  # fmt: skip


class _Shares(Mapping[str, QueueShare]):
    """The shares of queues: what they are due by one report, and what their pods hold now."""

    def __init__(self, report: CycleReport, policy: Policy, pods: PodIndex) -> None:
        self.report = report
        self.queues = queues_by_ref(policy)
        self._policy = policy
        self._models = parts_of(policy)
        self._pods = pods
        self._refs: dict[str, list[str]] = {}
        for ref, queue in self.queues.items():
            self._refs.setdefault(queue, []).append(ref)
        self._due_gpus = self._due(lambda target: target.entitlements)
        self._computed: dict[Hashable, WeightResult] = {}
        self._split: tuple[list[float], Sides] = ([], NO_SIDES)

    def by_node(self, pod: Pod) -> SharesOn:
        """Return a function that returns the shares of the GPU model of a node: what queues hold of it now, and what
        they are due of it, including the request of this pod."""
        models = self.report.model_by_node

        @cache
        def of_model(model: str) -> Mapping[str, QueueShare]:
            held: dict[str, list[float]] = {}
            for node, other in models.items():
                for one in self._pods.on_node(node).pods if other == model else ():
                    queue = self.queues.get(one.ref)
                    if queue is not None and one.held:
                        held.setdefault(queue, []).append(one.gpus)
            return {
                due.queue: QueueShare(fsum(held.get(due.queue, ())), due.gpus)
                for target in self.report.targets
                for due in self._with_new_pods(target, pod).by_model.get(model, ())
                if due.queue in target.standings
            }

        return lambda node: of_model(models.get(node, OTHERS))

    def __getitem__(self, queue: str) -> QueueShare:
        return QueueShare(fsum(self._pods.held_by_ref(self._refs.get(queue, ()))), self._due_gpus[queue])

    def __iter__(self) -> Iterator[str]:
        return iter(self._due_gpus)

    def __len__(self) -> int:
        return len(self._due_gpus)

    def sides(self) -> Sides:
        """Return which queues are above their share now: the same object until another queue is."""
        held, sides = self._pods.held_by_ref(self.queues), self._split[1]
        if held != self._split[0]:
            changed = sides_of(self, self.queues)
            sides = sides if sides == changed else changed
            self._split = held, sides
        return sides

    def with_request(self, pod: Pod) -> _Shares:
        """Return the shares that include the requests of this pod and of other pods that the cycle has not seen."""
        other = copy(self)
        other._due_gpus = self._due(lambda target: self._with_new_pods(target, pod).entitlements)
        return other

    def _due(self, entitlements_of: Callable[[TargetReport], Sequence[Entitlement]]) -> dict[str, float]:
        return {
            due.queue: due.gpus
            for target in self.report.targets
            for due in entitlements_of(target)
            if due.queue in target.standings
        }

    @cached_property
    def _known(self) -> Mapping[str, frozenset[str]]:
        """By target, the uids of the pods that its cycle has seen."""
        return {
            target.target: frozenset(pod.uid for gang in target.gangs for pod in gang.pods)
            for target in self.report.targets
        }

    def _with_new_pods(self, target: TargetReport, pod: Pod) -> WeightResult:
        """Return the queues' entitlements with the requests of pods that the cycle has not seen.

        A queue that requested nothing was due nothing. Without these requests its first pod would not get the queue's
        own share until the next cycle."""
        as_reported = WeightResult(target.entitlements, (), by_model=target.by_model)
        if self.report.window is None or target.gpus <= 0 or not target.entitlements:
            return as_reported
        known = self._known[target.target]
        unknown = {**self._pods.demanding_besides(known), pod.uid: pod}
        by_queue: dict[tuple[str | None, str], list[float]] = {}
        for other in unknown.values():
            queue = self.queues.get(other.ref) if other.uid not in known and demands_by_label(other) else None
            if queue is not None and queue in target.standings:
                for model in (None, *self._models_of(other)):
                    by_queue.setdefault((model, queue), []).append(other.gpus)
        if not by_queue:
            return as_reported
        requested = {of: fsum(amounts) for of, amounts in sorted(by_queue.items(), key=str)}
        key = (target.target, *requested.items())
        computed = self._computed.get(key)
        if computed is None:
            if len(self._computed) >= MOST_COMPUTED:
                self._computed.clear()
            computed = self._computed[key] = self._with_requests(target, requested)
        return computed

    def _models_of(self, pod: Pod) -> Sequence[str]:
        """Return the parts of the GPUs on which a pod can run, by the model that its node selector states, if any."""
        if not self._models:
            return ()
        stated = gpu_model_of_node({key: value for key, value in pod.selector if value is not None})
        return [most_precise(stated, self._policy.gpu_models) or OTHERS] if stated else self._models

    def _with_requests(self, target: TargetReport, requested: Mapping[tuple[str | None, str], float]) -> WeightResult:
        """requested: by GPU model and queue; with the model None, of any model."""
        report, tree = self.report, PolicyTree(self._policy)
        assert report.window is not None  # `_with_new_pods` has looked

        def raised(standings: Mapping[str, Standing], model: str | None) -> dict[str, Standing]:
            own = {queue: gpus for (of_model, queue), gpus in requested.items() if of_model == model}
            more = tree.sum_up(own)
            return {
                queue: replace(standing, requested=standing.requested + more.get(queue, 0.0))
                for queue, standing in standings.items()
            }

        models = tuple(replace(part, standings=raised(part.standings, part.model)) for part in target.models)
        return calculate_weights(
            WeightInputs(
                self._policy, report.window, raised(target.standings, None), target.gpus, report.at_ms, target.memory,
                target.exhausted, target.pools, models,
            )
        )  # fmt: skip
