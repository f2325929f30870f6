"""What the accountant's books say about queues over time, asked once in a while and kept for who asks next."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Protocol

from accountant.wire import Decision, Dimension, Policy, UsageLine
from agent.clock import Clock
from agent.units import MS_PER_HOUR, MS_PER_MINUTE, US_PER_HOUR
from fairshare.explain.explaining import below

MOST_HOURS = 31 * 24
KEPT_MS = 5 * MS_PER_MINUTE
MOST_READ = 3_000
"""Decisions that are looked through for one page."""
Held = Mapping[str, Mapping[int, float]]
"""By queue and beginning of an hour (milliseconds UTC): mean GPUs held in it."""


class Books(Protocol):
    """What is asked of the accountant (`fairshare.client.AccountantClient`). Raises AccountantUnavailable."""

    def usage(
        self,
        start_ms: int,
        end_ms: int,
        by: Sequence[Dimension],
        where: Mapping[Dimension, Sequence[str]] | None = None,
    ) -> Iterator[UsageLine]: ...

    def decisions(self, start_ms: int, end_ms: int) -> Iterator[Decision]: ...


class History:
    """Asked from any thread; one question at a time goes to the accountant."""

    def __init__(self, books: Books, clock: Clock) -> None:
        self._books = books
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[int, tuple[int, Held]] = {}

    def held(self, hours: int) -> Held:
        """Of the last whole hours, at most a month of them. Raises AccountantUnavailable."""
        hours = max(1, min(hours, MOST_HOURS))
        now_ms = self._clock.wall_ms()
        with self._lock:
            known = self._held.get(hours)
            if known is not None and now_ms - known[0] < KEPT_MS:
                return known[1]
            end_ms = now_ms // MS_PER_HOUR * MS_PER_HOUR
            found: dict[str, dict[int, float]] = {}
            for line in self._books.usage(end_ms - hours * MS_PER_HOUR, end_ms, ("queue", "hour")):
                at = datetime.fromisoformat(line.key["hour"]).replace(tzinfo=UTC)
                gpus = line.accounts_gpu_us.allocated / US_PER_HOUR
                found.setdefault(line.key["queue"], {})[round(at.timestamp()) * 1000] = gpus
            self._held[hours] = (now_ms, found)
            return found

    def decisions(self, start_ms: int, end_ms: int, most: int, queue: str = "", kind: str = "") -> list[Decision]:
        """The newest, without the records of cycles' inputs. Raises AccountantUnavailable."""
        found = (
            each
            for each in islice(self._books.decisions(start_ms, end_ms), MOST_READ)
            if (each.subject != "*" or each.kind == "hold")
            and (not kind or each.kind == kind)
            and (not queue or concerns(each, queue))
        )
        return list(islice(found, most))

    def decision(self, id: str, at_ms: int) -> tuple[Decision | None, tuple[Decision, ...]]:
        """One decision, and what was decided in the same cycle. Raises AccountantUnavailable."""
        same = tuple(self._books.decisions(at_ms, at_ms + 1))
        return next((each for each in same if each.id == id), None), same


def concerns(decision: Decision, queue: str) -> bool:
    """Whether a decision is about this queue, or about work of it."""
    return queue in (decision.subject, decision.inputs.get("queue"))


def with_children(held: Held, policy: Policy, name: str) -> list[tuple[float, float]]:
    """GPUs held by a queue and all below it, (hour, mean), oldest first; hours of which the books know nothing of
    anybody are left out."""
    family = below(policy, name)
    hours = sorted({at for series in held.values() for at in series})
    return [(float(at), sum(held[each].get(at, 0.0) for each in family if each in held)) for at in hours]
