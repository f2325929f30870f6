"""Computes a usage window: usage per queue, capacity, coverage and watermark.

The window is split into slices at every quarter-hour and where the mapping of queues or the place of a GPU changes. The
sums of each slice come from accountant.storage.query.window_sums, mostly from its cache; the capacity comes from the
lifetimes of the GPUs. Sums of places with equal weight are added as integers, decayed by the age of their slice,
combined, and multiplied once by the weight (accountant.storage.query.window_weights).

Down time, of a node or of a lost GPU, is not capacity; time when both are down counts once.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import compress, groupby, pairwise
from zoneinfo import ZoneInfo

import numpy as np
import numpy.typing as npt

from accountant.core.accounts import full_us
from accountant.core.claim_overlap import Span, cut
from accountant.core.errors import UnsupportedQuestion
from accountant.core.window_decay import age_weights, bounds, combine, factor, slurm_weights, term
from accountant.ledger.team_assignment import NO_POLICY, Assignment, in_force
from accountant.storage.duckdb_engine import Cursor
from accountant.storage.gpu_lifetimes import Fleet, GpuCensus, in_service
from accountant.storage.ledger_state import State
from accountant.storage.query.window_sums import (
    NO_PAYER,
    NO_SUMS,
    Buckets,
    Figures,
    Numbers,
    Parts,
    Reader,
    RowSpan,
    Sums,
    SumsCache,
    SumsPart,
    TimeSlice,
    View,
    added_up,
    exact,
    without_spans,
)
from accountant.storage.query.window_weights import (
    COST_UNIT_PLACES,
    ByCluster,
    BySurroundings,
    Device,
    Lens,
    Place,
    Placement,
    placement_changes,
    shard_of,
)
from accountant.storage.span_plan import EVERY_GPU, TaggedSpan, quarters
from accountant.wire.policy_models import UNASSIGNED, Measure, UsageWindow, WindowSpec
from gputally.base.units import BUCKET_MS, MS_PER_SECOND

MEASURED: Mapping[Measure, int] = {
    "allocated": Figures._fields.index("allocated"),
    "busy": Figures._fields.index("busy"),
    "energy": Figures._fields.index("energy"),
    "cost": Figures._fields.index("allocated"),
}
"""The column of `Figures` that each measure sums. A cost is that of allocated time; otherwise holding idle GPUs would
be free."""
_LOST, _ENERGY = Figures._fields.index("lost"), Figures._fields.index("energy")
_START, _END, _PLACE, _QUEUE = range(4)


@dataclass(frozen=True, slots=True)
class _Question:
    """One window query. slices: the parts of the window; policies: the policy of each slice; pieces: runs of slices
    during which no GPU changes its place."""

    spec: WindowSpec
    at_ms: int
    measure: Measure
    min_coverage: float
    lens: Lens
    slices: Sequence[TimeSlice]
    policies: Sequence[Assignment]
    pieces: Sequence[_Piece]

    @property
    def half_life_s(self) -> int | None:
        """The half-life that decays the sums within slices; None for Slurm's decay, which applies to whole slices
        only."""
        return None if self.spec.decay == "slurm" else self.spec.half_life

    def ages(self) -> Sequence[float] | None:
        """The weight of each slice by its age; None without decay."""
        if self.spec.decay == "slurm":
            return slurm_weights((start for start, _ in self.slices), self.at_ms, self.spec.half_life)
        references = (one.reference_ms(self.half_life_s) for one in self.slices)
        return age_weights(references, self.at_ms, self.half_life_s)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Slices [first, last) of the window, during which no GPU changes its place. gpus: the GPUs of each place that the
    lens includes."""

    first: int
    last: int
    placement: Placement
    gpus: Mapping[Place, _Gpus]


@dataclass(frozen=True, slots=True)
class _Gpus:
    """lives: number of GPUs in service, by span. down: their down time, tagged with the slice."""

    lives: Mapping[Span, int]
    down: Sequence[TaggedSpan]


