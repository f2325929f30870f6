"""Computes a usage window: usage per queue, capacity, coverage and watermark.

The window is split into slices at every quarter-hour, and where the mapping of queues or the place of a GPU changes.
The sums of each slice come from `window_sums`, mostly from its cache. The capacity comes from the lifetimes of the
GPUs.

Sums of places with equal weight are added as integers. They are decayed by the age of their slice, combined, and
multiplied once by the weight (see `window_places_and_prices`).

Down time, of a node or of a lost GPU, is not capacity. Time when both are down counts once."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import chain, compress, groupby, pairwise
from operator import itemgetter
from zoneinfo import ZoneInfo

import numpy as np
import numpy.typing as npt

from accountant.core.claim_overlap import Span, cut
from accountant.core.errors import UnsupportedQuestion
from accountant.core.gpu_time_accounts import full_us
from accountant.core.window_decay import age_weights, bounds, combine, factor, reference_ms, slurm_weights, term
from accountant.ledger.team_assignment import NO_POLICY, Assignment, in_force, rolled_up
from accountant.storage.duckdb_engine import Cursor
from accountant.storage.gpu_lifetimes import Fleet, GpuCensus, down_in, in_service
from accountant.storage.ledger_state import State
from accountant.storage.query.window_places_and_prices import (
    COST_UNIT_PLACES,
    GpusInService,
    Lens,
    Place,
    Placement,
    placement_changes,
    shard_of,
)
from accountant.storage.query.window_sums import (
    NO_PAYER,
    NO_SUMS,
    Buckets,
    Figures,
    Form,
    Numbers,
    Reader,
    Sums,
    SumsCache,
    TimeSlice,
    View,
    added_up,
    exact,
    without_spans,
)
from accountant.storage.span_splitting import EVERY_GPU, quarters
from accountant.wire.policy_models import Measure, UsageWindow, WindowSpec
from gputally.base.units import BUCKET_MS, MS_PER_HOUR, MS_PER_SECOND

_ALLOCATED, _LOST, _ENERGY = map(Figures._fields.index, ("allocated", "lost", "energy"))
MEASURED: Mapping[Measure, int] = {
    "allocated": _ALLOCATED, "busy": Figures._fields.index("busy"), "energy": _ENERGY, "cost": _ALLOCATED,
}  # fmt: skip
"""The column of `Figures` that each measure sums.

A cost is that of allocated time. If it were that of busy time, holding idle GPUs would be free."""
_START, _END, _PLACE, _QUEUE = range(4)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Slices of the window during which no GPU changes its place.

    gpus: the GPUs of each place that the lens includes."""

    slices: Sequence[TimeSlice]
    placement: Placement
    gpus: Mapping[Place, GpusInService]

    @property
    def numbers(self) -> slice:
        """The numbers of the slices."""
        return slice(self.slices[0].tag, self.slices[-1].tag + 1)

    @property
    def spans(self) -> list[Span]:
        return [(one.start_ms, one.end_ms) for one in self.slices]


@dataclass(frozen=True)
class _Question:
    """One window query.

    slices: the parts of the window.
    policies: the policy of each slice.
    pieces: runs of slices during which no GPU changes its place."""

    spec: WindowSpec
    half_life_s: int | None
    """Half-life that decays the sums within slices. It is None for Slurm's decay too, which applies to whole slices
    only."""
    at_ms: int
    measure: Measure
    lens: Lens
    slices: Sequence[TimeSlice]
    policies: Sequence[Assignment]
    pieces: Sequence[_Piece]

    @classmethod
    def of(cls, state: State, spec: WindowSpec, between: Span, measure: Measure, lens: Lens) -> _Question:
        (start, end), fleet = between, state.fleet
        moved = [] if lens.trivial else sorted({*placement_changes(fleet, start, end), *lens.cuts(start, end)})
        period = spec.calc_period * MS_PER_SECOND
        ticks = range(start - start % period, end, period) if spec.decay == "slurm" else ()
        half_life_s = None if spec.decay == "slurm" else spec.half_life
        slices, policies = _slices(state, start, end, [*moved, *ticks], half_life_s)
        starts = [one.start_ms for one in slices]
        pieces = []
        for first, last in pairwise(bisect_left(starts, at) for at in (start, *moved, end)):
            if first < last:
                placement = Placement(fleet, lens, starts[first])
                pieces.append(_Piece(slices[first:last], placement, placement.gpus()))
        return cls(spec, half_life_s, end, measure, lens, slices, policies, pieces)

    @cached_property
    def ages(self) -> Sequence[float] | None:
        """Return the weight of each slice by its age; None without decay."""
        if self.spec.decay == "slurm":
            return slurm_weights((one.start_ms for one in self.slices), self.at_ms, self.spec.half_life)
        return age_weights((one.reference_ms for one in self.slices), self.at_ms, self.half_life_s)


