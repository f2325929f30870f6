"""Divides idle and borrowed time among payers, and bills MIG instances by compute or memory.

`spread_shares` divides each pool's idle time among those who used the pool, in proportion to their use. If no one used
it, the time stays unallocated. Every division is by largest remainder with ties to the earlier key, so parts add up
exactly. Source: OpenCost's AggregateBy. OpenCost first shares each pool's idle time by the cost incurred in that pool,
then the shared costs. Both use the costs before idle time was added.

`lend` bills borrowed time. A busy holder of a shared GPU may use more than its allocation. With `shared_gpus: busy`
this excess is billed to it. The time is taken first from the GPU's unallocated time, then from the idle time of the
other holders, in proportion. An excess beyond both is not billed, so the bill of a GPU never exceeds the GPU.

`by_memory` bills MIG instances. Agents divide a GPU by compute slices: a 1g of 7 holds 1/7 of its time. With
`mig_basis: memory` an instance pays for its memory slices instead, 1/8 each. Memory without an instance is unallocated.
`rebase` only moves time between holders and unheld time, so the total stays the same and no account becomes negative.
Source of the geometry: NVIDIA MIG user guide (eight memory slices; seven compute slices, four on an A30)."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from math import lcm
from typing import Final, TypeVar

from accountant.ledger.protocols import OF_HOLDERS
from accountant.prices.gpu_model_names import parse_gpu_model
from accountant.wire.policy_models import IDLE
from accountant.wire.usage_models import Accounts, Dimension, UsageLine
from gputally.base.units import apportion

P = TypeVar("P", bound=Hashable)
K = TypeVar("K", bound=Hashable)


def spread_shares(
    idle: Mapping[P, int], weights: Mapping[P, Mapping[K, int]]
) -> tuple[dict[P, dict[K, int]], dict[P, int]]:
    """Return the shares per pool and key, and the undivided rest per pool. Together they equal the idle time of every
    pool."""
    shares: dict[P, dict[K, int]] = {}
    left: dict[P, int] = {}
    for pool, units in idle.items():
        known = {key: weight for key, weight in weights.get(pool, {}).items() if weight}
        if known:
            shares[pool] = dict(zip(known, apportion(units, list(known.values())), strict=True))
        elif units:
            left[pool] = units
    return shares, left


def whole_weights(amounts: Mapping[K, Decimal | Fraction]) -> dict[K, int]:
    """Return integers in the same proportion as exact amounts."""
    exact = {key: Fraction(amount) for key, amount in amounts.items()}
    unit = lcm(*(value.denominator for value in exact.values()))
    return {key: int(value * unit) for key, value in exact.items()}


@dataclass(frozen=True, slots=True)
class Share:
    """One holder's part of a GPU during a span."""

    idle_us: int
    borrowed_us: int


def lend(unallocated_us: int, shares: Sequence[Share]) -> tuple[list[int], list[list[int]]]:
    """Return (free, lent): free[b] is the unallocated time that borrower b takes, lent[b][l] the idle time that b takes
    from l.

    No holder lends more than it has, or to itself. Borrowers are served in the given order, so the caller sorts
    them."""
    wanted = [share.borrowed_us for share in shares]
    free = apportion(min(unallocated_us, sum(wanted)), wanted) if shares else []
    idle = [share.idle_us for share in shares]
    lent = [[0] * len(shares) for _ in shares]
    for borrower, want in enumerate(wanted):
        lenders = [0 if lender == borrower else idle_us for lender, idle_us in enumerate(idle)]
        taken = min(want - free[borrower], sum(lenders))
        if taken:
            lent[borrower] = apportion(taken, lenders)
            idle = [have - part for have, part in zip(idle, lent[borrower], strict=True)]
    return free, lent


HELD: Final = ("busy", "allocated_idle", "allocated_unknown")
_OF_NOBODY: Final = {**{str(name): "" for name in OF_HOLDERS}, "team": IDLE, "queue": IDLE}
MEMORY_SLICES = 8
_COMPUTE_SLICES = 7
_COMPUTE_SLICES_OF = {"A30": 4}
_PROFILE = re.compile(r"(?:\d+c\.)?(\d+)g\.(\d+)gb(?:\+\S*)?", re.IGNORECASE)


