"""One dated price of one kind of GPU: what it applies to, how the figure comes about, where it was read.

A row states its price in one of three ways: the amount itself, a whole machine (accountant.prices.instances), or what
the GPUs cost that one owns (accountant.prices.amortise). A discount is written beside the list price, never into it.
Every row says its source and the day it was read. Pure.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Literal
from zoneinfo import ZoneInfo

from pydantic import Field, model_validator

from accountant.money import exact_product
from accountant.prices.amortise import Amortised
from accountant.prices.amounts import Amount, Day, Share
from accountant.prices.gpu_models import parse_gpu_model
from accountant.prices.instances import Instance
from accountant.wire import Model

CapacityType = Literal["on-demand", "spot", "reserved", "on-prem"]
Selectors = frozenset[tuple[str, str]]
ID = r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]*$"


class PriceRow(Model):
    """One price. A selector that is left out matches everything; a named one must be known and equal.

    price: currency units per whole physical GPU and hour (a slice pays its fraction); or instance, or
    amortised. discount: share off that. commitment: the contract a row belongs to; where the book
    has a commitment of that id, the row is its rate and holds for nothing else. Valid in [valid_from,
    valid_to), open-ended without valid_to (an amortised row ends with the life of its GPUs); dates are local
    midnights of the book's zone. basis: whether host CPU, memory and disk are in the price. source, as_of: where
    the figure was read, when."""

    id: str = Field(min_length=1, max_length=200, pattern=ID)
    model: str = Field(min_length=1, max_length=200)
    pool: str | None = Field(default=None, min_length=1)
    region: str | None = Field(default=None, min_length=1)
    capacity_type: CapacityType | None = None
    price: Amount | None = None
    instance: Instance | None = None
    amortised: Amortised | None = None
    discount: Share = Decimal(0)
    commitment: str | None = Field(default=None, min_length=1, max_length=200)
    per: Literal["gpu-hour"]
    valid_from: str
    valid_to: str | None = None
    source: str = Field(min_length=1, max_length=1000)
    as_of: Day
    basis: Literal["whole-instance", "gpu-only"]

    @model_validator(mode="after")
    def _one_price(self) -> PriceRow:
        ways = [name for name in ("price", "instance", "amortised") if getattr(self, name) is not None]
        if len(ways) != 1:
            raise ValueError(
                f"a row has one of price, instance and amortised, this one has {' and '.join(ways) or 'none'}"
            )
        if self.instance is not None and (self.instance.weights is None) != (self.basis == "whole-instance"):
            raise ValueError(
                "basis whole-instance puts the whole machine on its GPUs (no weights); gpu-only needs weights"
            )
        return self

    @property
    def selectors(self) -> Selectors:
        """What the row asks of a GPU beyond its family; more of them are more specific."""
        gpu = parse_gpu_model(self.model)
        named = {
            "memory": gpu.memory_gb, "form": gpu.form,
            "pool": self.pool, "region": self.region, "capacity_type": self.capacity_type,
        }  # fmt: skip
        return frozenset((key, str(value)) for key, value in named.items() if value is not None)

    def list_price(self, tz: ZoneInfo) -> Decimal:
        """Per GPU and hour, before the discount."""
        if self.amortised is not None:
            return self.amortised.unit_price(tz)
        if self.instance is not None:
            return self.instance.unit_price()
        assert self.price is not None
        return self.price

    def unit_price(self, tz: ZoneInfo) -> Decimal:
        """Per GPU and hour, as it is charged: the list price less the discount, exactly."""
        return exact_product(self.list_price(tz), 1 - self.discount)
