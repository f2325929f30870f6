"""What a GPU-microsecond counts in a window that does not count all of them alike: by price, by model, by
shard, by cluster.

A lens looks at places: kinds of GPU in one surrounding. It leaves a place out, gives its time an exact weight, or
says that it has none (time without a price). A window adds up whole microseconds per place and multiplies once, by
exact fractions, so no order of arrival and no cut of time changes a digit.

A cost is that of the price book's rows as they stood at the time, per whole GPU-hour: what a statement bills before
commitments and billing policy, which depend on who came first and not on what was used. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Final, NamedTuple

from accountant.prices.book import PriceBook
from accountant.prices.gpu_models import GpuModel, parse_gpu_model
from accountant.prices.mig import memory_to_compute
from agent.units import US_PER_HOUR

COST_UNIT_PLACES: Final = 9
"""A cost is told in units of 10^-9 of its currency."""
_COST_UNITS_PER_US: Final = Fraction(10**COST_UNIT_PLACES, US_PER_HOUR)


class Place(NamedTuple):
    """A kind of GPU in one surrounding. profile: of a MIG instance where it matters, else ""."""

    gpu_model: str
    profile: str
    pool: str
    region: str
    capacity_type: str
    shard: str
    cluster: str


@dataclass(frozen=True)
class Lens:
    """book: count time at its prices. gpu_weights: by model, the most precise name first; others weigh 1. shard: look
    at the nodes of this scheduling shard alone ("": at those of none). cluster: at those of this cluster alone."""

    book: PriceBook | None = None
    gpu_weights: tuple[tuple[GpuModel, Fraction], ...] = ()
    shard: str | None = None
    cluster: str | None = None

    @classmethod
    def of(
        cls,
        *,
        book: PriceBook | None = None,
        gpu_weights: Mapping[str, Decimal] | None = None,
        shard: str | None = None,
        cluster: str | None = None,
    ) -> Lens:
        """gpu_weights: by the name of a model, as a price book writes it."""
        named = [(parse_gpu_model(name), Fraction(weight)) for name, weight in (gpu_weights or {}).items()]
        named.sort(key=lambda pair: (-_precision(pair[0]), str(pair[0])))
        return cls(book, tuple(named), shard, cluster)

    @property
    def trivial(self) -> bool:
        """It weighs everything alike, and looks at everything, be it of one cluster."""
        return self.book is None and not self.gpu_weights and self.shard is None

    @property
    def tells_profiles(self) -> bool:
        """Whether the MIG profile of an instance changes what its time counts."""
        return self.book is not None and self.book.mig_basis == "memory"

    def sees(self, place: Place) -> bool:
        return self.shard in (None, place.shard) and self.cluster in (None, place.cluster)

    def cuts(self, start_ms: int, end_ms: int) -> tuple[int, ...]:
        """Instants strictly inside the span at which weights change."""
        return self.book.cuts(start_ms, end_ms) if self.book is not None else ()

    def weight(self, place: Place, at_ms: int) -> Fraction | None:
        """What a GPU-microsecond there counts at that instant, in the window's unit; None: nobody can say."""
        if self.book is not None:
            row = self.book.unit_price(place.gpu_model, at_ms, place.pool, place.region, place.capacity_type)
            share = memory_to_compute(place.profile, place.gpu_model)
            return None if row is None or share is None else Fraction(row.price) * share * _COST_UNITS_PER_US
        model = parse_gpu_model(place.gpu_model)
        return next((weight for named, weight in self.gpu_weights if named.covers(model)), Fraction(1))


EVERYTHING: Final = Lens()


def _precision(model: GpuModel) -> int:
    return (model.memory_gb is not None) + (model.form is not None)
