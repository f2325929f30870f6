"""Computes a usage window: usage per queue, capacity, coverage and watermark.

A window is split into slices at every quarter-hour, and where the mapping of queues, a price or the group of a GPU
changes. The sums of each slice come from `window_sums`, mostly from its cache. The capacity comes from the lifetimes of
the GPUs.

Sums of GPU groups with equal weight are added as integers. They are decayed by the age of their slice, combined, and
multiplied once by the weight (see `gpu_weights`). What has whole hours alone adds them up from the relation of usage
(accountant.lake.lake_ledger.window_of_hours); tests/moment holds both to the usage of the span.

Down time, of a node or of a lost GPU, is not capacity. Time when both are down counts once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property
from itertools import chain, pairwise
from math import fsum
from zoneinfo import ZoneInfo

import numpy as np
import numpy.typing as npt

from accountant.core.claim_overlap import Span
from accountant.core.errors import UnsupportedQuestion
from accountant.core.gpu_time_accounts import full_us
from accountant.core.periods import next_quarter
from accountant.core.window_decay import age_weights, bounds, combine, factor, term, weights_by_period
from accountant.ledger.team_assignment import Assignment, in_force, rolled_up
from accountant.prices.price_book import PriceBook
from accountant.storage.duckdb_engine import Cursor
from accountant.storage.gpu_lifetimes import GpuCensus, GpuLifetimes, down_in, in_service
from accountant.storage.ledger_state import State
from accountant.storage.query.gpu_weights import (
    COST_UNIT_PLACES,
    GpuGroup,
    GpuGroups,
    Weighting,
    gpus_of_shard,
    group_changes,
    model_weights,
)
from accountant.storage.query.window_sums import (
    GROUP,
    NO_PAYER,
    QUEUE,
    CacheKey,
    Figures,
    Integers,
    Slices,
    SliceSums,
    SumsCache,
    SumsReader,
)
from accountant.wire.policy_models import Measure, UsageWindow, WindowSpec
from gputally.base.units import MS_PER_SECOND

_ALLOCATED, _LOST, _ENERGY = map(Figures._fields.index, ("allocated", "lost", "energy"))
MEASURED: Mapping[Measure, int] = {
    "allocated": _ALLOCATED, "busy": Figures._fields.index("busy"), "energy": _ENERGY, "cost": _ALLOCATED,
}  # fmt: skip
"""The column of `Figures` that each measure sums.

A cost is that of allocated time. If it were that of busy time, holding idle GPUs would be free."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Slices of the window during which no GPU changes its group, by their tags, and the census of each group."""

    tags: range
    groups: GpuGroups
    censuses: Mapping[GpuGroup, GpuCensus]


@dataclass(frozen=True)
class _Query:
    """One window query: the slices of the window, its pieces, and the policies by the tags for which they count.

    `half_life_s` decays the sums within slices. It is None for a decay by period too, which applies to whole slices."""

    spec: WindowSpec
    half_life_s: int | None
    at_ms: int
    measure: Measure
    weighting: Weighting
    slices: Slices
    policies: Sequence[tuple[range, Assignment]]
    pieces: Sequence[_Piece]

    @classmethod
    def of(cls, state: State, spec: WindowSpec, window: Span, measure: Measure, weighting: Weighting) -> _Query:
        (start, end), fleet = window, state.fleet
        changes: list[int] = []
        if not weighting.by_cluster_only:
            changes = sorted({*group_changes(fleet, start, end), *weighting.price_changes(start, end)})
        period = spec.calc_period * MS_PER_SECOND
        periods = range(start - start % period, end, period) if spec.by_period else ()
        half_life_s = None if spec.by_period else spec.half_life
        mappings = in_force(state.policies, start, end)
        slices = Slices.of(start, end, {*changes, *periods, *(since for since, _, _ in mappings)}, half_life_s)
        policies = [(slices.tags(*span), rules) for *span, rules in mappings]
        pieces = []
        for tags in (slices.tags(*span) for span in pairwise((start, *changes, end))):
            groups = GpuGroups(fleet, weighting, int(slices.starts[tags.start]))
            pieces.append(_Piece(tags, groups, groups.in_service()))
        return cls(spec, half_life_s, end, measure, weighting, slices, policies, pieces)

    @cached_property
    def ages(self) -> npt.NDArray[np.float64] | None:
        """The weight of each slice by its age; None without decay."""
        if self.spec.by_period:
            weights = weights_by_period(self.slices.starts.tolist(), self.at_ms, self.spec.half_life)
        else:
            weights = age_weights(self.slices.references.tolist(), self.at_ms, self.half_life_s)
        return None if weights is None else np.array(weights)

    def combined(self, by_slice: Integers) -> int:
        """Return the sum of the values of all slices, decayed by their age (`combine`)."""
        if by_slice.dtype == object:
            return combine(by_slice.tolist(), None if self.ages is None else self.ages.tolist())
        return int(by_slice.sum()) if self.ages is None else round(fsum((by_slice * self.ages).tolist()))