@dataclass(slots=True)
class _SliceSums:
    """The sums of all slices, one line per slice, place and queue, in the order of the slices; and the part of them
    inside down time, by the number of the slice."""

    number: npt.NDArray[np.int64]
    keys: npt.NDArray[np.int64]
    values: Numbers
    down: Mapping[int, Sums]

    @classmethod
    def of(cls, found: Mapping[int, Parts], down: Mapping[int, Sums]) -> _SliceSums:
        numbered = [(number, sums) for number in sorted(found) for sums in found[number]] or [(0, NO_SUMS)]
        return cls(
            np.repeat([number for number, _ in numbered], [len(sums.keys) for _, sums in numbered]),
            np.concatenate([sums.keys for _, sums in numbered]),
            exact(np.concatenate([sums.values for _, sums in numbered])),
            down,
        )

    def within(self, first: int, last: int) -> slice:
        """The lines of the slices [first, last)."""
        low, high = np.searchsorted(self.number, [first, last]).tolist()
        return slice(low, high)


class Windows:
    """Computes windows from cached sums. Thread-safe. month_zone: time zone of calendar windows."""

    def __init__(self, month_zone: ZoneInfo) -> None:
        self._zone = month_zone
        self.sums = SumsCache()

    def bounds(self, spec: WindowSpec, at_ms: int) -> tuple[int, int]:
        """The window's [start_ms, end_ms)."""
        return bounds(spec, at_ms, self._zone)

    def watermark(
        self, fleet: Fleet, end_ms: int, min_coverage: float, shard: str | None = None, cluster: str | None = None
    ) -> int | None:
        """The watermark of every window that ends at `end_ms`."""
        if shard is None:
            census = fleet.census_of(_only(fleet, cluster))
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
        """See accountant.ledger.protocols.Ledger.window. usage includes descendants, by queue name. The capacity of
        measure `energy` is all energy recorded. cursor: of the snapshot of `state`; None: use only the cache, and
        return None if that is not enough. Raises UnsupportedQuestion."""
        if measure == "cost" and lens.book is None:
            raise UnsupportedQuestion("without a price book nothing has a cost: ask for allocated, busy or energy")
        if measure in ("cost", "energy") and lens.gpu_weights:
            raise UnsupportedQuestion(f"weights of models are for GPU time, and this window measures {measure}")
        question = self._question(state, spec, at_ms, measure, min_coverage, lens)
        held = self._held(cursor, state, question)
        return None if held is None else self._answer(state, question, held)

    def _question(
        self, state: State, spec: WindowSpec, at_ms: int, measure: Measure, min_coverage: float, lens: Lens
    ) -> _Question:
        start, end = self.bounds(spec, at_ms)
        moved = set() if lens.trivial else {*placement_changes(state.fleet, start, end), *lens.cuts(start, end)}
        period = spec.calc_period * MS_PER_SECOND
        ticks = range(start - start % period, end, period) if spec.decay == "slurm" else ()
        slices, policies = _slices(state, start, end, [*moved, *ticks])
        starts = [one.start_ms for one in slices]
        runs = pairwise(bisect_left(starts, at) for at in (start, *sorted(moved), end))
        pieces = [_piece(state.fleet, lens, slices, first, last) for first, last in runs if first < last]
        return _Question(spec, at_ms, measure, min_coverage, lens, slices, policies, pieces)

    def _held(self, cursor: Cursor | None, state: State, question: _Question) -> _SliceSums | None:
        """The sums of the slices; None if they are not cached and there is no cursor."""
        if not any(piece.gpus for piece in question.pieces):
            return _SliceSums.of({}, {})  # an unknown cluster has no sums, and its name is not added to the cache
        view = View(question.half_life_s, question.lens.placing(state.fleet))
        gathering = _Gathering(self.sums, state, view, question.slices)
        for piece in question.pieces:
            gathering.gather(piece)
        if gathering.missing:
            if cursor is None:
                return None
            gathering.read(cursor, profiles=question.lens.tells_profiles)
        return _SliceSums.of(gathering.found, gathering.down)

    def _answer(self, state: State, question: _Question, held: _SliceSums) -> UsageWindow:
        ages, slices, total = question.ages(), question.slices, _Total(question, held)
        for piece in question.pieces:
            lines = held.within(piece.first, piece.last)
            places = held.keys[lines, _PLACE]
            known = {self.sums.places.names[number]: number for number in np.unique(places).tolist()}
            for place in known.keys() | piece.gpus.keys():
                if question.lens.sees(place):
                    number = known.get(place, -1)
                    total.add(piece, place, number, np.flatnonzero(places == number) + lines.start)
        usage, unassigned = rolled_up(total.leaves(self.sums.queues.names, ages), question.policies)
        return self._told(
            state.fleet,
            question,
            usage=usage,
            unassigned=unassigned,
            capacity=total.capacity(ages),
            coverage=max(0, total.metered) / total.working if total.working > 0 else 1.0,
            lost_ms=_newest((slices[number] for number in total.lost), slices[-1].end_ms if slices else 0),
        )

    def _told(
        self,
        fleet: Fleet,
        question: _Question,
        *,
        usage: Mapping[str, int],
        unassigned: int,
        capacity: int,
        coverage: float,
        lost_ms: int,
    ) -> UsageWindow:
        spec, lens, policies = question.spec, question.lens, question.policies
        start, end = self.bounds(spec, question.at_ms)
        in_force_now = policies[-1].version if policies else None
        census = fleet.census_of(_only(fleet, lens.cluster))
        return UsageWindow(
            kind=spec.kind,
            start_ms=start,
            end_ms=end,
            half_life_s=spec.half_life,
            decay=spec.decay,
            measure=question.measure,
            unit=_unit(question.measure, lens),
            by="queue",
            usage=dict(usage),
            unassigned=unassigned,
            capacity=capacity,
            watermark_ms=self.watermark(fleet, end, question.min_coverage, lens.shard, lens.cluster),
            coverage=coverage,
            policy_version=in_force_now.version if in_force_now is not None else None,
            gpu_weights=spec.gpu_weights if lens.gpu_weights else {},
            price_book_version=lens.book.version if lens.book is not None else None,
            shard=lens.shard,
            cluster=lens.cluster,
            policy_counting=policies[-1].counting if policies and lens.cluster is not None else None,
            lost_ms=lost_ms,
            since_ms=min(end, max(start, min((begun for begun, _ in census.lives()), default=end))),
        )