@dataclass(slots=True)
class _SliceSums:
    """The sums of all slices, one line per slice, place and queue, in the order of the slices."""

    number: npt.NDArray[np.int64]
    keys: npt.NDArray[np.int64]
    values: Numbers

    @classmethod
    def of(cls, found: Mapping[int, Sums]) -> _SliceSums:
        numbered = sorted(found.items(), key=itemgetter(0)) or [(0, NO_SUMS)]
        return cls(
            np.repeat([number for number, _ in numbered], [len(sums.keys) for _, sums in numbered]),
            np.concatenate([sums.keys for _, sums in numbered]),
            exact(np.concatenate([sums.values for _, sums in numbered])),
        )

    def within(self, numbers: slice) -> slice:
        """Return the lines of the slices with these numbers."""
        low, high = np.searchsorted(self.number, [numbers.start, numbers.stop]).tolist()
        return slice(low, high)

    def of_place(self, piece: _Piece, place: int) -> tuple[npt.NDArray[np.int64], Numbers]:
        """Return the lines of a place in a piece, and their `Figures` by slice of the piece."""
        within = self.within(piece.numbers)
        lines = np.flatnonzero(self.keys[within, _PLACE] == place) + within.start
        by_slice = np.zeros((len(piece.slices), len(Figures._fields)), dtype=self.values.dtype)
        np.add.at(by_slice, self.number[lines] - piece.numbers.start, self.values[lines])
        return lines, by_slice


class Windows:
    """Computes windows from cached sums. Thread-safe.

    month_zone: time zone of calendar windows."""

    def __init__(self, month_zone: ZoneInfo) -> None:
        self._zone = month_zone
        self.sums = SumsCache()

    def bounds(self, spec: WindowSpec, at_ms: int) -> Span:
        """Return the window's [start_ms, end_ms)."""
        return bounds(spec, at_ms, self._zone)

    def watermark(
        self, fleet: Fleet, end_ms: int, min_coverage: float, shard: str | None = None, cluster: str | None = None
    ) -> int | None:
        """Return the watermark of every window that ends at `end_ms`."""
        if shard is None:
            census = fleet.census_of(fleet.one_of_several(cluster))
        else:
            census = GpuCensus.of(shard_of(fleet, shard, end_ms, cluster), fleet.life, fleet.newest_end_ms)
        return census.watermark(end_ms, min_coverage)

    def window(
        self,
        cursor: Cursor | None,
        state: State,
        spec: WindowSpec,
        at_ms: int,
        measure: Measure,
        min_coverage: float,
        lens: Lens,
    ) -> UsageWindow | None:
        """Return the window, see `Ledger.window`. Raises UnsupportedQuestion.

        The usage is by queue name and includes that of descendants. The capacity of the measure `energy` is all energy
        recorded.

        cursor: of the snapshot of `state`. If it is None, only the cache is used, and the result is None if that is not
            enough."""
        if measure == "cost" and lens.book is None:
            raise UnsupportedQuestion("without a price book nothing has a cost: ask for allocated, busy or energy")
        if measure in ("cost", "energy") and lens.gpu_weights:
            raise UnsupportedQuestion(f"weights of models are for GPU time, and this window measures {measure}")
        start, end = self.bounds(spec, at_ms)
        question = _Question.of(state, spec, (start, end), measure, lens)
        reading = _Reading(self.sums, cursor, state, question)
        if not all(reading.add(piece) for piece in question.pieces if piece.gpus):
            return None
        total = _Total(question, _SliceSums.of(reading.found), _SliceSums.of(reading.down), self.sums)
        for piece in question.pieces:
            total.add(piece)
        usage, unassigned = rolled_up(total.leaves(), question.policies)
        fleet, slices, current = state.fleet, question.slices, question.policies[-1] if question.policies else NO_POLICY
        census = fleet.census_of(fleet.one_of_several(lens.cluster))
        return UsageWindow(
            kind=spec.kind,
            start_ms=start,
            end_ms=end,
            half_life_s=spec.half_life,
            decay=spec.decay,
            measure=measure,
            unit=_unit(measure, lens),
            by="queue",
            usage=usage,
            unassigned=unassigned,
            capacity=total.capacity(),
            watermark_ms=self.watermark(fleet, end, min_coverage, lens.shard, lens.cluster),
            coverage=max(0, total.metered) / total.working if total.working > 0 else 1.0,
            policy_version=current.version.version if current.version is not None else None,
            gpu_weights=spec.gpu_weights if lens.gpu_weights else {},
            price_book_version=lens.book.version if lens.book is not None else None,
            shard=lens.shard,
            cluster=lens.cluster,
            policy_counting=current.counting if lens.cluster is not None else None,
            lost_ms=max((min(one.bucket + BUCKET_MS, slices[-1].end_ms) for one in total.lost), default=0),
            since_ms=min(end, max(start, min((begun for begun, _ in census.lives()), default=end))),
        )


