"""`apportion` and `payable` for columns of whole numbers, digit for digit: a line that a hundred thousand items share.

Everything is whole numbers: GPU-µs, billionths of a GPU-hour, minor units. Where 64 bits do not hold what is in
between, Python's own integers do, slower. Pure.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Final

import numpy as np

from accountant.books.held import Whole
from accountant.money import HOUR_PLACES
from agent.units import US_PER_HOUR, apportion

_FITS: Final = 2**62
_NANO, _US = 5, 18
"""A billionth of an hour is 18/5 µs."""
assert _US * 10**HOUR_PLACES == _NANO * US_PER_HOUR


def nano_hours(total: int, gpu_us: Whole) -> Whole:
    """`total` billionths of an hour divided in proportion to GPU-µs, as agent.units.apportion does.

    The total is the hours of all of it but for a rounding, so a part is its own hours and a little: what is multiplied
    out stays small."""
    whole = int(gpu_us.sum())
    off = _US * total - _NANO * whole
    if not whole or abs(off) > _US or whole * (_US + abs(off)) >= _FITS or int(gpu_us.max()) >= _FITS // _NANO:
        return np.array(apportion(total, gpu_us.tolist()), dtype=np.int64)
    # total × w / whole = (5 × whole + off) × w / (18 × whole)
    units, rest = np.divmod(_NANO * gpu_us, _US)
    more, left = np.divmod(rest * whole + off * gpu_us, _US * whole)
    parts: Whole = units + more
    return _with_missing(parts, left, total - int(parts.sum()))


def minor_units(price: Decimal, nano: Whole, total: int, places: int) -> Whole:
    """What each of these quantities costs, in units of so many decimals that add up to `total`, as
    accountant.money.payable does. Raises ValueError for a total that no rounding of the parts gives."""
    exponent = int(price.as_tuple().exponent)
    scale = max(0, HOUR_PLACES - exponent - places)
    per_nano = int(price.scaleb(scale + places - HOUR_PLACES))
    most = int(np.abs(nano).max(initial=0))
    fits = abs(per_nano) * most < _FITS and 10**scale < _FITS
    exact = (nano if fits else nano.astype(object)) * per_nano
    parts, left = exact // 10**scale, exact % 10**scale
    missing = total - int(parts.sum())
    if not 0 <= missing <= len(parts):
        raise ValueError(f"{int(nano.sum())} e-9 hours at {price} cannot be rounded to add up to {total} units")
    return _with_missing(parts.astype(np.int64), left, missing)


def _with_missing(parts: Whole, left: Whole, missing: int) -> Whole:
    """One more for those with the largest remainders, equal ones in their order."""
    if missing:
        parts[np.argsort(-left, kind="stable")[:missing]] += 1
    return parts
