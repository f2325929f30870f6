"""What rows hold inside stretches of a window, as the engine tells it: nothing is remembered here.

A stretch lies inside one quarter-hour; where usage in it is decayed to is `Stretch.reference_ms`. The engine's
arithmetic is that of accountant.windows, operation by operation (`sql/decayed.sql`). Devices may be told apart by kind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from accountant.accounts import Cells, part
from accountant.store.database import Cursor, Row, statement
from accountant.store.spans import TaggedSpan, near
from accountant.store.windows.figures import ZERO, Figures, Found, figures, plus
from accountant.store.windows.views import EVERYBODY, View
from accountant.store.writing import carving, columns
from accountant.store.writing.origins import PodKey
from accountant.windows import factor, reference_ms
from agent.units import BUCKET_MS, MS_PER_HOUR, MS_PER_SECOND

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
    return _by_kind(cursor, "decayed", bounds, columns.table(columns.STRETCH, rows), kinds, view)


def folded(cursor: Cursor, whole: Sequence[tuple[int, int, int]], kinds: Mapping[int, int] | None = None) -> list[Row]:
    """Rows of sum_folded.sql. whole: of columns.BUCKET."""
    if not whole:
        return []
    bounds = {"low": min(w[2] for w in whole), "high": max(w[2] for w in whole)}
    return _by_kind(cursor, "sum_folded", bounds, columns.table(columns.BUCKET, whole), kinds)


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
    table = None if kinds is None else columns.table(columns.KIND, kinds.items())
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
    found = cursor.columns(text, bounds, columns.table(columns.SPAN, spans))
    table = np.stack([np.ma.getdata(column).astype(np.int64) for column in found.values()], axis=1)
    half_life_s = view.half_life_s
    references = {tag: stretches[tag].reference_ms(half_life_s) for tag, *_ in spans}
    # A window that begins at any second cuts the row of every GPU, and mostly that is all of its set.
    if not len(table):
        return
    apart = np.concatenate(([True], (table[1:, :8] != table[:-1, :8]).any(axis=1), [True]))
    alone = apart[1:] & apart[:-1]
    singles = table[alone]
    if carving.fits(singles[:, 10:], singles[:, 6] - singles[:, 5]):
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
    parts = part([Cells(*row[10:]) for row in members], end - start, begin - start, stop - start)
    for row, cells in zip(members, parts, strict=True):
        yield tag, row[9], row[8], figures(cells, weight)


def _cut_at_once(
    table: npt.NDArray[np.int64], references: Mapping[int, int], half_life_s: int | None
) -> Iterator[tuple[int, int, int, Figures]]:
    """Of sets of one row each, added up by tag, payer and device."""
    tags, sinces, untils, starts, ends = (table[:, number] for number in (0, 1, 2, 5, 6))
    begins, stops = np.maximum(starts, sinces), np.minimum(ends, untils)
    held = carving.parts(table[:, 10:], ends - starts, begins - starts, stops - starts)
    spans = list(zip(tags.tolist(), begins.tolist(), stops.tolist(), strict=True))
    weight_of = {span: factor(span[1], span[2], references[span[0]], half_life_s) for span in set(spans)}
    weights = [weight_of[span] for span in spans]
    values = carving.figures(held, weights)
    for (tag, payer, device), sums in carving.summed(table[:, [0, 9, 8]], values).items():
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
    rows = cursor.rows("holder_origins", incoming=columns.table(columns.ID, [(i,) for i in sorted(payers)]))
    return {number: ((cluster, uid), ref) for number, cluster, uid, ref in rows}
