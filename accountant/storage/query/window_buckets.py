"""Sums a window's usage and capacity per quarter-hour bucket as columns, and caches the buckets.

A stretch lies inside one quarter-hour. What a window needs of whole ones is remembered per half-life and
cluster (`accountant.storage.query.window_figures`), by the queue_ref of the pods; those it begins and ends in are
remembered span by span (`accountant.storage.query.window_span_cache`). A commit says which ones it touched, which
pods it brought facts of, and what it only added to: that is added here too, term by term as the engine would, so what a
window gains as time goes on is never asked for. A reader uses only what no commit after its own snapshot touched.
What it reads itself is remembered with what came meanwhile (`accountant.storage.query.window_concurrent_updates`).

A stretch lies inside one quarter-hour; where usage in it is decayed to is `Stretch.reference_ms`. The engine's
arithmetic is that of accountant.core.window_decay, operation by operation (`sql/decayed.sql`). Devices may be told
apart by kind.

The engine adds up rows by quarter-hour and payer; whose usage that is, is looked up once per payer, and added up by
queue as columns. The digits are those of `accountant.storage.query.window_buckets`. Decayed terms are whole numbers,
none below 0, which the engine adds up as floating-point numbers for a third less: that is exact as long as no sum
reaches 2^53, and where one does, it is asked again for integers.

Whole quarter-hours are added up as columns (`accountant.storage.query.window_buckets`); a part of one, and what
columns do not hold, row by row (`accountant.storage.query.window_buckets`). The digits are the same.

Down time is no capacity, whether a node's or a lost GPU's, and counts once where both are. Pure.

A fact about any pod makes everything forgotten, so what is remembered is as the newest commit with facts left it, and
only readers of that commit or a later one may use it. Thread-safe.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial, reduce
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from accountant.core import accounts
from accountant.core.accounts import AccountVector, full_us, part
from accountant.core.claim_overlap import Span
from accountant.core.window_decay import factor, reference_ms, term
from accountant.storage.duckdb_engine import Cursor, Row, statement
from accountant.storage.gpu_lifetimes import in_service
from accountant.storage.ledger_state import State
from accountant.storage.query.window_concurrent_updates import Reading
from accountant.storage.query.window_figures import EVERYBODY, NOTHING, ZERO, Figures, Found, View, figures, plus
from accountant.storage.query.window_prefetch import Soon
from accountant.storage.query.window_span_cache import Coming, Grain, Grains, Key, RowSpan, grown, total, within
from accountant.storage.span_plan import EVERY_GPU, TaggedSpan, near
from accountant.storage.write import record_columns
from accountant.storage.write.interval_writer import Booked
from accountant.storage.write.name_ids import PodKey
from accountant.wire.policy_models import Measure
from gputally.base.units import BUCKET_MS, MS_PER_HOUR, MS_PER_SECOND

Origin = tuple[PodKey, str]
"""The pod of a holder, and the queue_ref of it."""


class Stretch(NamedTuple):
    """Time inside one quarter-hour."""

    start_ms: int
    end_ms: int

    @property
    def bucket(self) -> int:
        """The start of the quarter-hour."""
        return self.start_ms - self.start_ms % BUCKET_MS

    def reference_ms(self, half_life_s: int | None) -> int:
        """To which usage in it is decayed."""
        return reference_ms(self.start_ms, self.end_ms, half_life_s)

    @property
    def whole(self) -> bool:
        return self.end_ms - self.start_ms == BUCKET_MS


def references(stretches: Sequence[Stretch], half_life_s: int | None) -> list[int]:
    """`Stretch.reference_ms` of each."""
    if reference_ms(0, 1, half_life_s) != BUCKET_MS:
        return [end for _, end in stretches]
    return [start - start % BUCKET_MS + BUCKET_MS for start, _ in stretches]


def measure(
    cursor: Cursor, spans: Sequence[TaggedSpan], stretches: Sequence[Stretch], view: View
) -> dict[int, dict[int, Figures]]:
    """By tag and payer. A span's tag is the index of the stretch it lies in. Exactly what the rows give."""
    found: dict[int, dict[int, Figures]] = defaultdict(dict)
    for group in near(spans):
        rows = [(s.tag, s.gpu, s.start_ms, s.end_ms, stretches[s.tag].reference_ms(view.half_life_s)) for s in group]
        for tag, payer, _, _, _, *values in decayed(cursor, rows, view, apart=False):
            # The same stretch may come in several groups: it has down time on many GPUs.
            found[tag][payer] = plus([found[tag].get(payer, Figures()), Figures(*values)])
        cut = [row[:4] for row in rows if row[2] % BUCKET_MS or row[3] % BUCKET_MS]
        if cut:
            # Only a span that ends inside a quarter-hour can have rows that reach over its edge.
            add_straddlers(found, cursor, cut, stretches, view)
    return found