class _Gathering:
    """Takes the sums of slices from the cache, and reads missing ones from the ledger."""

    def __init__(self, cache: SumsCache, state: State, view: View, slices: Sequence[TimeSlice]) -> None:
        self._cache = cache
        self._state = state
        self._view = view
        self._slices = slices
        self._cached: Buckets = cache.cached(view, state.version)
        self.found: dict[int, Parts] = {}
        self.down: dict[int, Sums] = {}
        self.missing: dict[int, _Missing] = {}
        """The slices that are not cached, by the number of the piece's first slice."""
        self._collapsed: list[tuple[int, SumsPart, Sums]] = []

    def gather(self, piece: _Piece) -> None:
        """Takes the cached sums of a piece's slices and notes the missing ones."""
        lacking = _Missing(piece)
        begin = self._slices[piece.first].start_ms
        for number in range(piece.first, piece.last):
            one = self._slices[number]
            since = begin if self._view.placing is not None and begin > one.bucket else 0
            if one.bucket >= self._state.fleet.newest_end_ms:
                continue  # nothing is booked there yet
            known = self._cached.get(one.bucket, {})
            if one.whole:
                parts = known.get(SumsPart()) or self._without_spans(one.bucket, known)
                if parts is None:
                    lacking.whole.append(number)
                else:
                    self.found[number] = parts
            elif not self._view.steady:
                lacking.cut.append(number)
            else:
                by_span = SumsPart(by_span=True, since_ms=since)
                if by_span in known:
                    self._inside(number, added_up(known[by_span]), lacking)
                else:
                    lacking.spans.append((number, by_span))
        for number, spans in _by_slice(piece).items():
            if self._slices[number].bucket < self._state.fleet.newest_end_ms:
                part = SumsPart(down=tuple((span.gpu, span.start_ms, span.end_ms) for span in spans), since_ms=begin)
                known = self._cached.get(self._slices[number].bucket, {})
                if part in known and self._cacheable(number):
                    self.down[number] = added_up(known[part])
                else:
                    lacking.down[number] = part
        if lacking:
            self.missing[piece.first] = lacking
        self._cache.remember(self._view, self._state.version, self._collapsed)
        self._collapsed = []

    def read(self, cursor: Cursor, *, profiles: bool) -> None:
        """Reads the missing sums from the snapshot of `cursor`. profiles: whether MIG profiles are distinguished."""
        rows = cursor.run("SELECT id, gpu, node, gpu_model, if(?, profile, '') FROM device", [profiles])
        devices = [Device(*row) for row in rows]
        reader = Reader(cursor, self._state, self._view.half_life_s, self._cache.queues)
        read: list[tuple[int, SumsPart, Sums]] = []
        for lacking in self.missing.values():
            place = lacking.piece.placement.place
            places = {device.id: self._cache.places[place(device)] for device in devices}
            at = {self._slices[number].start_ms: number for number in lacking.whole}
            for bucket, sums in reader.quarters(at, places).items():
                self.found[at[bucket]] = (sums,)
                read.append((bucket, SumsPart(), sums))
            spans = [self._all_of(number, bucket=True) for number, _ in lacking.spans]
            parts = dict(lacking.spans)
            for number, sums in reader.rows(spans, places).items():
                self._inside(number, sums, lacking)
                read.append((self._slices[number].bucket, parts[number], sums))
            for number, sums in reader.rows([self._all_of(number) for number in lacking.cut], places).items():
                self.found[number] = (sums,)
            reaching = [self._all_of(number) for number in {*lacking.cut, *lacking.over}]
            for number, sums in reader.reaching_over(reaching, places).items():
                self.found[number] = (*self.found[number], sums)
            for number, sums in self._down_time(reader, lacking, places):
                self.down[number] = sums
                if self._cacheable(number):
                    read.append((self._slices[number].bucket, lacking.down[number], sums))
        self._cache.remember(self._view, self._state.version, read)

    def _without_spans(self, bucket: int, known: Mapping[SumsPart, Parts]) -> Parts | None:
        """The sums of a whole quarter-hour, added up from cached sums by row span; None if these are not cached."""
        by_span = known.get(SumsPart(by_span=True))
        if by_span is None:
            return None
        whole = without_spans(added_up(by_span))
        self._collapsed.append((bucket, SumsPart(), whole))
        return (whole,)

    def _inside(self, number: int, sums: Sums, lacking: _Missing) -> None:
        """Takes the part inside the slice from a quarter-hour's sums by row span."""
        start, end = self._slices[number]
        starts, ends = sums.keys[:, _START], sums.keys[:, _END]
        inside = (starts >= start) & (ends <= end)
        self.found[number] = (Sums(sums.keys[inside], sums.values[inside]),)
        if bool(((starts < end) & (ends > start) & ~inside).any()):
            lacking.over.append(number)

    def _all_of(self, number: int, *, bucket: bool = False) -> RowSpan:
        """The rows to read for a slice or, with bucket, for its whole quarter-hour by row span."""
        one = self._slices[number]
        if bucket:
            end = one.bucket + BUCKET_MS
            return RowSpan(number, EVERY_GPU, one.bucket, end, end, 1)
        return RowSpan(number, EVERY_GPU, *one, one.reference_ms(self._view.half_life_s), 0)

    def _down_time(self, reader: Reader, lacking: _Missing, places: Mapping[int, int]) -> Iterator[tuple[int, Sums]]:
        """The sums of the rows inside down time, by slice."""
        asked: list[RowSpan] = []
        of_span: list[int] = []
        for number, part in lacking.down.items():
            reference = self._slices[number].reference_ms(self._view.half_life_s)
            for gpu, start, end in part.down:
                asked.append(RowSpan(len(of_span), gpu, start, end, reference, 0))
                of_span.append(number)
        inside = reader.rows(asked, places)
        cut = [one for one in asked if one.start_ms % BUCKET_MS or one.end_ms % BUCKET_MS]
        over = reader.reaching_over(cut, places) if cut else {}
        parts: dict[int, list[Sums]] = {number: [] for number in lacking.down}
        for found in (inside, over):
            for tag, sums in found.items():
                parts[of_span[tag]].append(sums)
        for number, several in parts.items():
            yield number, added_up(several)

    def _cacheable(self, number: int) -> bool:
        return self._view.steady or self._slices[number].whole


