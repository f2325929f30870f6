"""The maintenance calendar: planned spans in which nodes are down. Pure.

Repeated spans follow a cron expression in a zone of their own, so that `0 6 * * sun` is six in the morning
on both sides of a change of the clocks. Only spans that have begun are given out: what is planned for
tomorrow may be called off.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from fnmatch import fnmatchcase
from zoneinfo import ZoneInfo

from croniter import croniter

from accountant.ledger import Down, NodeFacts
from accountant.periods import zone
from agent.units import MS_PER_SECOND

MOST_SPANS = 2_000
"""Repetitions of one entry, the newest ones: years of daily maintenance."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One entry. end_ms None: for good, or repeated for good. every, for_s: repetitions and their length."""

    cluster: str
    nodes: tuple[str, ...]
    pools: tuple[str, ...]
    start_ms: int
    end_ms: int | None
    reason: str = "maintenance"
    every: str | None = None
    for_s: int | None = None
    timezone: str = "UTC"

    def check(self) -> None:
        """Raises ValueError with the reason where the entry makes no sense."""
        if not self.nodes and not self.pools:
            raise ValueError("name nodes or pools")
        if self.end_ms is not None and self.end_ms <= self.start_ms:
            raise ValueError("ends at or before it begins")
        if (self.every is None) != (self.for_s is None):
            raise ValueError("every and for go together")
        if self.every is not None and not croniter.is_valid(self.every):
            raise ValueError(f"not a cron expression: {self.every!r}")
        zone(self.timezone)

    def concerns(self, node: NodeFacts) -> bool:
        return node.cluster == self.cluster and (
            node.pool in self.pools or any(fnmatchcase(node.name, pattern) for pattern in self.nodes)
        )

    def spans(self, now_ms: int) -> tuple[Down, ...]:
        """What has begun by now, ascending."""
        if self.every is None:
            return (Down(self.start_ms, self.end_ms, self.reason),) if self.start_ms <= now_ms else ()
        return tuple(reversed([*self._repeated(now_ms)]))

    def _repeated(self, now_ms: int) -> Iterator[Down]:
        assert self.every is not None
        assert self.for_s is not None
        until = now_ms if self.end_ms is None else min(now_ms, self.end_ms - 1)
        last = datetime.fromtimestamp(until / MS_PER_SECOND, ZoneInfo(self.timezone))
        # A moment that is exactly an occurrence counts as one.
        before = croniter(self.every, last)
        at: datetime = before.get_next(datetime)
        for _ in range(MOST_SPANS + 1):
            start = round(at.timestamp() * MS_PER_SECOND)
            if start < self.start_ms:
                return
            if start <= until:
                end = start + self.for_s * MS_PER_SECOND
                yield Down(start, end if self.end_ms is None else min(end, self.end_ms), self.reason)
            at = before.get_prev(datetime)


@dataclass(frozen=True, slots=True)
class Calendar:
    """All entries of a file."""

    entries: tuple[Planned, ...] = ()

    def applied(self, nodes: Collection[NodeFacts], now_ms: int) -> list[NodeFacts]:
        """The nodes with their planned down time among the rest."""
        if not self.entries:
            return list(nodes)
        spans = [(entry, entry.spans(now_ms)) for entry in self.entries]
        found = []
        for node in nodes:
            planned = {down for entry, downs in spans if entry.concerns(node) for down in downs}
            down = sorted({*node.down, *planned}, key=lambda d: (d.start_ms, d.end_ms or 2**62, d.reason))
            found.append(replace(node, down=tuple(down)) if planned else node)
        return found
