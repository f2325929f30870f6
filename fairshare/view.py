"""What the controller's last cycle and the pods as last seen say about the room there is, for the extender."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import fsum

from accountant.wire import Policy
from agent.clock import Clock
from fairshare.kube.demand import queue_namer
from fairshare.kube.mapping import sum_up
from fairshare.kube.pods import LABELLED
from fairshare.model import Entitlement, Pod, Standing
from fairshare.placing import Room, Share
from fairshare.report import CycleReport, TargetReport
from fairshare.weighing.shards import weigh_pools

STALE_MS = 600_000
"""Entitlements older than this say nothing about who is above his share."""


class View:
    """Given every report; asked for a Room at any time, from any thread."""

    def __init__(self, pods: Callable[[], Sequence[Pod]], clock: Clock) -> None:
        self._pods = pods
        self._clock = clock
        self._lock = threading.Lock()
        self._held: tuple[CycleReport, Policy] | None = None

    def observe(self, report: CycleReport, policy: Policy) -> None:
        with self._lock:
            self._held = (report, policy)

    def room(self) -> Room | None:
        """None before the first report. Shares are left out while usage is held back or too old to judge by."""
        with self._lock:
            held = self._held
        if held is None:
            return None
        report, policy = held
        queue_of = queue_namer(policy)
        pods = {pod.uid: pod for pod in self._pods()}
        if report.hold is not None or self._clock.wall_ms() - report.at_ms > STALE_MS:
            return Room(report.gpus_by_node, pods, {}, queue_of)
        allocated: dict[str, list[float]] = {}
        for pod in pods.values():
            queue = queue_of(pod) if pod.held else None
            if queue is not None:
                allocated.setdefault(queue, []).append(pod.gpus)
        held_by = {queue: fsum(amounts) for queue, amounts in allocated.items()}

        def shares_for(asking: Pod) -> Mapping[str, Share]:
            now = {**pods, asking.uid: asking}
            found: dict[str, Share] = {}
            for target in report.targets:
                due = _with_newcomers(target, report, policy, now, queue_of)
                found |= _shares(target.standings, due, held_by)
            return found

        shares: dict[str, Share] = {}
        for target in report.targets:
            shares |= _shares(target.standings, target.entitlements, held_by)
        return Room(report.gpus_by_node, pods, shares, queue_of, shares_for)


def _shares(
    standings: Mapping[str, Standing], due: Sequence[Entitlement], held: Mapping[str, float]
) -> dict[str, Share]:
    return {each.queue: Share(held.get(each.queue, 0.0), each.gpus) for each in due if each.queue in standings}


def _with_newcomers(
    target: TargetReport,
    report: CycleReport,
    policy: Policy,
    pods: Mapping[str, Pod],
    queue_of: Callable[[Pod], str | None],
) -> tuple[Entitlement, ...]:
    """What queues are due once the pods count that the cycle has not seen: a queue that asked for nothing then was due
    nothing, and its first pod would be refused what is its own until the next cycle."""
    seen = {pod.uid for gang in target.gangs for pod in gang.pods}
    asked: dict[str, float] = {}
    for pod in pods.values():
        # Of pods in a scheduler's own queue its objects say what is asked.
        queue = queue_of(pod) if pod.ref.startswith(f"{LABELLED}:") else None
        if queue is None or queue not in target.standings:
            continue
        if pod.uid not in seen and not pod.gated and not pod.leaving:
            asked[queue] = asked.get(queue, 0.0) + pod.gpus
    if not asked or report.window is None or target.gpus <= 0 or not target.entitlements:
        return target.entitlements
    more = sum_up(policy, asked)
    standings = {
        queue: replace(standing, requested=standing.requested + more.get(queue, 0.0))
        for queue, standing in target.standings.items()
    }
    return weigh_pools(
        policy, report.window, standings, target.pools, target.gpus, report.at_ms, target.memory, target.exhausted,
        target.devices,
    ).entitlements  # fmt: skip
