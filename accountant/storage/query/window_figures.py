"""Defines the sums of one quarter-hour of a window, and the views a window can be asked by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import add
from typing import Final, NamedTuple

from accountant.core.accounts import AccountVector
from accountant.core.window_decay import term


class Figures(NamedTuple):
    """GPU-microseconds and microjoules. The first four decayed, the rest as they are; working time
    without energy is `blind`."""

    allocated: int = 0
    busy: int = 0
    energy: int = 0
    lost: int = 0
    plain_allocated: int = 0
    plain_unheld: int = 0
    plain_lost: int = 0
    plain_unknown: int = 0
    plain_blind: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """What a stretch holds. by_ref: of held time, by the queue_ref of the holders' pods ("": none)."""

    all: Figures
    by_ref: Mapping[str, Figures]

    def plus(self, other: Found) -> Found:
        by_ref = dict(self.by_ref)
        for ref, mine in other.by_ref.items():
            before = by_ref.get(ref)
            by_ref[ref] = mine if before is None else both(before, mine)
        return Found(both(self.all, other.all), by_ref)


ZERO = Figures()
NOTHING = Found(ZERO, {})


def both(one: Figures, other: Figures) -> Figures:
    """Their sum."""
    return Figures._make(map(add, one, other))


def plus(several: Iterable[Figures]) -> Figures:
    """The sum; of nothing, zero."""
    return Figures(*map(sum, zip(*several, strict=True)))


def figures(cells: AccountVector, weight: float) -> Figures:
    """Of one row, or of several where nothing decays (weight 1)."""
    return Figures(
        term(cells.allocated_us, weight), term(cells.busy_us, weight), term(cells.energy_uj, weight),
        term(cells.down_us, weight), cells.allocated_us, cells.unheld_us, cells.down_us, cells.unknown_us,
        cells.energy_blind_us,
    )  # fmt: skip


class View(NamedTuple):
    """half_life_s: in seconds; None: nothing decays. cluster: its GPUs alone; None: everybody's.

    What is remembered is remembered by view: a row is of the cluster whose agent sent it, for ever."""

    half_life_s: int | None
    cluster: str | None = None

    @property
    def only(self) -> str:
        """The condition on rows `e` of the ledger."""
        return "" if self.cluster is None else "AND e.gpu IN (SELECT id FROM gpu WHERE cluster = $cluster)"

    @property
    def given(self) -> Mapping[str, str]:
        """The parameters of `only`."""
        return {} if self.cluster is None else {"cluster": self.cluster}


EVERYBODY: Final = View(None)