@dataclass(slots=True)
class _Missing:
    """Numbers of slices that are not cached. whole: whole quarter-hours. spans: slices to be cut from their
    quarter-hour's sums by row span. cut: slices that are read directly. over: slices with rows that reach over their
    edge. down: slices with down time."""

    piece: _Piece
    whole: list[int] = field(default_factory=list)
    spans: list[tuple[int, SumsPart]] = field(default_factory=list)
    cut: list[int] = field(default_factory=list)
    over: list[int] = field(default_factory=list)
    down: dict[int, SumsPart] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any((self.whole, self.spans, self.cut, self.over, self.down))


class _Total:
    """Adds places of equal weight as integers, by slice, and multiplies by the weight at the end, exactly."""

    def __init__(self, question: _Question, held: _SliceSums) -> None:
        self._question = question
        self._held = held
        self._lines: dict[Fraction, list[npt.NDArray[np.int64]]] = defaultdict(list)
        self._available: dict[Fraction, list[int]] = defaultdict(lambda: [0] * len(question.slices))
        self.working = 0
        self.metered = 0
        self.lost: list[int] = []
        """Numbers of slices during which a GPU was lost."""

    def add(self, piece: _Piece, place: Place, number: int, lines: npt.NDArray[np.int64]) -> None:
        """Adds a place of a piece. number: the number of the place; lines: lines of `held`.

        Time without a weight counts neither as usage nor as capacity, and lowers the coverage."""
        question, held, first = self._question, self._held, piece.first
        slices = question.slices[first : piece.last]
        by_slice = np.zeros((len(slices), len(Figures._fields)), dtype=held.values.dtype)
        np.add.at(by_slice, held.number[lines] - first, held.values[lines])
        rows = Figures(*by_slice.sum(axis=0).tolist())
        lost, energy = by_slice[:, _LOST].tolist(), by_slice[:, _ENERGY].tolist()
        self.lost += compress(range(first, piece.last), lost)
        gpus = piece.gpus.get(place, _Gpus({}, ()))
        rows_down = {
            tag - first: figures for tag in range(first, piece.last) if (figures := _of_place(held.down, tag, number))
        }
        capacity = _capacity(gpus, rows_down, lost, slices, first, question.half_life_s)
        self.working += capacity.working - rows.plain_lost
        weight = question.lens.weight(place, slices[0].start_ms)
        if weight is None:
            return
        self.metered += _metered(rows, capacity, question.measure)
        self._lines[weight].append(lines)
        available = self._available[weight]
        of_slices = energy if question.measure == "energy" else capacity.available
        available[first : piece.last] = map(sum, zip(available[first : piece.last], of_slices, strict=True))

    def leaves(self, queue_refs: Sequence[str | None], ages: Sequence[float] | None) -> dict[str, int]:
        """Usage of each queue without its descendants, in the window's unit; usage outside all queues as UNASSIGNED.

        queue_refs: the queue references of pods, by number."""
        queues, held = self._queues(queue_refs), self._held
        column = held.values[:, MEASURED[self._question.measure]]
        usage: dict[str, Fraction] = defaultdict(Fraction)
        for weight, several in self._lines.items():
            lines = np.concatenate(several)
            lines = lines[queues.of_line[lines] >= 0]
            shape = len(queues.names), len(self._question.slices)
            values: Numbers = np.zeros(shape, dtype=held.values.dtype)
            np.add.at(values, (queues.of_line[lines], held.number[lines]), column[lines])
            for queue, own in zip(queues.names, _combined(values, ages), strict=True):
                usage[queue] += weight * own
        return {queue: round(value) for queue, value in usage.items()}

    def _queues(self, queue_refs: Sequence[str | None]) -> _Queues:
        """The queue of every line, by the policy of its slice."""
        numbers: dict[str, int] = {}
        of_line = np.full(len(self._held.number), -1)
        for rules, run in groupby(enumerate(self._question.policies), lambda pair: pair[1]):
            tags = [tag for tag, _ in run]
            lines = self._held.within(tags[0], tags[-1] + 1)
            refs, place = np.unique(self._held.keys[lines, _QUEUE], return_inverse=True)
            of_ref = [
                -1 if ref == NO_PAYER else numbers.setdefault(rules.queue(queue_refs[ref] or ""), len(numbers))
                for ref in refs.tolist()
            ]
            of_line[lines] = np.array(of_ref, np.int64)[place]
        return _Queues(list(numbers), of_line)

    def capacity(self, ages: Sequence[float] | None) -> int:
        """The capacity in the window's unit. A negative value, which can only come from rounding, becomes 0."""
        parts = (
            weight * combine(enumerate(max(0, value) for value in values), ages)
            for weight, values in self._available.items()
        )
        return round(sum(parts, Fraction(0)))