def decayed(
    cursor: Cursor,
    rows: Sequence[tuple[int, int, int, int, int]],
    view: View,
    *,
    apart: bool,
    kinds: Mapping[int, int] | None = None,
) -> list[Row]:
    """Rows of decayed.sql. rows: of columns.STRETCH. apart: by the spans of the ledger's rows. kinds: class by device,
    of every device; None: not told apart."""
    bounds = {
        "low": min(row[2] for row in rows),
        "high": max(row[3] for row in rows),
        "half_life_ms": None if view.half_life_s is None else view.half_life_s * MS_PER_SECOND,
        "apart": int(apart),
    }
    return _by_kind(cursor, "decayed", bounds, record_columns.column_table(record_columns.STRETCH, rows), kinds, view)


def folded(cursor: Cursor, whole: Sequence[tuple[int, int, int]], kinds: Mapping[int, int] | None = None) -> list[Row]:
    """Rows of sum_folded.sql. whole: of columns.BUCKET."""
    if not whole:
        return []
    bounds = {"low": min(w[2] for w in whole), "high": max(w[2] for w in whole)}
    return _by_kind(cursor, "sum_folded", bounds, record_columns.column_table(record_columns.BUCKET, whole), kinds)


def _by_kind(
    cursor: Cursor,
    name: str,
    bounds: Mapping[str, int | None],
    incoming: object,
    kinds: Mapping[int, int] | None,
    view: View = EVERYBODY,
) -> list[Row]:
    kind, join = ("0", "") if kinds is None else ("k.kind", "JOIN kinds k ON k.id = e.device")
    text = statement(name).replace("{kind}", kind).replace("{kinds}", join).replace("{weight}", statement("weight"))
    text = text.replace("{only}", view.only)
    table = None if kinds is None else record_columns.column_table(record_columns.KIND, kinds.items())
    return cursor.run(text, {**bounds, **view.given}, incoming, None, table)


def straddlers(
    cursor: Cursor,
    spans: Sequence[tuple[int, int, int, int]],
    stretches: Sequence[Stretch],
    view: View,
    *,
    devices: bool,
) -> Iterator[tuple[int, int, int, Figures]]:
    """Tag, payer, device and figures of what reaches over the edges of spans (of columns.SPAN), cut there. devices:
    whether they are wanted."""
    bounds = {"low": min(s[2] for s in spans) - BUCKET_MS, "high": max(s[3] for s in spans), **view.given}
    text = statement("straddling").format(only=view.only)
    found = cursor.columns(text, bounds, record_columns.column_table(record_columns.SPAN, spans))
    table = np.stack([np.ma.getdata(column).astype(np.int64) for column in found.values()], axis=1)
    half_life_s = view.half_life_s
    references = {tag: stretches[tag].reference_ms(half_life_s) for tag, *_ in spans}
    # A window that begins at any second cuts the row of every GPU, and mostly that is all of its set.
    if not len(table):
        return
    apart = np.concatenate(([True], (table[1:, :8] != table[:-1, :8]).any(axis=1), [True]))
    alone = apart[1:] & apart[:-1]
    singles = table[alone]
    if accounts.fits(singles[:, 10:], singles[:, 6] - singles[:, 5]):
        singles[:, 8] *= devices
        yield from _cut_at_once(singles, references, half_life_s)
        table = table[~alone]
    for _, group in groupby(table.tolist(), key=itemgetter(*range(8))):
        yield from _cut(list(group), references, half_life_s)


def _cut(
    members: Sequence[Sequence[int]], references: Mapping[int, int], half_life_s: int | None
) -> Iterator[tuple[int, int, int, Figures]]:
    """Of one set."""
    tag, since, until, _, _, start, end = members[0][:7]
    begin, stop = max(start, since), min(end, until)
    weight = factor(begin, stop, references[tag], half_life_s)
    parts = part([AccountVector(*row[10:]) for row in members], end - start, begin - start, stop - start)
    for row, cells in zip(members, parts, strict=True):
        yield tag, row[9], row[8], figures(cells, weight)


def _cut_at_once(
    table: npt.NDArray[np.int64], references: Mapping[int, int], half_life_s: int | None
) -> Iterator[tuple[int, int, int, Figures]]:
    """Of sets of one row each, added up by tag, payer and device."""
    tags, sinces, untils, starts, ends = (table[:, number] for number in (0, 1, 2, 5, 6))
    begins, stops = np.maximum(starts, sinces), np.minimum(ends, untils)
    held = accounts.parts(table[:, 10:], ends - starts, begins - starts, stops - starts)
    spans = list(zip(tags.tolist(), begins.tolist(), stops.tolist(), strict=True))
    weight_of = {span: factor(span[1], span[2], references[span[0]], half_life_s) for span in set(spans)}
    weights = [weight_of[span] for span in spans]
    values = accounts.figures(held, weights)
    for (tag, payer, device), sums in accounts.summed(table[:, [0, 9, 8]], values).items():
        yield tag, payer, device, Figures(*sums)


