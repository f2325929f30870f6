"""The price book: what an hour of a GPU costs, by model, place and kind of capacity, dated.

A file a person writes, read into frozen rows. Invariants:
- At any instant a GPU has one price or none: rows whose validity overlaps and of which neither is the more
  specific are refused when the book is read, not resolved by their order.
- A GPU no row matches is unpriced: None, never 0 and never a default.
- The unit is written in the row (`per: gpu-hour`); nothing is inferred from the size of a number.
- Equal content has an equal `version`, whatever the order of the rows.

It must not know usage, teams or the ledger. Everything but `load` is pure.
"""

from __future__ import annotations

import hashlib
import json
from datetime import date
from decimal import Decimal, InvalidOperation
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Annotated, Literal, NamedTuple
from zoneinfo import ZoneInfo

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, model_validator

from accountant.gpu_models import GpuModel, parse_gpu_model
from accountant.money import CURRENCIES, plain
from accountant.periods import parse_instant, zone
from accountant.wire import Model
from accountant.yamlfile import load as load_yaml

MAX_PRICE = 10**9
MAX_PRICE_PLACES = 12
_FLOAT_DIGITS = 15
"""Decimal digits a binary float always gives back as written (IEEE 754 double: DBL_DIG)."""

CapacityType = Literal["on-demand", "spot", "reserved", "on-prem"]


class PriceFault(ValueError):
    """A fault of one row: `path` says where in the document it stands."""

    def __init__(self, index: int, key: str, message: str) -> None:
        super().__init__(message)
        self.path: tuple[str | int, ...] = ("rows", index, key)


def _price(value: object) -> Decimal:
    """A YAML number or text as the decimal that was written."""
    try:
        price = Decimal(str(value))  # a float's shortest text is what was written, up to _FLOAT_DIGITS
    except InvalidOperation as error:
        raise ValueError(f"not a number: {value!r}") from error
    if not price.is_finite():
        raise ValueError(f"not a price: {value}")
    digits, exponent = price.as_tuple().digits, price.as_tuple().exponent
    if isinstance(value, float) and len(digits) > _FLOAT_DIGITS:
        raise ValueError(f"{value!r} has more digits than a YAML number keeps: put the price in quotes")
    if isinstance(exponent, int) and -exponent > MAX_PRICE_PLACES:
        raise ValueError(f"more than {MAX_PRICE_PLACES} decimals: {value}")
    if price < 0:
        raise ValueError(f"a price is not negative: {value}")
    if price > MAX_PRICE:
        raise ValueError(f"more than {MAX_PRICE} a GPU-hour: {value}")
    return price


def _currency(value: str) -> str:
    if value not in CURRENCIES:
        raise ValueError(f"not an ISO 4217 currency: {value!r}")
    return value


def _timezone(value: str) -> str:
    zone(value)
    return value


def _day(value: str) -> str:
    date.fromisoformat(value)
    return value


class PriceRow(Model):
    """One price. A selector that is left out matches everything; a named one must be known and equal.

    price: currency units per whole physical GPU and hour (a slice pays its fraction). Valid in
    [valid_from, valid_to), open-ended without valid_to; dates are local midnights of the book's zone.
    basis: whether host CPU, memory and disk are in the price. source, as_of: where the figure was read, when."""

    id: str = Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]*$")
    model: str = Field(min_length=1, max_length=200)
    pool: str | None = Field(default=None, min_length=1)
    region: str | None = Field(default=None, min_length=1)
    capacity_type: CapacityType | None = None
    price: Annotated[Decimal, BeforeValidator(_price)]
    per: Literal["gpu-hour"]
    valid_from: str
    valid_to: str | None = None
    source: str = Field(min_length=1, max_length=1000)
    as_of: Annotated[str, AfterValidator(_day)]
    basis: Literal["whole-instance", "gpu-only"]

    @property
    def selectors(self) -> Selectors:
        """What the row asks of a GPU beyond its family; more of them are more specific."""
        gpu = parse_gpu_model(self.model)
        named = {
            "memory": gpu.memory_gb, "form": gpu.form,
            "pool": self.pool, "region": self.region, "capacity_type": self.capacity_type,
        }  # fmt: skip
        return frozenset((key, str(value)) for key, value in named.items() if value is not None)


Selectors = frozenset[tuple[str, str]]


class _Entry(NamedTuple):
    """A row with what is derived from it; `place` is its index in the file."""

    place: int
    row: PriceRow
    gpu: GpuModel
    selectors: Selectors
    start_ms: int
    end_ms: int


_FOREVER = 1 << 62


