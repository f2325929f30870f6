"""Fair shares and entitlements without rounding: water-filling by weight. Pure floats, few queues, fast.

The order of the queues decides nothing but the last bit; callers keep it fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import add, sub

_AMPLE = 1 - 1e-9
"""Of the total: where less is asked for, no rounding can make anybody short."""


def fill(total: float, caps: Sequence[float], weights: Sequence[float]) -> list[float]:
    """`total` by weight, nobody above its cap, what one leaves goes to the others; weight 0 gets nothing."""
    got = [0.0] * len(caps)
    open_ = [i for i, cap in enumerate(caps) if cap > 0.0 and weights[i] > 0.0]
    while open_ and total > 0.0:
        level = total / sum([weights[i] for i in open_])
        above: list[int] = []
        for i in open_:
            cap, part = caps[i], level * weights[i]
            if cap <= part:
                got[i] = cap
                total -= cap
            else:
                got[i] = part
                above.append(i)
        if len(above) == len(open_):
            return got
        open_ = above
    for i in open_:
        got[i] = 0.0
    return got


def fill_from(total: float, caps: Sequence[float], weights: Sequence[float], starts: Sequence[float]) -> list[float]:
    """`fill` where not everybody begins at the bottom: i gets weight · (level - start), none below 0 or above its
    cap, at the one level at which that comes to `total`; all their caps where that is no more than `total`."""
    some = [i for i, cap in enumerate(caps) if cap > 0 and weights[i] > 0]
    if sum([caps[i] for i in some]) <= total:
        return [cap if weight > 0 else 0.0 for cap, weight in zip(caps, weights, strict=True)]
    turns = sorted(
        [(starts[i], weights[i]) for i in some] + [(starts[i] + caps[i] / weights[i], -weights[i]) for i in some]
    )
    level, slope, given = turns[0][0], 0.0, 0.0
    for at, change in turns:
        if slope > 0 and given + slope * (at - level) >= total:
            level += (total - given) / slope
            break
        given += slope * (at - level)
        level, slope = at, slope + change
    got = [0.0] * len(caps)
    for i in some:
        got[i] = min(caps[i], max(0.0, weights[i] * (level - starts[i])))
    return got


def fair_shares(
    total: float, asked: Sequence[float], deserved: Sequence[float], weights: Sequence[float]
) -> list[float]:
    """Deserved quotas first, the rest by weight among those who ask for more: KAI's division unrounded."""
    if sum(asked) < total * _AMPLE and min(weights) > 0:
        return list(map(float, asked))
    base = list(map(min, deserved, asked))
    pool = total - sum(base)
    if pool <= 0:
        return base
    more = fill(pool, list(map(sub, asked, base)), weights)
    return list(map(add, base, more))