def watermark(
    fleet: GpuLifetimes, end_ms: int, min_coverage: float, shard: str | None = None, cluster: str | None = None
) -> int | None:
    """Return the watermark of every window that ends at `end_ms`."""
    if shard is None:
        census = fleet.census_of(fleet.one_of_several(cluster))
    else:
        census = GpuCensus.of(gpus_of_shard(fleet, shard, end_ms, cluster), fleet.life, fleet.newest_end_ms)
    return census.watermark(end_ms, min_coverage)


class Windows:
    """Computes windows from cached sums. Thread-safe. `month_zone` is the time zone of calendar windows."""

    def __init__(self, month_zone: ZoneInfo) -> None:
        self._zone = month_zone
        self.sums = SumsCache()

    def bounds(self, spec: WindowSpec, at_ms: int) -> Span:
        """Return the window's [start_ms, end_ms)."""
        return bounds(spec, at_ms, self._zone)

    def window(
        self,
        cursor: Cursor | None,
        state: State,
        spec: WindowSpec,
        at_ms: int,
        measure: Measure,
        min_coverage: float,
        book: PriceBook | None = None,
        shard: str | None = None,
        cluster: str | None = None,
    ) -> UsageWindow | None:
        """Return the window, see `Moment.window`. Raises UnsupportedQuestion.

        The usage is by queue name and includes that of descendants. The capacity of the measure `energy` is all energy
        recorded. `cursor` reads the snapshot of `state`. If it is None, only the cache is used, and the result is None
        if the cache lacks a sum."""
        weighting = Weighting(book if measure == "cost" else None, model_weights(spec.gpu_weights), shard, cluster)
        if measure == "cost" and book is None:
            raise UnsupportedQuestion("without a price book nothing has a cost: ask for allocated, busy or energy")
        if measure in ("cost", "energy") and weighting.gpu_weights:
            raise UnsupportedQuestion(
                f"gpu_weights apply to GPU time only, and this window measures {measure}: leave them out, or ask for "
                "allocated or busy"
            )
        start, end = self.bounds(spec, at_ms)
        query = _Query.of(state, spec, (start, end), measure, weighting)
        key = CacheKey(query.half_life_s, weighting.grouping_key(state.fleet))
        reader = SumsReader(self.sums, cursor, state, key, query.slices)
        for piece in query.pieces:
            down = chain.from_iterable(census.down() for census in piece.censuses.values())
            if piece.censuses and not reader.add(piece.tags, piece.groups, down):
                return None
        total = _Total(query, reader.sums(), SliceSums.of(reader.in_down_time), self.sums)
        for piece in query.pieces:
            total.add(piece)
        policies = [rules for _, rules in query.policies]
        usage, unassigned = rolled_up(total.usage_by_leaf(), policies)
        fleet, current = state.fleet, policies[-1]
        census = fleet.census_of(fleet.one_of_several(weighting.cluster))
        return UsageWindow(
            kind=spec.kind,
            start_ms=start,
            end_ms=end,
            half_life_s=spec.half_life,
            decay=spec.decay,
            measure=measure,
            unit=_unit(measure, weighting),
            by="queue",
            usage=usage,
            unassigned=unassigned,
            capacity=total.capacity(),
            watermark_ms=watermark(fleet, end, min_coverage, weighting.shard, weighting.cluster),
            coverage=max(0, total.metered) / total.working if total.working > 0 else 1.0,
            policy_version=current.version.version if current.version is not None else None,
            gpu_weights=spec.gpu_weights if weighting.gpu_weights else {},
            price_book_version=weighting.book.version if weighting.book is not None else None,
            shard=weighting.shard,
            cluster=weighting.cluster,
            policy_counting=current.counting if weighting.cluster is not None else None,
            lost_ms=total.lost_ms,
            since_ms=min(end, max(start, min((first for first, _ in census.lives()), default=end))),
        )