class PriceBook(Model):
    """Dated prices of one currency.

    timezone: in which a plain date begins. mig_basis: a MIG instance pays its compute slices' part of
    the GPU (1g of 7 pays 1/7), which is how the agents divide a GPU; parts then never exceed one GPU."""

    schema_: Literal[1] = Field(alias="schema")
    currency: Annotated[str, AfterValidator(_currency)]
    timezone: Annotated[str, AfterValidator(_timezone)] = "UTC"
    mig_basis: Literal["compute"] = "compute"
    rows: tuple[PriceRow, ...] = Field(min_length=1, max_length=2_000)

    _families: dict[str, list[_Entry]] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _unambiguous(self) -> PriceBook:
        tz = zone(self.timezone)
        families: dict[str, list[_Entry]] = {}
        ids: set[str] = set()
        for index, row in enumerate(self.rows):
            if row.id in ids:
                raise PriceFault(index, "id", f"row {row.id!r} stands here twice")
            ids.add(row.id)
            entry = _entry(index, row, tz)
            families.setdefault(entry.gpu.family, []).append(entry)
        for family in families.values():
            for first, second in combinations(family, 2):
                _check_pair(first, second, family)
        self._families = families
        return self

    @cached_property
    def version(self) -> str:
        """First 16 hex digits of the SHA-256 of the canonical JSON, rows by id."""
        content = self.model_dump(mode="python", by_alias=True)
        content["rows"] = sorted(
            ({**row, "price": plain(row["price"].normalize())} for row in content["rows"]), key=lambda row: row["id"]
        )
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def unit_price(
        self, model: str, at_ms: int, pool: str = "", region: str = "", capacity_type: str = ""
    ) -> PriceRow | None:
        """The most specific row for such a GPU at that instant; None: it has no price.

        `model` as NVML or a node label writes it; "" stands for a place or capacity type not known,
        which only rows that do not ask for one match."""
        gpu = parse_gpu_model(model)
        place = {"pool": pool, "region": region, "capacity_type": capacity_type}
        best: _Entry | None = None
        for entry in self._families.get(gpu.family, ()):
            if not (entry.start_ms <= at_ms < entry.end_ms and entry.gpu.covers(gpu)):
                continue
            if any(key in place and place[key] != value for key, value in entry.selectors):
                continue
            if best is None or len(entry.selectors) > len(best.selectors):
                best = entry
        return best.row if best else None

    def cuts(self, start_ms: int, end_ms: int) -> tuple[int, ...]:
        """Instants strictly inside the span at which some row begins or ends, in order."""
        entries = (entry for family in self._families.values() for entry in family)
        edges = {edge for entry in entries for edge in (entry.start_ms, entry.end_ms)}
        return tuple(sorted(edge for edge in edges if start_ms < edge < end_ms))


def load(path: Path) -> PriceBook:
    """Read a price book. Raises agent.yamlfile.FileFault with file:line for every fault."""
    return load_yaml(path, PriceBook)


def _entry(index: int, row: PriceRow, tz: ZoneInfo) -> _Entry:
    gpu = parse_gpu_model(row.model)
    if not gpu.family or any(char in row.model for char in "*?["):
        raise PriceFault(index, "model", f"not a GPU model: {row.model!r} (write for example H100, or A100-80GB)")
    instants = []
    for key, text in (("valid_from", row.valid_from), ("valid_to", row.valid_to)):
        try:
            instants.append(_FOREVER if text is None else parse_instant(text, tz))
        except ValueError as error:
            raise PriceFault(index, key, str(error)) from error
    start_ms, end_ms = instants
    if start_ms >= end_ms:
        raise PriceFault(index, "valid_to", f"ends at or before it begins: {row.valid_from} to {row.valid_to}")
    return _Entry(index, row, gpu, row.selectors, start_ms, end_ms)


def _check_pair(first: _Entry, second: _Entry, family: list[_Entry]) -> None:
    """Refuse two rows that could both apply with neither the more specific.

    `pool: a` and `capacity_type: spot` are such a pair, unless rows that ask for both cover the
    time in which both are valid: the family is then closed under intersection and the row with
    the most selectors is the one that includes all others."""
    start, end = max(first.start_ms, second.start_ms), min(first.end_ms, second.end_ms)
    if start >= end or first.selectors < second.selectors or second.selectors < first.selectors:
        return
    both = first.selectors | second.selectors
    if len(dict(both)) < len(both):
        return  # they ask for different values of the same thing: no GPU is both
    if first.selectors != second.selectors and _covered(start, end, [e for e in family if e.selectors == both]):
        return
    if first.selectors == second.selectors:
        message = f"valid at the same time as row {first.row.id!r} for the same GPUs"
    else:
        needed = ", ".join(f"{key}: {value}" for key, value in sorted(both))
        message = f"ambiguous with row {first.row.id!r}: both match {needed}, and no row asks for all of that"
    raise PriceFault(second.place, "id", f"row {second.row.id!r} is {message}")


def _covered(start: int, end: int, entries: list[_Entry]) -> bool:
    for entry in sorted(entries, key=lambda e: e.start_ms):
        if entry.start_ms <= start < entry.end_ms:
            start = entry.end_ms
    return start >= end