@dataclass(frozen=True, slots=True)
class _Queues:
    """names: of the queues. of_line: the queue number of each line; -1 without a payer."""

    names: Sequence[str]
    of_line: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Capacity:
    """In-service time of GPUs without their nodes' down time. available: by slice, decayed; terms are rounded, so it
    may be slightly below 0 if everything is lost. working: total without decay. down_unheld: rows without a holder
    during down time, without decay."""

    available: Sequence[int]
    working: int
    down_unheld: int


def _capacity(
    gpus: _Gpus,
    rows_down: Mapping[int, Figures],
    lost: Sequence[int],
    slices: Sequence[TimeSlice],
    first: int,
    half_life_s: int | None,
) -> _Capacity:
    """first: the number of the first slice. rows_down: sums of the rows inside down time, by slice. lost: time of lost
    GPUs in the rows, by slice."""
    down_us: dict[int, int] = defaultdict(int)
    working = 0
    for span in gpus.down:
        reference = slices[span.tag - first].reference_ms(half_life_s)
        weight = factor(span.start_ms, span.end_ms, reference, half_life_s)
        down_us[span.tag - first] += term(full_us(span.end_ms - span.start_ms), weight)
        working -= full_us(span.end_ms - span.start_ms)
    for rows in rows_down.values():
        # Time that was held or lost during a node's down time is already part of it.
        working += rows.plain_allocated + rows.plain_lost
    here = in_service(gpus.lives, slices)
    available = []
    for number, one in enumerate(slices):
        reference = one.reference_ms(half_life_s)
        mine = -lost[number]
        for (start, end), count in [(one, here.whole[number]), *here.parts.get(number, {}).items()]:
            if count:
                mine += term(full_us(end - start), factor(start, end, reference, half_life_s)) * count
                working += full_us(end - start) * count
        if number in down_us:
            rows = rows_down.get(number, Figures())
            mine -= down_us[number] - rows.allocated - rows.lost
        available.append(mine)
    return _Capacity(available, working, sum(rows.plain_unheld for rows in rows_down.values()))


