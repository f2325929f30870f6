"""Caches results of questions within a bound of bytes.

A page asks a dozen questions about the same job, or the same quarter of an hour, from one snapshot. Who its holders
are is found once, and what was summed finely is not summed again coarsely. Sums are of whole numbers, so an answer
that is added up from a finer one is the engine's own, to the last digit.

Of one cursor, like the moment it belongs to; nothing outlives that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from accountant.storage.duckdb_engine import Cursor, statement
from accountant.storage.write.name_ids import HolderName, holders
from accountant.wire.usage_models import Accounts, Dimension, UsageLine, known_memory

MOST_NAMED: Final = 1_000
"""Holders that are told apart here; of more the engine does it."""
MOST_LINES: Final = 20_000
"""Of an answer that is kept to make coarser ones of."""


class _UsageQuestion(NamedTuple):
    """A question of usage but for what it is told apart by."""

    start_ms: int
    end_ms: int
    where: Hashable
    timezone: str


@dataclass(slots=True)
class ResultCache:
    """Not thread-safe."""

    _holders: dict[Hashable, Mapping[int, HolderName] | None] = field(default_factory=dict)
    _usage: dict[_UsageQuestion, list[tuple[tuple[Dimension, ...], list[UsageLine]]]] = field(default_factory=dict)

    def named(
        self, cursor: Cursor, jobs: Collection[str], pods: Collection[str], labels: Collection[str]
    ) -> Mapping[int, HolderName] | None:
        """Holders that may be of these jobs, or are pods of these names, with their labels and users; the caller looks
        again. None: there are too many to tell apart here."""
        key = (frozenset(jobs), frozenset(pods), frozenset(labels))
        if key not in self._holders:
            names = {*pods, *(job.partition("/")[2] or job for job in jobs)}
            found = cursor.run(
                statement("holders_named", pods=statement("pods_named")),
                {"jobs": sorted(jobs), "names": sorted(names)},
            )
            few = len(found) <= MOST_NAMED
            self._holders[key] = holders(cursor, {number for (number,) in found}, labels, users=True) if few else None
        return self._holders[key]

    def usage(
        self,
        start_ms: int,
        end_ms: int,
        by: Sequence[Dimension],
        where: Mapping[Dimension, Collection[str]] | None,
        timezone: str,
        find: Callable[[], list[UsageLine]],
    ) -> list[UsageLine]:
        """What `find` would answer; without asking it where a finer answer is at hand."""
        chosen = frozenset((name, frozenset(values)) for name, values in (where or {}).items())
        known = self._usage.setdefault(_UsageQuestion(start_ms, end_ms, chosen, timezone), [])
        for finer, lines in known:
            if finer == tuple(by):
                return list(lines)
            if set(by) <= set(finer):
                return coarser_lines(lines, by)
        found = find()
        if len(found) <= MOST_LINES:
            known.append((tuple(by), found))
        return list(found)


def coarser_lines(lines: Sequence[UsageLine], by: Sequence[Dimension]) -> list[UsageLine]:
    """Lines of `usage` as they would be by fewer dimensions, all of which they have."""
    groups: dict[tuple[str, ...], list[UsageLine]] = {}
    for line in lines:
        groups.setdefault(tuple([line.key[name] for name in by]), []).append(line)
    return [
        several[0].model_copy(update={"key": dict(zip(by, key, strict=True))}) if len(several) == 1
        else _together(dict(zip(by, key, strict=True)), several)
        for key, several in sorted(groups.items())
    ]  # fmt: skip


def _together(key: dict[str, str], lines: Sequence[UsageLine]) -> UsageLine:
    accounts = Accounts(
        **{name: sum(getattr(line.accounts_gpu_us, name) for line in lines) for name in Accounts.model_fields}
    )
    memory_unknown_us = sum(line.memory_unknown_us for line in lines)
    return UsageLine(
        key=key,
        accounts_gpu_us=accounts,
        node_down_us=sum(line.node_down_us or 0 for line in lines),
        borrowed_busy_us=sum(line.borrowed_busy_us for line in lines),
        unattributed_busy_us=sum(line.unattributed_busy_us for line in lines),
        memory_mib_s=known_memory(sum(line.memory_mib_s or 0 for line in lines), memory_unknown_us, accounts.allocated),
        memory_unknown_us=memory_unknown_us,
        energy_uj=sum(line.energy_uj for line in lines),
    )