def by_kind(
    cursor: Cursor,
    spans: Sequence[TaggedSpan],
    stretches: Sequence[Stretch],
    half_life_s: int | None,
    kinds: Mapping[int, int],
) -> Iterator[tuple[int, int, int, Figures]]:
    """Tag, payer, kind of device and figures; a key may come several times. See `measure`."""
    view = View(half_life_s)
    for group in near(spans):
        rows = [(s.tag, s.gpu, s.start_ms, s.end_ms, stretches[s.tag].reference_ms(half_life_s)) for s in group]
        for tag, payer, _, _, kind, *values in decayed(cursor, rows, view, apart=False, kinds=kinds):
            yield tag, payer, kind, Figures(*values)
        cut = [row[:4] for row in rows if row[2] % BUCKET_MS or row[3] % BUCKET_MS]
        for tag, payer, device, found in straddlers(cursor, cut, stretches, view, devices=True) if cut else ():
            yield tag, payer, kinds[device], found


def add_straddlers(
    found: dict[int, dict[int, Figures]],
    cursor: Cursor,
    spans: Sequence[tuple[int, int, int, int]],
    stretches: Sequence[Stretch],
    view: View,
) -> None:
    for tag, payer, _, cut in straddlers(cursor, spans, stretches, view, devices=False):
        found[tag][payer] = plus([found[tag].get(payer, ZERO), cut])


def assigned(of_payer: Mapping[int, Figures], origins: Mapping[int, Origin]) -> Found:
    by_ref: dict[str, list[Figures]] = defaultdict(list)
    for payer, held in of_payer.items():
        if payer:
            by_ref[origins[payer][1]].append(held)
    return Found(plus(of_payer.values()), {ref: plus(several) for ref, several in by_ref.items()})


def hour_of(stretch: Stretch) -> int:
    return stretch.start_ms - stretch.start_ms % MS_PER_HOUR


def origins_of(cursor: Cursor, payers: Collection[int]) -> dict[int, Origin]:
    """Per holder id: (cluster, uid) and the queue_ref of its pod."""
    if not payers:
        return {}
    rows = cursor.rows(
        "holder_origins", incoming=record_columns.column_table(record_columns.ID, [(i,) for i in sorted(payers)])
    )
    return {number: ((cluster, uid), ref) for number, cluster, uid, ref in rows}


MOST_RUNS = 4
"""Statements for quarter-hours that do not follow each other; of more runs, what lies between is read too."""
MOST_AT_ONCE_MS = 6 * MS_PER_HOUR
"""What one statement reads: a sum per quarter-hour and payer has to lie in memory."""
_EXACT = 2.0**53
_FITS = 2.0**62
"""All sums of a column together."""
_NOBODY = -1
_FOLDED, _QUARTER, _SPANS = "at_ms", "start_ms - start_ms % 900000", "start_ms, end_ms"
_FIGURES = (
    "busy_us + idle_us + unknown_us", "busy_us", "energy_uj", "down_us",
    "busy_us + idle_us + unknown_us", "unheld_us", "down_us", "unknown_us", "energy_blind_us",
)  # fmt: skip
"""Of Figures: the decaying ones, then the plain ones."""
_EVERY, _DECAYING, _PLAIN = range(9), range(4), range(4, 9)
_LOST, _PLAIN_LOST = Figures._fields.index("lost"), Figures._fields.index("plain_lost")
_SUM, _WEIGHTED = "sum({0})::DOUBLE", "sum(floor(({0}) * weight + 0.5))"

Whole = npt.NDArray[np.int64]
"""Rows of what is told apart, the payer, and Figures."""
Refs = dict[PodKey, str]
"""The queue_ref of every pod that pays for any of it."""

WhoseUsage = Callable[[Collection[int]], Mapping[int, Origin]]
"""accountant.storage.query.window_buckets.Whose.of, in one snapshot."""


class TooLargeError(ArithmeticError):
    """A sum that columns do not hold: ask `accountant.storage.query.window_buckets`."""


def found_in(
    cursor: Cursor, whose: WhoseUsage, starts: Collection[int], unfolded: Collection[int], view: View
) -> tuple[dict[int, Found], Refs]:
    """What each of these quarter-hours holds, by their starts. Raises TooLargeError."""
    folded = {at for at in starts if at - at % MS_PER_HOUR not in unfolded}
    rest = set(starts) - folded
    found: dict[int, Found] = dict.fromkeys(starts, NOTHING)
    refs: Refs = {}

    def take(wanted: Collection[int], *tables: Whole) -> None:
        held, of_pods = _assigned(whose, np.concatenate([_only(wanted, table) for table in tables]), 1)
        found.update({at: one for (at,), one in held.items()})
        refs.update(of_pods)

    for span in _runs(rest):
        take(rest, _of_rows(cursor, _QUARTER, span, view))
    for span in _runs(folded):
        plain = view.half_life_s is None
        sums = _asked(cursor, span, _EVERY if plain else _PLAIN, _SUM, view, at=_FOLDED, source="FROM quarter")
        if plain:
            take(folded, sums)
        else:
            # Sums do not decay as their rows do.
            lost = bool(sums[:, 2 + _PLAIN_LOST].any())
            take(folded, sums, _decayed(cursor, _QUARTER, span, view, [*_DECAYING[:-1], *[_LOST] * lost]))
    return found, refs