def _of_place(down: Mapping[int, Sums], number: int, place: int) -> Figures | None:
    """The sums of a place's rows inside the down time of a slice."""
    sums = down.get(number)
    if sums is None or not (mine := sums.keys[:, _PLACE] == place).any():
        return None
    return Figures(*sums.values[mine].sum(axis=0).tolist())


def _metered(rows: Figures, capacity: _Capacity, measure: Measure) -> int:
    """Microseconds, without decay, for which the measure is known; the rest lowers the coverage."""
    known = rows.plain_allocated + rows.plain_unheld - capacity.down_unheld
    return known - (rows.plain_unknown if measure == "busy" else rows.plain_blind if measure == "energy" else 0)


def _combined(values: Numbers, ages: Sequence[float] | None) -> list[int]:
    """accountant.core.window_decay.combine of each row."""
    if ages is None:
        return [sum(row) for row in values.tolist()]
    return [round(math.fsum(row)) for row in (values * np.array(ages)).tolist()]


def _piece(fleet: Fleet, lens: Lens, slices: Sequence[TimeSlice], first: int, last: int) -> _Piece:
    placement = ByCluster(fleet, lens.cluster) if lens.trivial else BySurroundings(fleet, slices[first].start_ms)
    starts = [one.start_ms for one in slices[first:last]]
    gpus = {}
    for place, capacity in placement.capacity():
        if lens.sees(place):
            down = [
                TaggedSpan(tag, max(start, slices[tag].start_ms), min(end, slices[tag].end_ms), gpu)
                for gpu, (start, end) in capacity.down
                for tag in range(first + max(0, bisect_right(starts, start) - 1), first + bisect_left(starts, end))
                if start < slices[tag].end_ms
            ]
            gpus[place] = _Gpus(capacity.lives, down)
    return _Piece(first, last, placement, gpus)


