"""Whole quarter-hours, read many at once as columns: what a window asks that finds nothing remembered.

The engine adds up rows by quarter-hour and payer; whose usage that is, is looked up once per payer, and added up by
queue as columns. The digits are those of `accountant.store.windows.measuring`. Decayed terms are whole numbers, none
below 0, which the engine adds up as floating-point numbers for a third less: that is exact as long as no sum reaches
2^53, and where one does, it is asked again for integers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from accountant.overlap import Span
from accountant.store.database import Cursor, statement
from accountant.store.windows.figures import NOTHING, Figures, Found, plus
from accountant.store.windows.grains import Grain
from accountant.store.windows.measuring import Origin
from accountant.store.windows.views import View
from accountant.store.writing import carving
from accountant.store.writing.origins import PodKey
from agent.units import BUCKET_MS, MS_PER_HOUR, MS_PER_SECOND

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
"""accountant.store.windows.whose.Whose.of, in one snapshot."""


class TooLargeError(ArithmeticError):
    """A sum that columns do not hold: ask `accountant.store.windows.measuring`."""


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
    for key, sums in carving.summed(keys, table[:, told + 1 :]).items():
        by_key.setdefault(key[:told], {})[key[told]] = Figures(*sums)
    found = {
        key: Found(plus(by_ref.values()), {refs[ref]: held for ref, held in by_ref.items() if ref != _NOBODY})
        for key, by_ref in by_key.items()
    }
    return found, dict(origins.values())