def grain_of(cursor: Cursor, whose: WhoseUsage, bucket: int, view: View) -> tuple[Grain, Refs]:
    """A quarter-hour by the spans of its rows. Raises TooLargeError."""
    found, refs = _assigned(whose, _of_rows(cursor, _SPANS, (bucket, bucket + BUCKET_MS), view), 2)
    return {(start, end): held for (start, end), held in found.items()}, refs


def _runs(starts: Iterable[int]) -> list[Span]:
    """Stretches of time that hold these quarter-hours, none longer than MOST_AT_ONCE_MS."""
    runs: list[Span] = []
    for at in sorted(starts):
        if runs and runs[-1][1] == at:
            runs[-1] = runs[-1][0], at + BUCKET_MS
        else:
            runs.append((at, at + BUCKET_MS))
    whole = runs if len(runs) <= MOST_RUNS else [(runs[0][0], runs[-1][1])]
    return [(at, min(at + MOST_AT_ONCE_MS, end)) for start, end in whole for at in range(start, end, MOST_AT_ONCE_MS)]


def _only(starts: Collection[int], table: Whole) -> Whole:
    return table[np.isin(table[:, 0], list(starts))]


def _of_rows(cursor: Cursor, at: str, span: Span, view: View) -> Whole:
    if view.half_life_s is None:
        return _asked(cursor, span, _EVERY, _SUM, view, at=at, source="FROM entry")
    plain = _asked(cursor, span, _PLAIN, _SUM, view, at=at, source="FROM entry")
    return np.concatenate([plain, _decayed(cursor, at, span, view, _DECAYING)])


def _decayed(cursor: Cursor, at: str, span: Span, view: View, figures: Sequence[int]) -> Whole:
    source, weight = statement("with_half_lives"), statement("weight")
    return _asked(cursor, span, figures, _WEIGHTED, view, at=at, source=source, weight=weight)


def _asked(
    cursor: Cursor,
    span: Span,
    figures: Sequence[int],
    term: str,
    view: View,
    *,
    at: str,
    source: str,
    weight: str = "",
) -> Whole:
    """figures: numbers of those that are added up; the others are 0. term: how one is. weight: "" where none is."""
    terms = ", ".join(f"{term.format(_FIGURES[number])} AS figure_{number}" for number in figures)
    of = "at_ms" if at == _FOLDED else "start_ms"
    sql = statement("quarters").format(
        at=at, figures=terms, source=source, of=of, weight=weight or "1.0", only=view.only
    )
    bounds: dict[str, int | str] = {"low": span[0], "high": span[1], **view.given}
    if weight and view.half_life_s is not None:
        bounds["half_life_ms"] = view.half_life_s * MS_PER_SECOND
    columns = [np.ma.getdata(column) for column in cursor.columns(sql, bounds).values()]
    sums = np.stack(columns[-len(figures) :], axis=1)
    if sums.max(initial=0.0) >= _EXACT or sums.sum(axis=0).max() >= _FITS:
        raise TooLargeError
    told = columns[: -len(figures)]
    table: Whole = np.zeros((len(sums), len(told) + len(_FIGURES)), np.int64)
    for place, column in enumerate(told):
        table[:, place] = column
    table[:, [len(told) + number for number in figures]] = sums
    return table


def _assigned(whose: WhoseUsage, table: Whole, told: int) -> tuple[dict[tuple[int, ...], Found], Refs]:
    """By the columns that are told apart, of which there are so many; and who pays."""
    payers, place = np.unique(table[:, told], return_inverse=True)
    origins = whose(payers.tolist())
    refs = sorted({ref for _, ref in origins.values()})
    number = {ref: n for n, ref in enumerate(refs)}
    of_payer = [number[origins[payer][1]] if payer else _NOBODY for payer in payers.tolist()]
    keys = table[:, : told + 1].copy()
    keys[:, told] = np.array(of_payer, np.int64)[place.reshape(-1)]
    by_key: dict[tuple[int, ...], dict[int, Figures]] = {}
    for key, sums in accounts.summed(keys, table[:, told + 1 :]).items():
        by_key.setdefault(key[:told], {})[key[told]] = Figures(*sums)
    found = {
        key: Found(plus(by_ref.values()), {refs[ref]: held for ref, held in by_ref.items() if ref != _NOBODY})
        for key, by_ref in by_key.items()
    }
    return found, dict(origins.values())


