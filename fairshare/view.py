"""What the controller's last cycle and the pods as last seen say about the room there is, for the extender."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from math import fsum

from accountant.wire import Policy
from agent.clock import Clock
from fairshare.kube.demand import queue_namer
from fairshare.model import Pod
from fairshare.placing import Room, Share
from fairshare.report import CycleReport

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
        shares: dict[str, Share] = {}
        if report.hold is None and self._clock.wall_ms() - report.at_ms <= STALE_MS:
            allocated: dict[str, list[float]] = {}
            for pod in pods.values():
                queue = queue_of(pod) if pod.held else None
                if queue is not None:
                    allocated.setdefault(queue, []).append(pod.gpus)
            for target in report.targets:
                for due in target.entitlements:
                    if due.queue in target.standings:
                        shares[due.queue] = Share(fsum(allocated.get(due.queue, ())), due.gpus)
        return Room(report.gpus_by_node, pods, shares, queue_of)