def _by_slice(piece: _Piece) -> Mapping[int, list[TaggedSpan]]:
    """The down time of all places, by the number of the slice."""
    found: dict[int, list[TaggedSpan]] = defaultdict(list)
    for gpus in piece.gpus.values():
        for span in gpus.down:
            found[span.tag].append(span)
    return {number: sorted(spans, key=lambda span: (span.gpu, span.start_ms)) for number, spans in found.items()}


def _only(fleet: Fleet, cluster: str | None) -> str | None:
    """The cluster to select; None if it is the only one."""
    return None if cluster is None or fleet.clusters == {cluster} else cluster


def _newest(slices: Iterable[Span], end_ms: int) -> int:
    """End of the newest quarter-hour that contains one of the slices, at most the window's end."""
    return max((min(end_ms, -(-end // BUCKET_MS) * BUCKET_MS) for _, end in slices), default=0)


def _unit(measure: Measure, lens: Lens) -> str:
    if lens.book is not None:
        return f"1e-{COST_UNIT_PLACES} {lens.book.currency}"
    return "uj" if measure == "energy" else "weighted_gpu_us" if lens.gpu_weights else "gpu_us"


def _slices(
    state: State, start_ms: int, end_ms: int, edges: Collection[int]
) -> tuple[list[TimeSlice], list[Assignment]]:
    """The window split at quarter-hours, at changes of the queue mapping, and at `edges`; and the policy of each
    slice."""
    slices: list[TimeSlice] = []
    policies: list[Assignment] = []
    for begin, end, rules in in_force(state.policies, start_ms, end_ms):
        pieces = cut((begin, end), sorted(set(edges))) if edges else [(begin, end)]
        found = [TimeSlice(*span) for piece in pieces for span in quarters(*piece)]
        slices += found
        policies += [rules] * len(found)
    return slices, policies


def rolled_up(leaves: Mapping[str, int], policies: Sequence[Assignment]) -> tuple[dict[str, int], int]:
    """Usage per queue including descendants, and the usage that belongs to no queue.

    If a queue was removed from the policy, its usage goes to the queue that now has its refs. If no queue or several
    have them, the usage stays under the old name, and also counts for its former ancestors that still exist."""
    current = policies[-1] if policies else NO_POLICY
    usage = dict.fromkeys(current.queues, 0)
    for queue, value in leaves.items():
        if queue == UNASSIGNED or not value:
            continue
        for name in current.lineage(queue) or _heirs(queue, policies, current):
            usage[name] = usage.get(name, 0) + value
    return dict(sorted(usage.items())), leaves.get(UNASSIGNED, 0)


def _heirs(queue: str, policies: Sequence[Assignment], current: Assignment) -> list[str]:
    """The queues that receive the usage of a removed one, by the last policy that contained it."""
    before = next((rules for rules in reversed(policies) if queue in rules.queues), None)
    if before is None:
        return [queue]
    owners = {current.queue(ref) for ref in before.queues[queue].refs}
    if len(owners) == 1 and UNASSIGNED not in owners:
        return current.lineage(owners.pop())
    above = next((name for name in before.lineage(queue) if name in current.queues), None)
    return [queue, *(current.lineage(above) if above is not None else ())]
