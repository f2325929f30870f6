"""Keeps the recent cycles and each queue's usage over time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Protocol

from accountant.wire.policy_models import Decision, Policy
from accountant.wire.usage_models import Dimension, UsageLine
from fairshare.controller.cycle_report import CycleReport
from fairshare.core.queue_tree import PolicyTree
from gputally.base.clock import Clock
from gputally.base.units import MS_PER_HOUR, MS_PER_MINUTE, MS_PER_SECOND, US_PER_HOUR

MOST_HOURS = 31 * 24
KEPT_MS = 5 * MS_PER_MINUTE
MOST_READ = 3_000
"""Largest number of decisions that are searched for one page."""
MOST_KEPT = 256
"""Largest number of cached series of queues; the oldest is dropped first."""
MOST_NAMED = 100
"""Largest number of queues in one query, because the length of addresses is limited."""
ByHour = Mapping[int, int]
"""Beginning of an hour (milliseconds UTC): GPU-microseconds held in it."""


class HistoryQuestions(Protocol):
    """The queries to the accountant (`fairshare.usage.accountant_client.AccountantClient`). Raises
    AccountantUnavailable."""

    def usage(
        self,
        start_ms: int,
        end_ms: int,
        by: Sequence[Dimension],
        where: Mapping[Dimension, Sequence[str]] | None = None,
    ) -> Iterator[UsageLine]: ...

    def decisions(self, start_ms: int, end_ms: int) -> Iterator[Decision]: ...


class History:
    """Queues' history for any thread; one query at a time goes to the accountant."""

    def __init__(self, books: HistoryQuestions, clock: Clock) -> None:
        self._books = books
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: dict[Hashable, tuple[int, ByHour]] = {}

    def held(self, policy: Policy, name: str, hours: int) -> list[tuple[float, float]]:
        """GPUs held by a queue and all below it, (hour, mean), oldest first, of the last whole hours, at most a month
        of them. Hours without any records are left out. Raises AccountantUnavailable."""
        hours = max(1, min(hours, MOST_HOURS))
        with self._lock:
            known = self._by_hour(hours)
            family = sorted(PolicyTree(policy).family(name))
            parts = [
                self._by_hour(hours, *family[first : first + MOST_NAMED]) for first in range(0, len(family), MOST_NAMED)
            ]
        return [(float(at), sum(part.get(at, 0) for part in parts) / US_PER_HOUR) for at in sorted(known)]

    def _by_hour(self, hours: int, *queues: str) -> ByHour:
        """Return the hours held by these queues together. Call it with the lock held."""
        now_ms = self._clock.wall_ms()
        kept = self._kept.get((hours, queues))
        if kept is not None and now_ms - kept[0] < KEPT_MS:
            return kept[1]
        end_ms = now_ms // MS_PER_HOUR * MS_PER_HOUR
        where: dict[Dimension, Sequence[str]] = {"queue": queues} if queues else {}
        found = {
            round(datetime.fromisoformat(line.key["hour"]).replace(tzinfo=UTC).timestamp()) * MS_PER_SECOND:
            line.accounts_gpu_us.allocated
            for line in self._books.usage(end_ms - hours * MS_PER_HOUR, end_ms, ("hour",), where)
        }  # fmt: skip
        self._kept.pop((hours, queues), None)
        self._kept[hours, queues] = (now_ms, found)
        if len(self._kept) > MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        return found

    def decisions(self, start_ms: int, end_ms: int, most: int, queue: str = "", kind: str = "") -> list[Decision]:
        """The newest, without the records of cycles' inputs. Raises AccountantUnavailable."""
        return shown_decisions(islice(self._books.decisions(start_ms, end_ms), MOST_READ), most, queue, kind)

    def decision(self, id: str, at_ms: int) -> tuple[Decision | None, tuple[Decision, ...]]:
        """One decision, and what was decided in the same cycle. Raises AccountantUnavailable."""
        same = tuple(self._books.decisions(at_ms, at_ms + 1))
        return next((each for each in same if each.id == id), None), same


def shown_decisions(decisions: Iterable[Decision], most: int, queue: str = "", kind: str = "") -> list[Decision]:
    """Return the first of the decisions, without the records of cycles' inputs. queue: only those about it, or about
    work in it."""
    found = (
        each
        for each in decisions
        if (each.subject != "*" or each.kind == "hold")
        and (not kind or each.kind == kind)
        and (not queue or queue in (each.subject, each.inputs.get("queue")))
    )
    return list(islice(found, most))


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
    """The last cycle and its policy."""

    report: CycleReport
    policy: Policy

    @property
    def gpus(self) -> float | None:
        """Return the GPUs that are divided; None if no target knows."""
        return max((target.gpus for target in self.report.targets), default=0.0) or None


class ReportCache:
    """Keeps what the pages show of each cycle's report. Thread-safe."""

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
        """Return the last cycle; None before the first one."""
        with self._lock:
            return self._snapshot

    def samples(self, target: str, queue: str) -> Sequence[Sample]:
        """Return the samples since this process started, oldest first."""
        with self._lock:
            return tuple(self._samples.get((target, queue), ()))

    def decisions(self) -> Sequence[Decision]:
        """Return this process's own decisions, newest first."""
        with self._lock:
            return tuple(reversed(self._decisions))