@dataclass(slots=True)
class _Wanted:
    """Required sums of a slice.

    into: receives the sums.
    form: the form in which they are cached; None if they are not cached.
    spans: the rows to read if they are not in the cache.
    sums: None until they are known."""

    slice: TimeSlice
    into: dict[int, Sums]
    form: Form | None
    spans: Sequence[TimeSlice]
    sums: Sums | None = None


class _Reading:
    """Takes the sums of slices from the cache, or reads them from the snapshot of `cursor` and caches them.

    found: the sums of each slice, by its number.
    down: the part of them that lies inside down time."""

    def __init__(self, cache: SumsCache, cursor: Cursor | None, state: State, question: _Question) -> None:
        self._cache = cache
        self._cursor = cursor
        self._state = state
        self._question = question
        self._view = View(question.half_life_s, question.lens.placing(state.fleet))
        self._read: list[tuple[int, Form, Sums]] = []
        self.found: dict[int, Sums] = {}
        self.down: dict[int, Sums] = {}

    @cached_property
    def _cached(self) -> Buckets:
        return self._cache.cached(self._view, self._state.version)

    def add(self, piece: _Piece) -> bool:
        """Add the sums of a piece. Returns False if some are not cached and there is no cursor."""
        wanted = self._wanted(piece)
        for one in wanted:
            one.sums = self._known(one)
        missing = [one for one in wanted if one.sums is None]
        reader = None if self._cursor is None else self._reader(self._cursor, piece)
        if missing:
            if reader is None:
                return False
            self._read_missing(reader, missing)
        crossed: list[TimeSlice] = []
        for one in wanted:
            sums = one.into[one.slice.tag] = one.sums or NO_SUMS
            if one.form == "by_span":
                one.into[one.slice.tag], crossing = _inside(one.slice, sums)
                if crossing:
                    crossed.append(one.slice)
        if crossed:
            if reader is None:
                return False
            for number, sums in reader.straddling(crossed).items():
                self.found[number] = added_up([self.found[number], sums])
        if self._read:
            self._cache.remember(self._view, self._state.version, self._read)
            self._read = []
        return True

    def _wanted(self, piece: _Piece) -> list[_Wanted]:
        wanted, begin = [], piece.slices[0].start_ms
        down: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        of_gpus = chain.from_iterable(gpus.down for gpus in piece.gpus.values())
        for span in down_in(sorted(of_gpus), piece.spans):
            down[span.tag].append((span.gpu, span.start_ms, span.end_ms))
        for place, one in enumerate(piece.slices):
            if one.bucket >= self._state.fleet.newest_end_ms:
                break  # nothing is booked there yet
            if one.whole:
                wanted.append(_Wanted(one, self.found, "whole", [one]))
            elif self._view.steady and (self._view.placing is None or begin <= one.bucket):
                # Cached sums by row span belong to the places at the beginning of the quarter-hour.
                quarter = replace(one, start_ms=one.bucket, end_ms=one.bucket + BUCKET_MS, by_span=True)
                wanted.append(_Wanted(one, self.found, "by_span", [quarter]))
            else:
                wanted.append(_Wanted(one, self.found, None, [one]))
            if place in down:
                spans = [replace(one, gpu=gpu, start_ms=start, end_ms=end) for gpu, start, end in down[place]]
                wanted.append(_Wanted(one, self.down, tuple(down[place]) if one.whole else None, spans))
        return wanted

    def _known(self, one: _Wanted) -> Sums | None:
        """Return the cached sums. Those of a whole quarter-hour may be added up from its sums by row span."""
        known = self._cached.get(one.slice.bucket, {})
        if one.form == "whole" and "whole" not in known and "by_span" in known:
            whole = without_spans(known["by_span"])
            self._read.append((one.slice.bucket, "whole", whole))
            return whole
        return None if one.form is None else known.get(one.form)

    def _reader(self, cursor: Cursor, piece: _Piece) -> Reader:
        devices = self._state.device_names(cursor).items()
        places = {number: self._cache.places[piece.placement.place(device)] for number, device in devices}
        return Reader(cursor, self._view.half_life_s, self._cache.queues, places)

    def _read_missing(self, reader: Reader, missing: Sequence[_Wanted]) -> None:
        """Read sums that are not cached. Folded hours have quarter-hourly sums, but decayed sums need the rows."""
        at_hand = {
            one.slice.bucket: place
            for place, one in enumerate(missing)
            if one.form == "whole" and self._view.half_life_s is None
            and one.slice.bucket - one.slice.bucket % MS_PER_HOUR not in self._state.unfolded
        }  # fmt: skip
        found = {at_hand[bucket]: sums for bucket, sums in reader.folded(at_hand).items()} if at_hand else {}
        rest = sorted(set(range(len(missing))) - set(at_hand.values()))
        found |= reader.rows([replace(span, tag=place) for place in rest for span in missing[place].spans])
        for place, one in enumerate(missing):
            one.sums = found.get(place, NO_SUMS)
            if one.form is not None:
                self._read.append((one.slice.bucket, one.form, one.sums))