def fill(
    cursor: Cursor,
    whose: WhoseUsage,
    unfolded: Collection[int],
    missing: Sequence[int],
    stretches: Sequence[Stretch],
    view: View,
) -> tuple[dict[int, Found], Refs]:
    """Figures of the missing stretches, and the queue_ref of every pod in them."""
    whole = {stretches[tag].start_ms: tag for tag in missing if stretches[tag].whole}
    filled: dict[int, Found] = {}
    refs: Refs = {}
    with suppress(TooLargeError):
        found, refs = found_in(cursor, whose, whole.keys(), unfolded, view)
        filled = {whole[start]: held for start, held in found.items()}
    rest = [tag for tag in missing if tag not in filled]
    spans = [TaggedSpan(tag, stretches[tag].start_ms, stretches[tag].end_ms) for tag in rest]
    by_payer = measure(cursor, spans, stretches, view)
    origins = whose({payer for held in by_payer.values() for payer in held})
    filled |= {tag: assigned(by_payer.get(tag, {}), origins) for tag in rest}
    return filled, refs | dict(origins.values())


def read_grain(cursor: Cursor, whose: WhoseUsage, bucket: int, view: View) -> tuple[Grain, Refs]:
    """A quarter-hour by the spans of its rows, and the queue_ref of every pod in it."""
    with suppress(TooLargeError):
        return grain_of(cursor, whose, bucket, view)
    whole = (0, EVERY_GPU, bucket, bucket + BUCKET_MS, bucket + BUCKET_MS)
    of_span: dict[RowSpan, dict[int, Figures]] = defaultdict(dict)
    for _, payer, start, end, _, *values in decayed(cursor, [whole], view, apart=True):
        of_span[start, end][payer] = Figures(*values)
    origins = whose({payer for found in of_span.values() for payer in found})
    return {span: assigned(found, origins) for span, found in of_span.items()}, dict(origins.values())


@dataclass(frozen=True, slots=True)
class Capacity:
    """Time of GPUs in service without what their nodes were down. available: by stretch, decayed; terms are
    rounded, so where everything is lost it may be a unit below 0. working: plain, in all. down_unheld: of the plain
    down time, rows that nobody held."""

    available: Sequence[int]
    working: int
    down_unheld: int


def capacity(
    lives: Mapping[Span, int],
    down: Sequence[TaggedSpan],
    rows_down: Mapping[int, Figures],
    lost: Sequence[int],
    stretches: Sequence[Stretch],
    half_life_s: int | None,
) -> Capacity:
    """Of GPUs with these lives. down: when nodes of theirs were, tagged with the stretch; rows_down: what rows hold
    inside that, by stretch. lost: time of lost GPUs in the rows, by stretch."""
    down_us: dict[int, int] = defaultdict(int)
    working = 0
    for span in down:
        weight = factor(span.start_ms, span.end_ms, stretches[span.tag].reference_ms(half_life_s), half_life_s)
        down_us[span.tag] += term(full_us(span.end_ms - span.start_ms), weight)
        working -= full_us(span.end_ms - span.start_ms)
    for rows in rows_down.values():
        # What was held or lost in a node's down time is counted there, not twice.
        working += rows.plain_allocated + rows.plain_lost
    here = in_service(lives, stretches)
    whole_us = full_us(BUCKET_MS)
    whole_term = term(whole_us, factor(0, BUCKET_MS, BUCKET_MS, half_life_s))
    available = [count * whole_term - gone for count, gone in zip(here.whole, lost, strict=True)]
    working += sum(here.whole) * whole_us
    cut = {tag for tag, (start, end) in enumerate(stretches) if end - start != BUCKET_MS}
    for tag in sorted(cut | here.parts.keys() | down_us.keys()):  # hardly any, of hundreds
        stretch = stretches[tag]
        reference = stretch.reference_ms(half_life_s)
        if tag in cut:
            mine_us = full_us(stretch.end_ms - stretch.start_ms)
            mine_term = term(mine_us, factor(*stretch, reference, half_life_s))
            available[tag] += here.whole[tag] * (mine_term - whole_term)
            working += here.whole[tag] * (mine_us - whole_us)
        for (start, end), count in here.parts.get(tag, {}).items():
            part_us = full_us(end - start)
            available[tag] += term(part_us, factor(start, end, reference, half_life_s)) * count
            working += part_us * count
        if tag in down_us:
            rows = rows_down.get(tag, Figures())
            available[tag] -= down_us[tag] - rows.allocated - rows.lost
    return Capacity(available, working, sum(rows.plain_unheld for rows in rows_down.values()))


def metered(rows: Figures, of_capacity: Capacity, of: Measure) -> int:
    """Plain microseconds that the measure can see; what it cannot see is not covered."""
    known = rows.plain_allocated + rows.plain_unheld - of_capacity.down_unheld
    return known - (rows.plain_unknown if of == "busy" else rows.plain_blind if of == "energy" else 0)


