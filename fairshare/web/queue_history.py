"""Keeps the last cycle, samples of queues and recent decisions for the pages, and queries the accountant's history.

The samples, one of each queue every five minutes for two weeks, are only in memory, and so are the process's own
decisions. Usage and older decisions come from the accountant. Usage is cached for five minutes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice

from cachetools import TTLCache

from accountant.wire.decision_text import is_record
from accountant.wire.policy_models import Decision, Policy
from accountant.wire.usage_cost_and_job_models import Dimension
from fairshare.controller.cycle_report import CycleReport
from fairshare.core.queues_and_weights import PolicyTree
from fairshare.explain.weight_change_causes import WeightChange, decision_before, weight_change
from fairshare.usage.accountant_client import AccountantApi
from gputally.base.clock import Clock
from gputally.base.errors import AccountantUnavailable
from gputally.base.units import MS_PER_HOUR, MS_PER_MINUTE, MS_PER_SECOND, US_PER_HOUR

MOST_HOURS = 31 * 24
CACHED_MS = 5 * MS_PER_MINUTE
MOST_READ = 3_000
"""The largest number of decisions that one page searches."""
MOST_TARGETS = 20
"""The number of decisions about a queue among which the one before another is searched: one cycle decides one for each
target."""
MOST_CACHED = 256
"""The largest number of cached series; the least recently used is dropped first."""
MOST_NAMED = 100
"""The largest number of queues in one query, because the length of addresses is limited."""
MOST_ASKING = 4
"""The number of pages that query the accountant at the same time."""
TURN_S = 1.0
"""How long another page waits for its turn. An accountant that answers keeps nobody waiting as long."""
ByHour = Mapping[int, int]
"""GPU-microseconds held in an hour, by the beginning of the hour (milliseconds UTC)."""


class QueueHistory:
    """Queries the accountant for usage and decisions, and caches usage. Thread-safe.

    While the accountant hangs, a few pages wait for it, and the others are told so after a moment."""

    def __init__(self, client: AccountantApi, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._lock = threading.Lock()
        self._turns = threading.BoundedSemaphore(MOST_ASKING)
        self._cache: TTLCache[tuple[int, tuple[str, ...]], ByHour] = TTLCache(MOST_CACHED, CACHED_MS, clock.wall_ms)

    def held(self, policy: Policy, name: str, hours: int) -> list[tuple[float, float]]:
        """Return the mean GPUs that a queue and all queues below it held in each of the last whole hours, oldest first.

        A point is (beginning of the hour in milliseconds UTC, GPUs). Hours without any record are left out.
        hours: at most a month counts. Raises AccountantUnavailable."""
        hours = max(1, min(hours, MOST_HOURS))
        known = self._by_hour(hours)
        family = sorted(PolicyTree(policy).family(name))
        parts = [
            self._by_hour(hours, *family[first : first + MOST_NAMED]) for first in range(0, len(family), MOST_NAMED)
        ]
        return [(float(at), sum(part.get(at, 0) for part in parts) / US_PER_HOUR) for at in sorted(known)]

    def _by_hour(self, hours: int, *queues: str) -> ByHour:
        """Return the GPU time that these queues, or without names all queues, held together in each of the last whole
        hours."""
        with self._lock:
            by_hour = self._cache.get((hours, queues))
        if by_hour is not None:
            return by_hour
        end_ms = self._clock.wall_ms() // MS_PER_HOUR * MS_PER_HOUR
        where: dict[Dimension, Sequence[str]] = {"queue": queues} if queues else {}
        with self._asking():
            lines = self._client.usage(end_ms - hours * MS_PER_HOUR, end_ms, ("hour",), where)
            by_hour = {_hour_ms(line.key["hour"]): line.accounts_gpu_us.allocated for line in lines}
        with self._lock:
            self._cache[hours, queues] = by_hour
        return by_hour

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Run the block when its turn comes. Raises AccountantUnavailable if no earlier query ends in time."""
        if not self._turns.acquire(timeout=TURN_S):
            raise AccountantUnavailable("the accountant has not answered the queries of other pages yet")
        try:
            yield
        finally:
            self._turns.release()

    def decisions(self, start_ms: int, end_ms: int, most: int, queue: str = "", kind: str = "") -> list[Decision]:
        """Return the newest decisions as `shown_decisions` selects them. Raises AccountantUnavailable."""
        with self._asking():
            return shown_decisions(islice(self._client.decisions(start_ms, end_ms), MOST_READ), most, queue, kind)

    def causes(self, decision: Decision, same: Sequence[Decision]) -> WeightChange | None:
        """Return the causes of the change that a decision made to a weight, None if the records do not state them.

        same: all decisions of the same cycle. Raises AccountantUnavailable."""
        if decision.kind != "weight" or decision.value is None:
            return None
        start_ms = decision.at_ms - MOST_HOURS * MS_PER_HOUR
        with self._asking():
            earlier = self._client.decisions(start_ms, decision.at_ms, subject=decision.subject, per_get=MOST_TARGETS)
            before = decision_before(decision, islice(earlier, MOST_TARGETS))
            if before is None:
                return None
            known = (*same, *self._client.decisions(before.at_ms, before.at_ms + 1))
            return weight_change(decision, known, {each.version: each.policy for each in self._client.policies()})

    def decision(self, id: str, at_ms: int) -> tuple[Decision | None, tuple[Decision, ...]]:
        """Return a decision, and all decisions of the same cycle. Raises AccountantUnavailable."""
        with self._asking():
            same = tuple(self._client.decisions(at_ms, at_ms + 1))
        return next((each for each in same if each.id == id), None), same


def _hour_ms(hour: str) -> int:
    return round(datetime.fromisoformat(hour).replace(tzinfo=UTC).timestamp()) * MS_PER_SECOND


def shown_decisions(decisions: Iterable[Decision], most: int, queue: str = "", kind: str = "") -> list[Decision]:
    """Return the first `most` decisions of a kind about a queue, without the records of cycles' inputs.

    queue: only decisions about this queue or about work in it count; "" for all queues.
    kind: "" for all kinds."""
    matching = (
        each
        for each in decisions
        if not is_record(each)
        and (not kind or each.kind == kind)
        and (not queue or queue in (each.subject, each.inputs.get("queue")))
    )
    return list(islice(matching, most))


EVERY_MS = 5 * MS_PER_MINUTE
MOST_SAMPLES = 4_032
"""One sample every five minutes for two weeks."""
MOST_DECISIONS = 500


@dataclass(frozen=True, slots=True)
class Sample:
    """The GPUs and the weight of a queue at a target in one cycle. weight: None if the cycle computed none."""

    at_ms: int
    due: float
    held: float
    asked: float
    weight: float | None


@dataclass(frozen=True, slots=True)
class LastCycle:
    """The last cycle and its policy."""

    report: CycleReport
    policy: Policy

    @property
    def gpus(self) -> float | None:
        """Return the GPUs of the largest target; None if no target knows its GPUs."""
        return max((target.gpus for target in self.report.targets), default=0.0) or None


class ReportCache:
    """Keeps the last cycle's report, and samples and decisions of earlier cycles. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._snapshot: LastCycle | None = None
        self._samples: dict[tuple[str, str], deque[Sample]] = {}
        self._decisions: deque[Decision] = deque(maxlen=MOST_DECISIONS)

    def observe(self, report: CycleReport, policy: Policy) -> None:
        """Keep the report of a cycle. The controller calls this after every cycle."""
        with self._lock:
            self._snapshot = LastCycle(report, policy)
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

    def now(self) -> LastCycle | None:
        """Return the last cycle; None before the first cycle has ended."""
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
