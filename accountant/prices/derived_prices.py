"""Derives a GPU-hour price from an instance price or from a purchase (amortization).

A cloud quotes an instance; a bill wants its GPUs. Either the whole price is put on the GPUs (`whole-instance`: its
CPUs and memory come with them), or each resource gets its part in proportion to weight × amount (`gpu-only`).
The parts add up to the machine's price: only the ratio of the weights matters. Pure.

Sources: OpenCost specification, appendix A (base prices are ratios, scaled to the node's price); AWS split cost
allocation data (weights GPU 9 : vCPU 0.9 : GB 0.1); slurm.conf(5) TRESBillingWeights (the notation of weights).

price = (capex - residual + life_months × (colocation + operations + licences)) / (gpus × hours × utilisation)
          + kW × PUE × price of a kWh / (gpus × utilisation)

    capex = gpus × gpu_price × (1 + overhead);   residual = capex × residual share

`hours` are the real hours of the life, from the day in service over so many calendar months: never 730 a month.
Power is drawn by the hour, so its part does not depend on the length of the life. `utilisation` 1 divides by
all hours: idle time is then a pool of its own, which is right for fair shares. Below 1, idle is
hidden in the price of what is expected to be used. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from zoneinfo import ZoneInfo

from pydantic import Field, model_validator

from accountant.core.amounts import MAX_PLACES, Amount, Day, Share
from accountant.core.periods import Month, parse_instant
from gputally.base.units import MS_PER_HOUR
from gputally.server.config_models import Model

_WEIGHT = re.compile(r"([A-Za-z][A-Za-z0-9/_.-]*)=(\d+(?:\.\d+)?)([KMGTP]?)", re.IGNORECASE)
_PER_MB = {
    "": Fraction(1), "K": Fraction(1, 1024), "M": Fraction(1), "G": Fraction(1024), "T": Fraction(1024**2),
    "P": Fraction(1024**3),
}  # fmt: skip
AWS_WEIGHTS = "gres/gpu=9,cpu=0.9,mem=0.1G"
"""Of accelerated instances. Source: AWS, cost allocation data user guide."""
_MB_PER_GB = 1024


@dataclass(frozen=True, slots=True)
class ResourceWeights:
    """Weight per unit of a resource, by lower-case name; memory is counted in MB."""

    of: Mapping[str, Fraction]

    @classmethod
    def parse(cls, text: str) -> ResourceWeights:
        """From `CPU=1.0,Mem=0.25G,GRES/gpu=2.0`: a suffix says that the weight is of that many (0.25 a GB).

        Raises ValueError."""
        of: dict[str, Fraction] = {}
        for part in text.split(","):
            match = _WEIGHT.fullmatch(part.strip())
            if match is None or match[1].lower() in of:
                raise ValueError(f"not a weight: {part.strip()!r} (write for example CPU=1.0,Mem=0.25G,GRES/gpu=2.0)")
            of[match[1].lower()] = Fraction(match[2]) / _PER_MB[match[3].upper()]
        return cls(of)

    def terms(self, amounts: Mapping[str, Fraction | int]) -> dict[str, Fraction]:
        """weight × amount per resource; what has no weight counts nothing."""
        return {name: self.of.get(name, Fraction(0)) * amount for name, amount in amounts.items()}

    def units(self, amounts: Mapping[str, Fraction | int]) -> Fraction:
        """Billing units: the sum over all resources (Slurm's default)."""
        return sum(self.terms(amounts).values(), Fraction(0))

    def dominant(self, amounts: Mapping[str, Fraction | int]) -> Fraction:
        """Billing units by the largest single resource (Slurm's MAX_TRES)."""
        return max(self.terms(amounts).values(), default=Fraction(0))

    def divide(self, price: Decimal | Fraction, amounts: Mapping[str, Fraction | int]) -> dict[str, Fraction]:
        """The part of a machine's price that each of its resources carries; they add up to it exactly.

        Raises ValueError where no resource has a weight."""
        terms = self.terms(amounts)
        whole = sum(terms.values(), Fraction(0))
        if not whole:
            raise ValueError("none of the machine's resources has a weight")
        return {name: Fraction(price) * term / whole for name, term in terms.items()}


class Instance(Model):
    """A machine's price per hour and what is in it.

    vcpus and memory_gb with weights: the GPUs pay their part only; without: the whole price is theirs."""

    name: str = Field(min_length=1, max_length=200)
    price: Amount
    gpus: int = Field(ge=1, le=10_000)
    vcpus: int = Field(default=0, ge=0, le=100_000)
    memory_gb: Amount = Decimal(0)
    weights: str | None = None

    @model_validator(mode="after")
    def _weighable(self) -> Instance:
        if self.weights is None:
            if self.vcpus or self.memory_gb:
                raise ValueError(f"say the weights by which the price is divided, for example {AWS_WEIGHTS}")
        elif not ResourceWeights.parse(self.weights).of.get("gres/gpu"):
            raise ValueError(f"the weights give GPUs no part (gres/gpu): {self.weights!r}")
        return self

    def unit_price(self) -> Decimal:
        """Per GPU and hour, rounded half to even to MAX_PLACES decimals."""
        part = Fraction(self.price)
        if self.weights is not None:
            amounts: dict[str, Fraction | int] = {
                "gres/gpu": self.gpus,
                "cpu": self.vcpus,
                "mem": Fraction(self.memory_gb) * _MB_PER_GB,
            }
            part = ResourceWeights.parse(self.weights).divide(part, amounts)["gres/gpu"]
        return Decimal(round(part / self.gpus * 10**MAX_PLACES)).scaleb(-MAX_PLACES)


class Amortised(Model):
    """The inputs, in the book's currency.

    gpu_price: of one GPU; overhead: servers, network, installation, as a share of that (0.4 = 40 %).
    residual: what is left of the capex at the end, as a share. kw: drawn by all of `gpus` with their hosts;
    colo_per_kw_month: rent per kW. ops_month, licences_month: of all of `gpus` together."""

    in_service: Day
    lifetime_months: int = Field(ge=1, le=240)
    gpus: int = Field(ge=1, le=1_000_000)
    gpu_price: Amount
    overhead: Amount = Decimal(0)
    residual: Share = Decimal(0)
    kw: Amount = Decimal(0)
    pue: Amount = Decimal(1)
    kwh_price: Amount = Decimal(0)
    colo_per_kw_month: Amount = Decimal(0)
    ops_month: Amount = Decimal(0)
    licences_month: Amount = Decimal(0)
    utilisation: Share = Decimal(1)

    @model_validator(mode="after")
    def _possible(self) -> Amortised:
        if self.pue < 1:
            raise ValueError(f"a PUE is at least 1 (all power over the power of the machines): {self.pue}")
        if not self.utilisation:
            raise ValueError("a utilisation of 0 leaves no hours to divide by")
        return self

    @property
    def capex(self) -> Fraction:
        """Of all GPUs with their overhead."""
        return self.gpus * Fraction(self.gpu_price) * (1 + Fraction(self.overhead))

    def life_ms(self, tz: ZoneInfo) -> tuple[int, int]:
        """[in service, end of life) in UTC milliseconds; the day of the month is kept, at most its last day."""
        start = parse_instant(self.in_service, tz)
        month = Month.parse(self.in_service[:7])
        for _ in range(self.lifetime_months):
            month = month.next
        last = min(int(self.in_service[8:]), _days(month))
        return start, parse_instant(f"{month}-{last:02d}", tz)

    def unit_price(self, tz: ZoneInfo) -> Decimal:
        """Per GPU and hour, rounded half to even to MAX_PLACES decimals: the one rounding there is."""
        start, end = self.life_ms(tz)
        hours = Fraction(end - start, MS_PER_HOUR)
        monthly = Fraction(self.kw) * Fraction(self.colo_per_kw_month) + Fraction(self.ops_month + self.licences_month)
        owned = self.capex * (1 - Fraction(self.residual)) + self.lifetime_months * monthly
        power = Fraction(self.kw) * Fraction(self.pue) * Fraction(self.kwh_price)
        price = (owned / hours + power) / (self.gpus * Fraction(self.utilisation))
        return Decimal(round(price * 10**MAX_PLACES)).scaleb(-MAX_PLACES)


def _days(month: Month) -> int:
    utc = ZoneInfo("UTC")
    start, end = month.span(utc)
    return (end - start) // (24 * MS_PER_HOUR)
