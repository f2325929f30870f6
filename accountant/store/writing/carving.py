"""Cutting many rows at once: `accountant.accounts.part` of sets of one row each, as columns of whole numbers.

A window that begins at any second cuts the row of every GPU. Bit-equal to cutting them one by one. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from accountant.accounts import ACCOUNTS, CELLS

Whole = npt.NDArray[np.int64]
"""Rows of accountant.accounts.Cells, or one number per row."""


def fits(cells: Whole, spans_ms: Whole) -> bool:
    """Whether no product on the way leaves 64 bits."""
    largest = int(cells.max(initial=0))
    longest = int(spans_ms.max(initial=0))
    accounts = int(cells[:, :ACCOUNTS].sum(axis=1).max(initial=0)) if largest < 2**60 else largest
    return largest * longest < 2**62 and accounts * max(accounts, longest) < 2**62


def parts(cells: Whole, spans_ms: Whole, begins_ms: Whole, stops_ms: Whole) -> Whole:
    """Of each row, spread evenly over [0, span), what lies in [begin, stop). Only where it `fits`."""
    return _until(cells, spans_ms, stops_ms) - _until(cells, spans_ms, begins_ms)


def _until(cells: Whole, spans_ms: Whole, at_ms: Whole) -> Whole:
    found = cells * at_ms[:, None] // spans_ms[:, None]
    whole = cells[:, :ACCOUNTS].sum(axis=1)
    left = whole * at_ms // spans_ms
    for account in range(ACCOUNTS):
        value = cells[:, account]
        taken = np.where(whole > 0, value * left // np.maximum(whole, 1), 0)
        whole = whole - value
        left = left - taken
        found[:, account] = taken
    return found


def terms(values: Whole, weights: Sequence[float] | npt.NDArray[np.float64]) -> Whole:
    """accountant.windows.term of each."""
    weighted: Whole = np.floor(values * np.asarray(weights) + 0.5).astype(np.int64)
    return weighted


def figures(cells: Whole, weights: Sequence[float] | npt.NDArray[np.float64]) -> Whole:
    """accountant.store.windows.figures.figures of each."""
    cell = dict(zip(CELLS, cells.T, strict=True))
    allocated = cell["busy_us"] + cell["idle_us"] + cell["unknown_us"]
    decaying = [allocated, cell["busy_us"], cell["energy_uj"], cell["down_us"]]
    plain = [allocated, cell["unheld_us"], cell["down_us"], cell["unknown_us"], cell["energy_blind_us"]]
    return np.stack([*(terms(value, weights) for value in decaying), *plain], axis=1)


def summed(keys: Whole, values: Whole) -> dict[tuple[int, ...], list[int]]:
    """Rows of `values` added up by equal rows of `keys`."""
    distinct, sums = merged(keys, values)
    return dict(zip(map(tuple, distinct.tolist()), sums.tolist(), strict=True))


def merged(keys: Whole, values: Whole) -> tuple[Whole, Whole]:
    """`summed` as columns: the different keys, ascending, and the sums of each."""
    if not len(keys):
        return keys, values
    order = np.lexsort(keys.T[::-1])
    ordered = keys[order]
    first = np.flatnonzero(np.concatenate(([True], (ordered[1:] != ordered[:-1]).any(axis=1))))
    sums: Whole = np.add.reduceat(values[order], first, axis=0)
    return ordered[first], sums
