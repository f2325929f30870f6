"""The part of a GPU that a MIG instance pays for, by compute or by memory slices.

Agents divide a GPU by compute slices: a 1g of 7 holds 1/7 of its time. Under `mig_basis: memory` it pays for its
memory slices instead, 1/8 each; what no instance has of the memory is unallocated. `rebase` only moves time
between holders and nobody: a place keeps every microsecond, and no account becomes negative. Pure.

Source of the geometry: NVIDIA MIG user guide (eight memory slices; seven compute slices, four on an A30).
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from fractions import Fraction
from typing import Final, TypeVar

from accountant.ledger import OF_HOLDERS
from accountant.prices.gpu_models import parse_gpu_model
from accountant.wire import IDLE, Accounts, Dimension, UsageLine
from agent.units import apportion

HELD: Final = ("busy", "allocated_idle", "allocated_unknown")
_OF_NOBODY: Final = {**{str(name): "" for name in OF_HOLDERS}, "team": IDLE, "queue": IDLE}
K = TypeVar("K", bound=Hashable)
MEMORY_SLICES = 8
_COMPUTE_SLICES = 7
_COMPUTE_SLICES_OF = {"A30": 4}
_PROFILE = re.compile(r"(?:\d+c\.)?(\d+)g\.(\d+)gb(?:\+\S*)?", re.IGNORECASE)


def memory_to_compute(profile: str, gpu_model: str) -> Fraction | None:
    """By what an instance's compute share is multiplied to give its memory share; 1 for a whole GPU.

    None where the profile, or the memory that the model's name states, cannot be read."""
    if not profile:
        return Fraction(1)
    gpu = parse_gpu_model(gpu_model)
    match = _PROFILE.fullmatch(profile)
    if match is None or not gpu.memory_gb:
        return None
    compute = int(match[1])
    memory = max(1, round(Fraction(MEMORY_SLICES * int(match[2]), gpu.memory_gb)))
    return Fraction(memory * _COMPUTE_SLICES_OF.get(gpu.family, _COMPUTE_SLICES), MEMORY_SLICES * compute)


def by_memory(lines: Sequence[UsageLine], places: Sequence[Dimension], *, with_nobody: bool) -> list[UsageLine]:
    """Lines (grouped by `places` and `mig_profile` among others) with holders' time by memory slices.

    with_nobody: whether time that nobody holds belongs to the answer. Lines whose share cannot be told stay."""
    pools: dict[tuple[str, ...], list[UsageLine]] = {}
    for line in lines:
        pools.setdefault(tuple(line.key[name] for name in places), []).append(line)
    return [line for pool in pools.values() for line in _pool(pool, with_nobody)]


def _pool(lines: Sequence[UsageLine], with_nobody: bool) -> list[UsageLine]:
    ratios = [memory_to_compute(line.key["mig_profile"], line.key["gpu_model"]) or Fraction(1) for line in lines]
    if all(ratio == 1 for ratio in ratios):
        return list(lines)
    cells = {
        (at, account): (getattr(line.accounts_gpu_us, account), ratios[at])
        for at, line in enumerate(lines)
        for account in HELD
    }
    before = sum(line.accounts_gpu_us.unallocated for line in lines)
    found, rest = rebase(cells, before) if with_nobody else ({key: int(us * of) for key, (us, of) in cells.items()}, 0)
    changed = [
        line.model_copy(
            update={"accounts_gpu_us": line.accounts_gpu_us.model_copy(update={name: found[at, name] for name in HELD})}
        )
        for at, line in enumerate(lines)
    ]
    return _nobody(changed, rest) if with_nobody and rest != before else changed


def _nobody(lines: list[UsageLine], rest: int) -> list[UsageLine]:
    """With `rest` as the unallocated time of all lines together."""
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
    """(time per group, what nobody holds) once each group's time is multiplied by its ratio.

    The parts agents send are whole microseconds, so a full GPU may come out a few too long: groups then give
    those back in proportion."""
    found = {key: int(gpu_us * ratio) for key, (gpu_us, ratio) in held.items()}
    rest = unheld + sum(gpu_us for gpu_us, _ in held.values()) - sum(found.values())
    if rest < 0:
        for key, excess in zip(found, apportion(-rest, list(found.values())), strict=True):
            found[key] -= excess
        rest = 0
    return found, rest