def _inside(within: TimeSlice, sums: Sums) -> tuple[Sums, bool]:
    """Return the part of a quarter-hour's sums by row span that lies inside a slice, and whether a row reaches over an
    edge."""
    starts, ends = sums.keys[:, _START], sums.keys[:, _END]
    inside = (starts >= within.start_ms) & (ends <= within.end_ms)
    crossing = (starts < within.end_ms) & (ends > within.start_ms) & ~inside
    return sums.of(inside), bool(crossing.any())


class _Total:
    """The usage and capacity of the window while they are added up.

    Places of equal weight are added as integers, by slice, and multiplied by the weight at the end, so the result is
    exact.

    working: time of GPUs in service that were not down, without decay.
    metered: the part of it with a known measure.
    lost: slices during which a GPU was lost."""

    def __init__(self, question: _Question, held: _SliceSums, in_down_time: _SliceSums, cache: SumsCache) -> None:
        self._question = question
        self._held = held
        self._in_down_time = in_down_time
        self._places = cache.places.names
        self._queue_refs = cache.queues.names
        self._lines: dict[Fraction, list[npt.NDArray[np.int64]]] = defaultdict(list)
        self._available: dict[Fraction, Numbers] = defaultdict(lambda: np.zeros(len(question.slices), dtype=object))
        self.working = 0
        self.metered = 0
        self.lost: list[TimeSlice] = []

    def add(self, piece: _Piece) -> None:
        """Add the sums of the slices of a piece, and its GPUs."""
        held, lens = self._held, self._question.lens
        numbers = np.unique(held.keys[held.within(piece.numbers), _PLACE]).tolist()
        known = {self._places[number]: number for number in numbers}
        for place in known.keys() | piece.gpus.keys():
            if lens.sees(place):
                self._add_place(piece, place, known.get(place, -1))

    def _add_place(self, piece: _Piece, place: Place, number: int) -> None:
        """Add a place of a piece. `number` is the number of the place.

        Time without a weight counts neither as usage nor as capacity, and lowers the coverage."""
        question = self._question
        lines, by_slice = self._held.of_place(piece, number)
        _, down_by_slice = self._in_down_time.of_place(piece, number)
        rows, inside = (Figures(*table.sum(axis=0).tolist()) for table in (by_slice, down_by_slice))
        available, energy = (-by_slice[:, _LOST]).tolist(), by_slice[:, _ENERGY].tolist()
        self.lost += compress(piece.slices, available)
        gpus = piece.gpus.get(place)
        if gpus is not None:
            self._add_gpus(piece, gpus, available, (down_by_slice[:, _ALLOCATED] + down_by_slice[:, _LOST]).tolist())
        # Time that was held or lost during a node's down time is already included in it.
        self.working += inside.plain_allocated + inside.plain_lost - rows.plain_lost
        weight = question.lens.weight(place, piece.slices[0].start_ms)
        if weight is None:
            return
        blind = {"busy": rows.plain_unknown, "energy": rows.plain_blind}.get(question.measure, 0)
        self.metered += rows.plain_allocated + rows.plain_unheld - inside.plain_unheld - blind
        self._lines[weight].append(lines)
        self._available[weight][piece.numbers] += energy if question.measure == "energy" else available

    def _add_gpus(self, piece: _Piece, gpus: GpusInService, available: list[int], in_down_time: Sequence[int]) -> None:
        """Add the time of GPUs in service to `available`, without their nodes' down time, decayed by slice of the
        piece.

        in_down_time: the time that was held or lost during down time, by slice.

        The decayed terms are rounded. If everything is lost, a slice may therefore be slightly below 0."""
        half_life_s = self._question.half_life_s
        for number, parts in enumerate(in_service(gpus.lives, piece.spans)):
            for (start, end), count in parts.items():
                weight = factor(start, end, piece.slices[number].reference_ms, half_life_s)
                available[number] += term(full_us(end - start), weight) * count
                self.working += full_us(end - start) * count
        down = down_in(gpus.down, piece.spans)
        for span in down:
            weight = factor(span.start_ms, span.end_ms, piece.slices[span.tag].reference_ms, half_life_s)
            available[span.tag] -= term(full_us(span.end_ms - span.start_ms), weight)
            self.working -= full_us(span.end_ms - span.start_ms)
        for number in {span.tag for span in down}:
            available[number] += in_down_time[number]

    def leaves(self) -> dict[str, int]:
        """Return the usage of each queue without its descendants, in the window's unit; usage outside all queues as
        UNASSIGNED."""
        question, held = self._question, self._held
        names, of_line = self._queues()
        column = held.values[:, MEASURED[question.measure]]
        usage: dict[str, Fraction] = defaultdict(Fraction)
        for weight, several in self._lines.items():
            lines = np.concatenate(several)
            lines = lines[of_line[lines] >= 0]
            values: Numbers = np.zeros((len(names), len(question.slices)), dtype=held.values.dtype)
            np.add.at(values, (of_line[lines], held.number[lines]), column[lines])
            for queue, own in zip(names, values.tolist(), strict=True):
                usage[queue] += weight * combine(own, question.ages)
        return {queue: round(value) for queue, value in usage.items()}

    def _queues(self) -> tuple[list[str], npt.NDArray[np.int64]]:
        """Return the names of the queues, and the queue number of each line by the policy of its slice; -1 without a
        payer."""
        numbers: dict[str, int] = {}
        of_line = np.full(len(self._held.number), -1)
        for rules, run in groupby(enumerate(self._question.policies), lambda pair: pair[1]):
            tags = [tag for tag, _ in run]
            lines = self._held.within(slice(tags[0], tags[-1] + 1))
            refs, place = np.unique(self._held.keys[lines, _QUEUE], return_inverse=True)
            of_ref = [
                -1 if ref == NO_PAYER else numbers.setdefault(rules.queue(self._queue_refs[ref] or ""), len(numbers))
                for ref in refs.tolist()
            ]
            of_line[lines] = np.array(of_ref, np.int64)[place]
        return list(numbers), of_line

    def capacity(self) -> int:
        """Return the capacity in the window's unit. A negative value can only come from rounding and becomes 0."""
        ages = self._question.ages
        available = self._available.items()
        return round(sum(weight * combine(np.maximum(values, 0).tolist(), ages) for weight, values in available))


def _unit(measure: Measure, lens: Lens) -> str:
    if lens.book is not None:
        return f"1e-{COST_UNIT_PLACES} {lens.book.currency}"
    return "uj" if measure == "energy" else "weighted_gpu_us" if lens.gpu_weights else "gpu_us"


def _slices(
    state: State, start_ms: int, end_ms: int, edges: Collection[int], half_life_s: int | None
) -> tuple[list[TimeSlice], list[Assignment]]:
    """Split the window at quarter-hours, at changes of the queue mapping, and at `edges`.

    Returns the slices, and the policy of each slice."""
    slices: list[TimeSlice] = []
    policies: list[Assignment] = []
    for begin, end, rules in in_force(state.policies, start_ms, end_ms):
        pieces = cut((begin, end), sorted(set(edges))) if edges else [(begin, end)]
        for span in chain.from_iterable(quarters(*piece) for piece in pieces):
            slices.append(TimeSlice(len(slices), *span, EVERY_GPU, reference_ms(*span, half_life_s)))
            policies.append(rules)
    return slices, policies
