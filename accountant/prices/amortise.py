"""What an hour of a GPU costs that one bought: capital, power, floor space and work over its life.

    price = (capex - residual + life_months × (colocation + operations + licences)) / (gpus × hours × utilisation)
          + kW × PUE × price of a kWh / (gpus × utilisation)

    capex = gpus × gpu_price × (1 + overhead);   residual = capex × residual share

`hours` are the real hours of the life, from the day in service over so many calendar months: never 730 a month.
Power is drawn by the hour, so its part does not depend on the length of the life. `utilisation` 1 divides by
all hours: idle time is then a pool of its own, which is right for fair shares. Below 1, idle is
hidden in the price of what is expected to be used. Pure.
"""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from zoneinfo import ZoneInfo

from pydantic import Field, model_validator

from accountant.periods import Month, parse_instant
from accountant.prices.amounts import MAX_PLACES, Amount, Day, Share
from accountant.wire import Model
from agent.units import MS_PER_HOUR


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