def coverage(metered_us: int, working_us: int) -> float:
    """Metered share of the capacity, undecayed; 1 where there is none."""
    return max(0, metered_us) / working_us if working_us > 0 else 1.0


MOST = 200_000
"""Holders."""


class Whose:
    """Of the payers that were asked for."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._known: dict[int, Origin] = {}
        self._since = 0

    def forget(self, version: int) -> None:
        """The commit that makes `version` brought facts about pods."""
        with self._lock:
            self._known = {}
            self._since = version

    def of(self, cursor: Cursor, version: int, payers: Collection[int]) -> Mapping[int, Origin]:
        """In the snapshot of `version`, which is that behind `cursor`; of nobody (0), nothing."""
        with self._lock:
            known = self._known if version >= self._since else {}
            found = {payer: known[payer] for payer in payers if payer in known}
        missing = {payer for payer in payers if payer and payer not in found}
        if missing:
            read = origins_of(cursor, missing)
            found |= read
            with self._lock:
                if version >= self._since:
                    if len(self._known) + len(read) > self._most:
                        self._known = {}
                    self._known |= read
        return found


MOST_FIGURES = 400_000
"""Remembered at once, over all quarter-hours, half-lives and queues: some hundred MB. The oldest half goes first."""
MOST_HALF_LIVES = 16
"""Of one cluster, and of all together, for which anything is remembered: every commit is decayed for each. The one
asked for longest ago goes first."""
_EVERY_VERSION = 2**62
Parts = Sequence[tuple[RowSpan, Found]]
"""Of one stretch: itself, or the spans inside it, which are to be added up."""
DownTime = tuple[tuple[int, int, int], ...]
"""(gpu, start_ms, end_ms) of every GPU that was down in a stretch."""


class StretchCache:
    """Whole quarter-hours by view. Thread-safe."""

    def __init__(self, most_figures: int = MOST_FIGURES) -> None:
        self._most_figures = most_figures
        self._lock = threading.Lock()
        self._known: OrderedDict[View, dict[int, Found]] = OrderedDict()
        self._down: dict[View, dict[int, tuple[DownTime, Figures]]] = defaultdict(dict)
        self._figures = 0
        self._grains = Grains()
        self._whose = Whose()
        self._readings: list[Reading] = []
        self._refs: dict[PodKey, str] = {}
        """Of every pod that anything remembered depends on."""
        self._soon = Soon()
        self._touched: dict[int, int] = {}
        self._all_touched = 0
        self._last_touched = 0

    def coming(self, booked: Booked) -> Coming:
        """What `take` will want of a commit, worked out before any lock is held: readers go on meanwhile."""
        found = Coming(booked)
        with self._lock:
            wanted = [
                (view, bucket)
                for bucket in booked.touched
                if found.holds(bucket)
                for view in self._views()
                if self._wants(view, bucket, fresh=bucket in booked.fresh)
            ]
        for view, bucket in wanted:
            found.grain(view, bucket)
        return found

    def take(self, booked: Booked, coming: Coming, version: int) -> None:
        """The commit that makes `version` brought this. What it only added to is brought up to date."""
        if booked.pods:
            self._whose.forget(version)
        with self._lock:
            for cluster, fact in booked.pods:
                pod = (cluster, fact.uid)
                if self._refs.get(pod, fact.queue_ref) != fact.queue_ref:
                    self._clear(version)
                for reading in self._readings:
                    reading.tell(version, pod, fact.queue_ref)
            if booked.touched:
                self._last_touched = version
            views = self._views()
            for bucket in booked.touched:
                self._touched[bucket] = version
                for down in self._down.values():
                    down.pop(bucket, None)
                for view in views:
                    self._take(version, bucket, view, coming, fresh=bucket in booked.fresh)

    def _views(self) -> set[View]:
        return set(self._known)

    def _of(self, view: View) -> dict[int, Found]:
        """What is remembered for a view that is asked for."""
        found = self._known.setdefault(view, {})
        self._known.move_to_end(view)
        alike = [known for known in self._known if known.cluster == view.cluster]
        for oldest in alike[:-MOST_HALF_LIVES]:
            gone = self._known.pop(oldest)
            self._figures -= sum(len(kept.by_ref) for kept in gone.values())
            self._down.pop(oldest, None)
            self._grains.forget(oldest)
            for reading in self._readings:
                if reading.view == oldest:
                    reading.forget(_EVERY_VERSION)
        return found

    def _wants(self, view: View, bucket: int, *, fresh: bool) -> bool:
        """Whether what comes to a quarter-hour is to be added: it is remembered, or being read, or begins."""
        if fresh or bucket in self._known[view] or self._grains.has(view, bucket):
            return True
        return any(reading.wants(view, bucket) for reading in self._readings)

    def _take(self, version: int, bucket: int, view: View, coming: Coming, *, fresh: bool) -> None:
        wanted = self._wants(view, bucket, fresh=fresh)
        before = self._known[view].pop(bucket, NOTHING if fresh else None)
        grain = self._grains.get(view, bucket)
        if grain is None and fresh and _steady(view.half_life_s):
            grain = {}
        self._figures -= len(before.by_ref) if before is not None else 0
        self._grains.drop(view, bucket)
        brought = coming.grain(view, bucket) if wanted and coming.holds(bucket) else None
        for reading in self._readings:
            if reading.wants(view, bucket):
                reading.take(version, bucket, brought)
        if brought is None:
            if before is not None:
                self._expect(view, bucket)
            return
        if before is not None:
            self._keep(view, bucket, total([before, *brought.values()]))
        if grain is not None:
            self._grains.put(view, bucket, grown(grain, brought))
        self._refs |= coming.pods(bucket)

    def forget_all(self, version: int) -> None:
        self._whose.forget(version)
        with self._lock:
            self._clear(version)

    def _clear(self, version: int) -> None:
        self._all_touched = version
        for known in self._known.values():
            known.clear()
        self._down.clear()
        self._grains.clear()
        self._soon.clear()
        self._refs.clear()
        self._figures = 0
        for reading in self._readings:
            reading.forget(version)

    @contextmanager
    def reading(self, view: View, start_ms: int, end_ms: int) -> Iterator[Reading]:
        """For whoever may have to ask the tables: begin before the snapshot is pinned."""
        begun = Reading(view, start_ms, end_ms)
        with self._lock:
            self._of(view)
            self._readings.append(begun)
        try:
            yield begun
        finally:
            with self._lock:
                self._readings.remove(begun)

    def _expect(self, view: View, bucket: int) -> None:
        if _steady(view.half_life_s) and not self._grains.has(view, bucket):
            self._soon.expect((view, bucket), self._touched.get(bucket, 0))

    def soon(self) -> list[Key]:
        """Quarter-hours to `look_into` before somebody has to wait for them. Told once."""
        with self._lock:
            told = self._soon.tell()
            return [key for key in told if key[0] in self._known and not self._grains.has(*key)]

    def look_into(self, cursor: Cursor, version: int, bucket: int, reading: Reading) -> None:
        """Remember a quarter-hour, span by span and whole, as of the snapshot behind `cursor`."""
        grain, refs = read_grain(cursor, self._in(cursor, version), bucket, reading.view)
        self._learn(reading, version, bucket, grain, refs)
        self._remember(reading, version, {bucket: total(grain.values())}, refs)

    def _learn(self, reading: Reading, version: int, bucket: int, grain: Grain, refs: Mapping[PodKey, str]) -> None:
        with self._lock:
            later = reading.since(version, bucket)
            if later is not None and not reading.contradicts(version, refs):
                self._refs |= refs
                self._grains.put(reading.view, bucket, reduce(grown, later, grain))

    def _keep(self, view: View, bucket: int, found: Found) -> None:
        """Remember; where that becomes too much, the older half goes."""
        self._known[view][bucket] = found
        self._figures += len(found.by_ref)
        if self._figures > self._most_figures:
            self._figures = 0
            for known in self._known.values():
                for old in sorted(known)[: (len(known) + 1) // 2]:
                    del known[old]
                self._figures += sum(len(kept.by_ref) for kept in known.values())

    def read(
        self,
        cursor: Cursor | None,
        state: State,
        stretches: Sequence[Stretch],
        view: View,
        reading: Reading | None = None,
    ) -> list[Parts] | None:
        """What makes up each stretch, as of the snapshot behind `cursor`, which is that of `state`. cursor None:
        None where not all of it is remembered. reading: without one, or of another view, nothing more is."""
        reading = reading if reading is not None and reading.view == view else None
        version, newest_ms = state.version, state.fleet.newest_end_ms
        with self._lock:
            known = self._of(view)
            if self._all_touched > version:
                known = {}
            if version < self._last_touched:  # of an older snapshot than what is remembered
                known = {start: found for start, found in known.items() if self._touched.get(start, 0) <= version}
            ready: dict[int, Parts] = {
                tag: [(stretch, known[stretch[0]])]
                for tag, stretch in enumerate(stretches)
                if stretch[0] in known and stretch[1] - stretch[0] == BUCKET_MS
            }
            if stretches:
                # A window slides: soon it begins inside the quarter-hour it begins with now, then inside the next.
                self._expect(view, stretches[0].bucket)
                self._expect(view, stretches[0].bucket + BUCKET_MS)
            for tag in {0, len(stretches) - 1} - ready.keys():
                grain = self._grain(stretches[tag], version, view)
                if grain is not None:
                    inside, over = within(grain, *stretches[tag])
                    if not over:
                        ready[tag] = inside
        missing = [tag for tag in range(len(stretches)) if tag not in ready] if len(ready) < len(stretches) else []
        ready |= {tag: () for tag in missing if stretches[tag].bucket >= newest_ms}  # nothing is booked there yet
        missing = [tag for tag in missing if tag not in ready]
        if missing:
            if cursor is None:
                return None
            parts = [tag for tag in missing if not stretches[tag].whole and _steady(view.half_life_s)]
            for tag in parts:
                ready[tag] = self._part(cursor, version, stretches, tag, view, reading)
            missing = [tag for tag in missing if tag not in ready]
        if missing:
            assert cursor is not None
            fresh, refs = fill(cursor, self._in(cursor, version), state.unfolded, missing, stretches, view)
            whole = {stretches[tag].start_ms: fresh[tag] for tag in missing if stretches[tag].whole}
            self._remember(reading, version, whole, refs)
            ready |= {tag: [(stretches[tag], found)] for tag, found in fresh.items()}
        return [ready[tag] for tag in range(len(stretches))]

    def _grain(self, stretch: Stretch, version: int, view: View) -> Grain | None:
        """Of the quarter-hour that the stretch is a part of, if it is as the snapshot of `version` shows it."""
        usable = max(self._touched.get(stretch.bucket, 0), self._all_touched) <= version
        return self._grains.get(view, stretch.bucket) if usable and _steady(view.half_life_s) else None

    def _part(
        self,
        cursor: Cursor,
        version: int,
        stretches: Sequence[Stretch],
        tag: int,
        view: View,
        reading: Reading | None,
    ) -> Parts:
        """Of a stretch that is not whole; its quarter-hour is remembered span by span."""
        stretch = stretches[tag]
        with self._lock:
            grain = self._grain(stretch, version, view)
        if grain is None:
            grain, refs = read_grain(cursor, self._in(cursor, version), stretch.bucket, view)
            if reading is not None:
                self._learn(reading, version, stretch.bucket, grain, refs)
        inside, over = within(grain, *stretch)
        if not over:
            return inside
        cut: dict[int, dict[int, Figures]] = defaultdict(dict)
        add_straddlers(cut, cursor, [(tag, EVERY_GPU, *stretch)], stretches, view)
        over_edges = assigned(cut[tag], self._whose.of(cursor, version, cut[tag]))
        return [(stretch, total([*(found for _, found in inside), over_edges]))]

    def _in(self, cursor: Cursor, version: int) -> WhoseUsage:
        return partial(self._whose.of, cursor, version)

    def _remember(
        self, reading: Reading | None, version: int, found: Mapping[int, Found], refs: Mapping[PodKey, str]
    ) -> None:
        with self._lock:
            if reading is None or reading.contradicts(version, refs):
                return
            self._refs |= refs
            for bucket, figures in found.items():
                later = reading.since(version, bucket)
                if later is not None and bucket not in self._known[reading.view]:
                    whole = (
                        total([figures, *(part for grain in later for part in grain.values())]) if later else figures
                    )
                    self._keep(reading.view, bucket, whole)

    def down(
        self,
        cursor: Cursor | None,
        version: int,
        spans: Sequence[TaggedSpan],
        stretches: Sequence[Stretch],
        view: View,
    ) -> dict[int, Figures] | None:
        """What the rows hold inside down time, by stretch. cursor None: see `read`.

        Remembered for whole stretches as long as neither their rows nor their down time change."""
        wanted: dict[int, list[TaggedSpan]] = defaultdict(list)
        for span in spans:
            wanted[span.tag].append(span)
        keys = {tag: tuple((span.gpu, span.start_ms, span.end_ms) for span in mine) for tag, mine in wanted.items()}
        ready: dict[int, Figures] = {}
        with self._lock:
            known = self._down[view]
            for tag, key in keys.items():
                before = known.get(stretches[tag].start_ms)
                if before is not None and before[0] == key and self._usable(stretches[tag], version):
                    ready[tag] = before[1]
        missing = [tag for tag in wanted if tag not in ready]
        if not missing:
            return ready
        if cursor is None:
            return None
        found = measure(cursor, [span for tag in missing for span in wanted[tag]], stretches, view)
        ready |= {tag: plus(found.get(tag, {}).values()) for tag in missing}
        with self._lock:
            for tag in missing:
                if self._usable(stretches[tag], version):
                    self._down[view][stretches[tag].start_ms] = (keys[tag], ready[tag])
        return ready

    def _usable(self, stretch: Stretch, version: int) -> bool:
        """Whether what is remembered of a stretch is what the snapshot of `version` shows."""
        fresh = self._touched.get(stretch.start_ms, 0) <= version and self._all_touched <= version
        return stretch.whole and fresh


def _steady(half_life_s: int | None) -> bool:
    """Whether the terms of a row are the same wherever in its quarter-hour a window begins or ends."""
    return reference_ms(0, 1, half_life_s) == BUCKET_MS
