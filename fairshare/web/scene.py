"""What the pages know: the last cycle, and how each queue stood over the last days. Fed by cycles, read by requests."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from accountant.wire import Decision, Policy
from agent.units import MS_PER_MINUTE
from fairshare.report import CycleReport

EVERY_MS = 5 * MS_PER_MINUTE
MOST_SAMPLES = 4_032
"""A sample every five minutes for two weeks."""
MOST_DECISIONS = 500


@dataclass(frozen=True, slots=True)
class Sample:
    """One queue at one target in one cycle. GPUs; weight None: none was computed."""

    at_ms: int
    due: float
    held: float
    asked: float
    weight: float | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The last cycle and the policy it was made under."""

    report: CycleReport
    policy: Policy

    @property
    def gpus(self) -> float | None:
        """GPUs that are divided; None where no target knows."""
        return max((target.gpus for target in self.report.targets), default=0.0) or None


class Scene:
    """Given every report; asked from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._snapshot: Snapshot | None = None
        self._samples: dict[tuple[str, str], deque[Sample]] = {}
        self._decisions: deque[Decision] = deque(maxlen=MOST_DECISIONS)

    def observe(self, report: CycleReport, policy: Policy) -> None:
        with self._lock:
            self._snapshot = Snapshot(report, policy)
            self._decisions.extend(report.decisions)
            known = {queue.name for queue in policy.queues}
            for target in report.targets:
                weights = {weight.queue: weight.value for weight in target.weights}
                for due in target.entitlements:
                    samples = self._samples.setdefault((target.target, due.queue), deque(maxlen=MOST_SAMPLES))
                    if not samples or report.at_ms - samples[-1].at_ms >= EVERY_MS:
                        samples.append(
                            Sample(report.at_ms, due.gpus, due.allocated, due.requested, weights.get(due.queue))
                        )
            for gone in [key for key in self._samples if key[1] not in known]:
                del self._samples[gone]

    def now(self) -> Snapshot | None:
        """None before the first cycle."""
        with self._lock:
            return self._snapshot

    def samples(self, target: str, queue: str) -> Sequence[Sample]:
        """Oldest first; since this process started."""
        with self._lock:
            return tuple(self._samples.get((target, queue), ()))

    def decisions(self) -> Sequence[Decision]:
        """This process's own, newest first."""
        with self._lock:
            return tuple(reversed(self._decisions))