class _Total:
    """The usage and capacity of the window while they are added up.

    GPU groups of equal weight are added as integers, by slice, and multiplied by the weight at the end, so the result
    is exact. `working` is the time of GPUs in service that were not down, without decay; `metered` is the part of it
    with a known measure. `lost_ms` is the end of the last quarter-hour during which a GPU was lost, 0 if none was."""

    def __init__(self, query: _Query, sums: SliceSums, in_down_time: SliceSums, cache: SumsCache) -> None:
        self._query = query
        self._sums = sums
        self._in_down_time = in_down_time
        self._groups = list(cache.groups)
        self._queue_refs = list(cache.queues)
        self._lines: dict[Fraction, list[npt.NDArray[np.int64]]] = defaultdict(list)
        self._available: dict[Fraction, Integers] = defaultdict(lambda: np.zeros(len(query.slices), dtype=object))
        self.working = 0
        self.metered = 0
        self.lost_ms = 0

    def add(self, piece: _Piece) -> None:
        """Add the sums of the slices of a piece, and the time for which its GPUs were in service."""
        sums, weighting = self._sums, self._query.weighting
        numbers = np.unique(sums.keys[sums.lines_of(piece.tags), GROUP]).tolist()
        number_of = {self._groups[number]: number for number in numbers}
        for group in number_of.keys() | piece.censuses.keys():
            if weighting.includes(group):
                self._add_group(piece, group, number_of.get(group, -1))

    def _add_group(self, piece: _Piece, group: GpuGroup, number: int) -> None:
        """Add a GPU group of a piece; `number` is the group's number in the sums.

        Time without a weight counts neither as usage nor as capacity, and lowers the coverage."""
        query, tags = self._query, piece.tags
        lines, by_slice = self._sums.of_group(tags, number)
        _, down_by_slice = self._in_down_time.of_group(tags, number)
        rows, rows_in_down_time = (Figures(*table.sum(axis=0).tolist()) for table in (by_slice, down_by_slice))
        lost = np.flatnonzero(by_slice[:, _LOST])
        if len(lost):
            last = int(query.slices.starts[tags.start + lost[-1]])
            self.lost_ms = max(self.lost_ms, min(next_quarter(last), int(query.slices.ends[-1])))
        available = -by_slice[:, _LOST]
        census = piece.censuses.get(group)
        if census is not None:
            available = available + self._of_gpus(tags, census, down_by_slice[:, _ALLOCATED] + down_by_slice[:, _LOST])
        # Time that was held or lost during a node's down time is already included in it.
        self.working += rows_in_down_time.plain_allocated + rows_in_down_time.plain_lost - rows.plain_lost
        weight = query.weighting.weight(group, int(query.slices.starts[tags.start]))
        if weight is None:
            return
        unknown = {"busy": rows.plain_unknown, "energy": rows.plain_blind}.get(query.measure, 0)
        self.metered += rows.plain_allocated + rows.plain_unheld - rows_in_down_time.plain_unheld - unknown
        self._lines[weight].append(lines)
        by_tag = self._available[weight][tags.start : tags.stop]
        by_tag += by_slice[:, _ENERGY] if query.measure == "energy" else available

    def _of_gpus(self, tags: range, census: GpuCensus, in_down_time: Integers) -> Integers:
        """Return by slice the time of GPUs in service without their nodes' down time, decayed, and add it without decay
        to `working`. `in_down_time` is the time that was held or lost during down time, by slice.

        The decayed terms are rounded. If everything is lost, a slice may therefore be slightly below 0."""
        slices, half_life_s, within = self._query.slices, self._query.half_life_s, slice(tags.start, tags.stop)
        ends, spans = slices.ends[within], slices.spans(tags)
        lengths, ages = ends - slices.starts[within], slices.references[within] - ends

        @cache
        def decayed(length_ms: int, age_ms: int) -> int:
            return term(full_us(length_ms), factor(0, length_ms, length_ms + age_ms, half_life_s))

        throughout, parts = in_service(census.lives(), spans)
        counts = np.array(throughout, np.int64)
        available: Integers = counts * np.array(list(map(decayed, lengths.tolist(), ages.tolist())), np.int64)
        self.working += full_us(int(lengths @ counts))
        down = [(span.tag, (span.start_ms, span.end_ms), -1) for span in down_in(census.down(), spans)]
        for index, (start, end), count in (*parts, *down):
            available[index] += decayed(end - start, int(ends[index] + ages[index]) - end) * count
            self.working += full_us(end - start) * count
        for index in {index for index, _, _ in down}:
            available[index] += in_down_time[index]
        return available

    def usage_by_leaf(self) -> dict[str, int]:
        """Return the usage of each queue without its descendants, in the window's unit; usage outside all queues as
        UNASSIGNED."""
        query, sums = self._query, self._sums
        queues, queue_of = self._queues()
        column = sums.values[:, MEASURED[query.measure]]
        usage: dict[str, Fraction] = defaultdict(Fraction)
        for weight, parts in self._lines.items():
            lines = np.concatenate(parts)
            lines = lines[queue_of[lines] >= 0]
            by_slice: Integers = np.zeros((len(queues), len(query.slices)), dtype=sums.values.dtype)
            np.add.at(by_slice, (queue_of[lines], sums.tag[lines]), column[lines])
            for queue, values in zip(queues, by_slice, strict=True):
                usage[queue] += weight * query.combined(values)
        return {queue: round(value) for queue, value in usage.items()}

    def _queues(self) -> tuple[list[str], npt.NDArray[np.int64]]:
        """Return the names of the queues, and for each line the index of its queue by the policy of its slice; -1
        without a payer."""
        numbers: dict[str, int] = {}
        queue_of = np.full(len(self._sums.tag), -1)
        for tags, rules in self._query.policies:
            lines = self._sums.lines_of(tags)
            refs, ref_of = np.unique(self._sums.keys[lines, QUEUE], return_inverse=True)
            queue_of_ref = [
                -1 if ref == NO_PAYER else numbers.setdefault(rules.queue(self._queue_refs[ref] or ""), len(numbers))
                for ref in refs.tolist()
            ]
            queue_of[lines] = np.array(queue_of_ref, np.int64)[ref_of]
        return list(numbers), queue_of

    def capacity(self) -> int:
        """Return the capacity in the window's unit. A negative value can only come from rounding and becomes 0."""
        available = self._available.items()
        return round(sum(weight * self._query.combined(np.maximum(values, 0)) for weight, values in available))


def _unit(measure: Measure, weighting: Weighting) -> str:
    if weighting.book is not None:
        return f"1e-{COST_UNIT_PLACES} {weighting.book.currency}"
    return "uj" if measure == "energy" else "weighted_gpu_us" if weighting.gpu_weights else "gpu_us"