def memory_to_compute(profile: str, gpu_model: str) -> Fraction | None:
    """Return the factor from an instance's compute share to its memory share; 1 for a whole GPU.

    None if the profile, or the memory size in the model's name, cannot be parsed."""
    if not profile:
        return Fraction(1)
    gpu = parse_gpu_model(gpu_model)
    match = _PROFILE.fullmatch(profile)
    if match is None or not gpu.memory_gb:
        return None
    compute = int(match[1])
    memory = max(1, round(Fraction(MEMORY_SLICES * int(match[2]), gpu.memory_gb)))
    return Fraction(memory * _COMPUTE_SLICES_OF.get(gpu.family, _COMPUTE_SLICES), MEMORY_SLICES * compute)


def by_memory(lines: Sequence[UsageLine], places: Sequence[Dimension], *, with_unheld: bool) -> list[UsageLine]:
    """Return the lines with the time of MIG holders converted from compute slices to memory slices. The given lines are
    grouped at least by `places` and `mig_profile`.

    with_unheld: whether the result includes time without a holder.

    Lines whose memory share cannot be determined are left unchanged."""
    pools: dict[tuple[str, ...], list[UsageLine]] = {}
    for line in lines:
        pools.setdefault(tuple(line.key[name] for name in places), []).append(line)
    return [line for pool in pools.values() for line in _pool(pool, with_unheld)]


def _pool(lines: Sequence[UsageLine], with_unheld: bool) -> list[UsageLine]:
    ratios = [memory_to_compute(line.key["mig_profile"], line.key["gpu_model"]) or Fraction(1) for line in lines]
    if all(ratio == 1 for ratio in ratios):
        return list(lines)
    cells = {
        (at, account): (getattr(line.accounts_gpu_us, account), ratios[at])
        for at, line in enumerate(lines)
        for account in HELD
    }
    before = sum(line.accounts_gpu_us.unallocated for line in lines)
    found, rest = rebase(cells, before) if with_unheld else ({key: int(us * of) for key, (us, of) in cells.items()}, 0)
    changed = [
        line.model_copy(
            update={"accounts_gpu_us": line.accounts_gpu_us.model_copy(update={name: found[at, name] for name in HELD})}
        )
        for at, line in enumerate(lines)
    ]
    return _with_unallocated(changed, rest) if with_unheld and rest != before else changed


def _with_unallocated(lines: list[UsageLine], rest: int) -> list[UsageLine]:
    """Return the lines with `rest` as the unallocated time of all lines together."""
    free = [line for line in lines if line.accounts_gpu_us.unallocated]
    if not free:
        first = lines[0]
        key = {name: _OF_NOBODY.get(name, value) for name, value in first.key.items()}
        return [*lines, UsageLine(key=key, accounts_gpu_us=Accounts(unallocated=rest))]
    parts = iter(apportion(rest, [line.accounts_gpu_us.unallocated for line in free]))
    return [
        line.model_copy(
            update={"accounts_gpu_us": line.accounts_gpu_us.model_copy(update={"unallocated": next(parts)})}
        )
        if line.accounts_gpu_us.unallocated
        else line
        for line in lines
    ]


def rebase(held: Mapping[K, tuple[int, Fraction]], unheld: int) -> tuple[dict[K, int], int]:
    """Return the time per group multiplied by the group's ratio, and the time without a holder.

    Agents send rounded microseconds. The groups of a full GPU may therefore exceed it by a few microseconds, which are
    taken back from the groups in proportion."""
    found = {key: int(gpu_us * ratio) for key, (gpu_us, ratio) in held.items()}
    rest = unheld + sum(gpu_us for gpu_us, _ in held.values()) - sum(found.values())
    if rest < 0:
        for key, excess in zip(found, apportion(-rest, list(found.values())), strict=True):
            found[key] -= excess
        rest = 0
    return found, rest
