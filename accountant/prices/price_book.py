"""Reads the price book and selects the price row, billing policy and commitments that apply to a GPU at an instant.

Invariants:
- At any instant a GPU has one price or none. If two rows can match the same GPU at the same time and neither is more
  specific, the book is refused when it is read, unless rows with the conditions of both cover that time. The order of
  the rows does not matter.
- A GPU that matches no row is unpriced: None, never 0 and never a default.
- The unit is written in the row (`per: gpu-hour`); nothing is inferred from the size of a number.
- Equal content has an equal `version`, whatever the order of the rows.

YAML numbers are parsed to binary floats. The shortest text of such a float is the number as written if it has at most
15 digits. Numbers with more digits are refused and must be quoted.

A row states its price in one of three ways: the amount itself, the price of a whole machine, or the purchase cost of
own GPUs. A discount is written beside the list price. Every row has its source and the day on which it was read.

`billing` holds the billing policy. It is part of the price book, so it is dated and versioned with the prices, and
every statement names its version. accountant.billing.cost_allocation applies `idle` and `pools`, and
accountant.billing.usage_pricing applies `shared_gpus` and `mig_basis`.

    billing:
      shared_gpus: allocation          # or busy: a holder is billed for borrowed time
      idle: {unallocated: spread, guaranteed: owner, starting: cluster}
      pools:
        interactive: {unallocated: keep}

A commitment is a number of GPUs that is paid for in every hour, used or not. Usage up to it has the committed rate,
usage beyond it has the normal price, and the rest of an hour's commitment is unused. Within an hour the commitment
covers all usage in the same proportion, so the order of groups does not matter. Unused time of one hour does not
compensate for another hour. `usage_pricing` and `cost_allocation` apply commitments. Source: FOCUS, commitment discount
examples (an hour's Used and Unused EffectiveCost add up to the commitment; unused has no ConsumedQuantity). FOCUS
covers usage in the order of arrival, with the same totals.

`Instance` derives a GPU-hour price from an instance price. Either the GPUs carry the whole price (`whole-instance`), or
each resource gets its part in proportion to weight × amount (`gpu-only`). The parts add up to the machine's price, so
only the ratio of the weights matters. Sources: OpenCost specification, appendix A (base prices are ratios, scaled to
the node's price); AWS split cost allocation data (weights GPU 9 : vCPU 0.9 : GB 0.1); slurm.conf(5) TRESBillingWeights
(the notation of weights).

`Amortised` derives a GPU-hour price from a purchase:

    price = (capex - residual + lifetime_months × (colocation + operations + licences)) / (gpus × hours × utilisation)
            + kW × PUE × price of a kWh / (gpus × utilisation)

    capex = gpus × gpu_price × (1 + overhead);   residual = capex × residual share

`hours` is the real number of hours from the day in service to the same day `lifetime_months` months later, not 730 a
month. Power is paid by the hour, so its part does not depend on the length of the life. With `utilisation` 1 the cost
is divided by all hours. Idle hours then cost as much as used ones and appear as a cost of their own, which comparisons
of queues need. Below 1, the price of used hours includes the expected idle time."""

from __future__ import annotations

import calendar
import hashlib
import json
import re
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from functools import cached_property
from itertools import combinations, pairwise, takewhile
from pathlib import Path
from typing import Annotated, Generic, Literal, NamedTuple, TypeVar
from zoneinfo import ZoneInfo

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, model_validator

from accountant.core.periods import KnownTimezone, Month, zone
from accountant.wire.policy_models import IDLE
from gputally.base.apportionment import apportion
from gputally.base.gpu_model_names import GpuModel, parse_gpu_model
from gputally.base.instants import parse_instant
from gputally.base.money import CURRENCIES, exact_product, plain
from gputally.base.units import MS_PER_HOUR
from gputally.server.config_loading import Model, load_yaml

MAX_AMOUNT = 10**9
MAX_DECIMALS = 12
_FLOAT_DIGITS = 15
"""Decimal digits that a binary float preserves (IEEE 754 double: DBL_DIG)."""


def parse_amount(value: object) -> Decimal:
    """Converts a YAML number or text to the decimal as written. Raises ValueError for an amount outside 0 to
    MAX_AMOUNT, or with more than MAX_DECIMALS decimals."""
    try:
        amount = Decimal(str(value))
    except InvalidOperation as error:
        raise ValueError(f"not a number: {value!r}") from error
    if not amount.is_finite():
        raise ValueError(f"not a finite number: {value}")
    digits, exponent = amount.as_tuple().digits, amount.as_tuple().exponent
    if isinstance(value, float) and len(digits) > _FLOAT_DIGITS:
        raise ValueError(f"{value!r} has more digits than a YAML number keeps: put the number in quotes")
    if isinstance(exponent, int) and -exponent > MAX_DECIMALS:
        raise ValueError(f"{value} has more than {MAX_DECIMALS} decimals")
    if amount < 0:
        raise ValueError(f"the number must not be negative: {value}")
    if amount > MAX_AMOUNT:
        raise ValueError(f"the number must be at most {MAX_AMOUNT}: {value}")
    return amount


def _parse_share(value: object) -> Decimal:
    share = parse_amount(value)
    if share > 1:
        raise ValueError(f"a share must be between 0 and 1: {value}")
    return share


def _checked_currency(value: str) -> str:
    if value not in CURRENCIES:
        raise ValueError(f"not an ISO 4217 currency: {value!r} (write for example EUR)")
    return value


def _checked_day(value: str) -> str:
    date.fromisoformat(value)
    return value


Amount = Annotated[Decimal, BeforeValidator(parse_amount)]
"""A non-negative amount of the book's currency, or a quantity that is multiplied with one."""
Share = Annotated[Decimal, BeforeValidator(_parse_share)]
"""A part of a whole, 0 to 1."""
CurrencyCode = Annotated[str, AfterValidator(_checked_currency)]
Day = Annotated[str, AfterValidator(_checked_day), Field(description="A date: 2026-10-01.")]


_WEIGHT = re.compile(r"([A-Za-z][A-Za-z0-9/_.-]*)=(\d+(?:\.\d+)?)([KMGTP]?)", re.IGNORECASE)
_PER_MB = {
    "": Fraction(1), "K": Fraction(1, 1024), "M": Fraction(1), "G": Fraction(1024), "T": Fraction(1024**2),
    "P": Fraction(1024**3),
}  # fmt: skip
EXAMPLE = "example"
"""The source of the example rows in the chart."""
AWS_WEIGHTS = "gres/gpu=9,cpu=0.9,mem=0.1G"
"""Weights of accelerated instances. Source: AWS, cost allocation data user guide."""
_MB_PER_GB = 1024


@dataclass(frozen=True, slots=True)
class ResourceWeights:
    """Weight per unit of a resource, by lower-case name of the resource. The unit of memory is MB."""

    by_name: Mapping[str, Fraction]

    @classmethod
    def parse(cls, text: str) -> ResourceWeights:
        """Parses `CPU=1.0,Mem=0.25G,GRES/gpu=2.0`. The suffix G means that the weight is per GB instead of MB.

        Raises ValueError."""
        by_name: dict[str, Fraction] = {}
        for part in text.split(","):
            match = _WEIGHT.fullmatch(part.strip())
            if match is None or match[1].lower() in by_name:
                raise ValueError(f"not a weight: {part.strip()!r} (write for example CPU=1.0,Mem=0.25G,GRES/gpu=2.0)")
            by_name[match[1].lower()] = Fraction(match[2]) / _PER_MB[match[3].upper()]
        return cls(by_name)

    def terms(self, amounts: Mapping[str, Fraction | int]) -> dict[str, Fraction]:
        """weight × amount per resource; 0 for resources without a weight."""
        return {name: self.by_name.get(name, Fraction(0)) * amount for name, amount in amounts.items()}

    def units(self, amounts: Mapping[str, Fraction | int]) -> Fraction:
        """Slurm's billing units of a job with these resources: the sum of `terms`."""
        return sum(self.terms(amounts).values(), Fraction(0))

    def divide(self, price: Decimal | Fraction, amounts: Mapping[str, Fraction | int]) -> dict[str, Fraction]:
        """The part of a machine's price for each of its resources; the parts add up exactly.

        Raises ValueError if no resource has a weight."""
        units = self.units(amounts)
        if not units:
            raise ValueError("none of the machine's resources has a weight above 0: give one to gres/gpu")
        return {name: Fraction(price) * term / units for name, term in self.terms(amounts).items()}


class Instance(Model):
    """A machine's price per hour and its contents.

    With `weights`, the price is divided among the GPUs, the vCPUs and the memory, and the GPUs carry only their part.
    Without, the GPUs carry the whole price."""

    name: str = Field(min_length=1, max_length=200)
    price: Amount
    gpus: int = Field(ge=1, le=10_000)
    vcpus: int = Field(default=0, ge=0, le=100_000)
    memory_gb: Amount = Decimal(0)
    weights: str | None = None

    @model_validator(mode="after")
    def _check_weights(self) -> Instance:
        if self.weights is None:
            if self.vcpus or self.memory_gb:
                raise ValueError(
                    f"vcpus and memory_gb need weights by which the price is divided, for example {AWS_WEIGHTS}"
                )
        elif not ResourceWeights.parse(self.weights).by_name.get("gres/gpu"):
            raise ValueError(
                f"the weights {self.weights!r} give GPUs (gres/gpu) no weight above 0: write for example {AWS_WEIGHTS}"
            )
        return self

    def unit_price(self) -> Decimal:
        """The price per GPU and hour, rounded half to even to MAX_DECIMALS decimals."""
        part = Fraction(self.price)
        if self.weights is not None:
            amounts: dict[str, Fraction | int] = {
                "gres/gpu": self.gpus,
                "cpu": self.vcpus,
                "mem": Fraction(self.memory_gb) * _MB_PER_GB,
            }
            part = ResourceWeights.parse(self.weights).divide(part, amounts)["gres/gpu"]
        return _rounded(part / self.gpus)


class Amortised(Model):
    """The costs of a purchase, in the book's currency.

    gpu_price: price of one GPU.
    overhead: servers, network and installation, as a share of the GPUs' price (0.4 = 40 %).
    residual: value at the end, as a share of the capex.
    kw: power of all `gpus` with their hosts.
    colo_per_kw_month: rent per kW.
    ops_month, licences_month: costs per month of all `gpus` together."""

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
    def _check_factors(self) -> Amortised:
        if self.pue < 1:
            raise ValueError(f"a PUE is at least 1 (the site's power divided by the machines' power): {self.pue}")
        if not self.utilisation:
            raise ValueError("a utilisation of 0 leaves no hours over which to divide the costs: write more than 0")
        return self

    @property
    def capex(self) -> Fraction:
        """The capital cost of all GPUs including overhead."""
        return self.gpus * Fraction(self.gpu_price) * (1 + Fraction(self.overhead))

    def life_ms(self, tz: ZoneInfo) -> tuple[int, int]:
        """[in service, end of life) in UTC milliseconds. The life ends on the same day of the month as it began, or on
        the month's last day if that is earlier."""
        start = parse_instant(self.in_service, tz)
        month = Month.parse(self.in_service[:7])
        for _ in range(self.lifetime_months):
            month = month.next
        last = min(int(self.in_service[8:]), calendar.monthrange(month.year, month.month)[1])
        return start, parse_instant(f"{month}-{last:02d}", tz)

    def unit_price(self, tz: ZoneInfo) -> Decimal:
        """The price per GPU and hour, rounded half to even to MAX_DECIMALS decimals. There is no other rounding."""
        start, end = self.life_ms(tz)
        hours = Fraction(end - start, MS_PER_HOUR)
        monthly = Fraction(self.kw) * Fraction(self.colo_per_kw_month) + Fraction(self.ops_month + self.licences_month)
        owned = self.capex * (1 - Fraction(self.residual)) + self.lifetime_months * monthly
        power = Fraction(self.kw) * Fraction(self.pue) * Fraction(self.kwh_price)
        return _rounded((owned / hours + power) / (self.gpus * Fraction(self.utilisation)))


def _rounded(price: Fraction) -> Decimal:
    return Decimal(round(price * 10**MAX_DECIMALS)).scaleb(-MAX_DECIMALS)


CapacityType = Literal["on-demand", "spot", "reserved", "on-prem"]
Selectors = frozenset[tuple[str, str]]
ID = r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]*$"


class PriceRow(Model):
    """One price. A selector (pool, region, capacity_type) that the row lacks matches every GPU. One that the row has
    must equal the GPU's value, and a GPU whose value is unknown does not match.

    price: currency units per whole physical GPU and hour (a slice pays its fraction). A row has either price, instance
        or amortised.
    discount: share of that price that is not charged.
    commitment: id of a commitment. If the book has it, the row's price is the rate of this commitment and applies to
        nothing else.
    valid_from, valid_to: the row is valid in [valid_from, valid_to), open-ended without valid_to. An amortised row ends
        with the life of its GPUs. Dates are local midnights of the book's zone.
    basis: whether the price includes host CPU, memory and disk.
    source, as_of: where and when the figure was read."""

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
        given = [name for name in ("price", "instance", "amortised") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"a row has one of price, instance and amortised, this one has {' and '.join(given) or 'none'}"
            )
        if self.instance is not None and (self.instance.weights is None) != (self.basis == "whole-instance"):
            raise ValueError(
                "an instance with weights needs `basis: gpu-only`, and one without weights `basis: whole-instance`"
            )
        return self

    @property
    def selectors(self) -> Selectors:
        """The row's conditions besides the GPU family; a row with more of them is more specific."""
        gpu = parse_gpu_model(self.model)
        conditions = {
            "memory": gpu.memory_gb, "form": gpu.form, "variant": gpu.variant,
            "pool": self.pool, "region": self.region, "capacity_type": self.capacity_type,
        }  # fmt: skip
        return frozenset((key, str(value)) for key, value in conditions.items() if value is not None)

    def list_price(self, tz: ZoneInfo) -> Decimal:
        """The price per GPU and hour before the discount."""
        if self.amortised is not None:
            return self.amortised.unit_price(tz)
        if self.instance is not None:
            return self.instance.unit_price()
        assert self.price is not None
        return self.price

    def unit_price(self, tz: ZoneInfo) -> Decimal:
        """The price per GPU and hour as charged: the list price less the discount, exactly."""
        return exact_product(self.list_price(tz), 1 - self.discount)


class IdlePolicy(Model):
    """Which team pays for GPU time that no job uses.

    unallocated: `keep` leaves it in `__idle__`; `spread` divides it over the teams of the pool, per cluster, by the
        cost of what they held there.
    guaranteed: `owner` first bills unused guaranteed quota to the queue's team, up to the unallocated time; `none` does
        not.
    starting, gang_waiting: paid by the `holder`, or moved to the `cluster`'s idle time. A pod is starting while it is
        bound and no container runs yet, and gang-waiting while it runs and other members of the gang do not."""

    unallocated: Literal["keep", "spread"] = "keep"
    guaranteed: Literal["none", "owner"] = "none"
    starting: Literal["holder", "cluster"] = "holder"
    gang_waiting: Literal["holder", "cluster"] = "holder"


class Billing(Model):
    """How the price book bills shared and idle GPUs.

    shared_gpus: `allocation` bills the allocated time. `busy` also bills busy time beyond it, taken from that GPU's
        unallocated time, then from its co-holders' idle time, so the bill never exceeds the GPU.
    idle: the policy of pools that are not in `pools`."""

    shared_gpus: Literal["allocation", "busy"] = "allocation"
    idle: IdlePolicy = IdlePolicy()
    pools: Mapping[str, IdlePolicy] = Field(default_factory=dict)

    def of_pool(self, pool: str) -> IdlePolicy:
        return self.pools.get(pool, self.idle)

    def any(self, choice: str, value: str) -> bool:
        """Whether `idle` or the policy of any pool has this value for a choice."""
        return any(getattr(policy, choice) == value for policy in (self.idle, *self.pools.values()))


N = TypeVar("N", int, Decimal)


class Commitment(Model):
    """A number of GPUs that is paid for in every hour in which a row that names the commitment is valid, at the price
    of this row.

    owner: the team that pays for unused time; without one, the cluster (`__idle__`)."""

    id: str = Field(min_length=1, max_length=200)
    gpus: int = Field(gt=0, le=10_000_000)
    owner: str = Field(default=IDLE, min_length=1, max_length=253)


@dataclass(frozen=True, slots=True)
class CommitmentUse(Generic[N]):
    """The use of a commitment in one hour: used + unused is the commitment, used + beyond is the usage."""

    used: N
    beyond: N
    unused: N


def commitment_use(commitment: N, usage: N) -> CommitmentUse[N]:
    """Compares an hour's usage (GPU time, or money at committed rates) with the commitment. Raises ValueError for
    negative numbers."""
    if commitment < 0 or usage < 0:
        raise ValueError("commitments and usage are not negative")
    used = min(commitment, usage)
    return CommitmentUse(used, usage - used, commitment - used)


def commitment_cover(commitment: int, usages: Sequence[tuple[Hashable, int]]) -> list[int]:
    """Returns how many GPU-µs of each usage (group, GPU-µs) an hour's commitment covers: in proportion to the usages,
    and in sum exactly the covered time.

    The covered time is first divided among the groups, then within each group. A group's part therefore does not depend
    on the number of its entries."""
    groups: dict[Hashable, list[int]] = {}
    for number, (group, _) in enumerate(usages):
        groups.setdefault(group, []).append(number)
    sums = [sum(usages[number][1] for number in numbers) for numbers in groups.values()]
    covered = [0] * len(usages)
    used = commitment_use(commitment, sum(sums)).used
    if not used:
        return covered
    for numbers, part in zip(groups.values(), apportion(used, sums), strict=True):
        if part:
            for number, gpu_us in zip(numbers, apportion(part, [usages[each][1] for each in numbers]), strict=True):
                covered[number] = gpu_us
    return covered


class PriceFault(ValueError):
    """A fault of one row. path: its place in the document."""

    def __init__(self, index: int, key: str, message: str) -> None:
        super().__init__(message)
        self.path: tuple[str | int, ...] = ("rows", index, key)


@dataclass(frozen=True, slots=True)
class Price:
    """The price of one row per whole GPU and hour, valid in [start_ms, end_ms).

    price: as charged.
    list_price: before the discount."""

    id: str
    price: Decimal
    list_price: Decimal
    row: PriceRow
    start_ms: int
    end_ms: int

    def is_valid(self, at_ms: int) -> bool:
        return self.start_ms <= at_ms < self.end_ms


class _Entry(NamedTuple):
    """A row with derived values. number: its index in the file."""

    number: int
    row: PriceRow
    price: Price
    gpu: GpuModel
    selectors: Selectors

    def overlaps(self, start_ms: int, end_ms: int) -> bool:
        return self.price.start_ms < end_ms and start_ms < self.price.end_ms


@dataclass(frozen=True, slots=True)
class Committed:
    """A commitment in force, with its rate at one instant and the GPU model that it covers."""

    commitment: Commitment
    price: Price
    gpu: GpuModel

    def covers(self, model: str, pool: str, region: str, capacity_type: str) -> bool:
        """Whether time of such a GPU counts against the commitment."""
        row = self.price.row
        conditions = ((row.pool, pool), (row.region, region), (row.capacity_type, capacity_type))
        return self.gpu.covers(parse_gpu_model(model)) and all(
            wanted in (None, actual) for wanted, actual in conditions
        )


_FOREVER = 1 << 62


class PriceBook(Model):
    """Dated prices in one currency, and the billing policy (`billing`).

    timezone: the time zone of dates without a time.
    mig_basis: with `compute`, a MIG instance pays for its compute slices (1g of 7 pays 1/7), which is how agents divide
        a GPU. With `memory`, it pays for its memory slices (1g.10gb of 80 GB pays 1/8), and memory without an instance
        is unallocated. The instances of a GPU never pay for more than the GPU.
    commitments: GPUs paid for in advance. A row that names a commitment is its rate and prices nothing else."""

    schema_: Literal[1] = Field(alias="schema")
    currency: CurrencyCode
    timezone: KnownTimezone = "UTC"
    mig_basis: Literal["compute", "memory"] = "compute"
    billing: Billing = Billing()
    commitments: tuple[Commitment, ...] = Field(default=(), max_length=200)
    rows: tuple[PriceRow, ...] = Field(min_length=1, max_length=2_000)

    _families: dict[str, list[_Entry]] = PrivateAttr(default_factory=dict)
    _committed: list[_Entry] = PrivateAttr(default_factory=list)

    @model_validator(mode="after")
    def _unambiguous(self) -> PriceBook:
        if self.mig_basis == "memory" and self.billing.shared_gpus == "busy":
            raise ValueError(
                "mig_basis: memory and billing.shared_gpus: busy cannot be combined, because each divides a GPU "
                "differently: remove one of them"
            )
        tz = zone(self.timezone)
        families: dict[str, list[_Entry]] = {}
        committed: dict[str, list[_Entry]] = {one.id: [] for one in self.commitments}
        if len(committed) < len(self.commitments):
            raise ValueError("two commitments have the same id: give each an id of its own")
        unrated = committed.keys() - {row.commitment for row in self.rows}
        if unrated:
            raise ValueError(
                f"no row has the rate of commitment {min(unrated)!r}: set `commitment` in the row with its rate"
            )
        ids: set[str] = set()
        for index, row in enumerate(self.rows):
            if row.id in ids:
                raise PriceFault(index, "id", f"row {row.id!r} occurs twice")
            ids.add(row.id)
            entry = _entry(index, row, tz)
            if row.commitment in committed:
                committed[row.commitment].append(entry)
            else:
                families.setdefault(entry.gpu.family, []).append(entry)
        for family in families.values():
            for first, second in combinations(family, 2):
                _check_pair(first, second, family)
        self._families = families
        self._committed = [entry for one in self.commitments for entry in _rates(one, committed[one.id])]
        return self

    @property
    def has_examples(self) -> bool:
        """Whether any row is marked as an example instead of an agreed price."""
        return any(row.source == EXAMPLE for row in self.rows)

    @cached_property
    def version(self) -> str:
        """First 16 hex digits of the SHA-256 of the canonical JSON, rows by id."""
        content = self.model_dump(mode="python", by_alias=True, exclude_defaults=True)
        content["rows"] = sorted(content["rows"], key=lambda row: row["id"])
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=_decimal_text)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def unit_price(
        self, model: str, at_ms: int, pool: str = "", region: str = "", capacity_type: str = ""
    ) -> Price | None:
        """The price of the most specific row for such a GPU at that instant; None if it has no price.

        model: as NVML or a node label writes it. An unknown pool, region or capacity type is "", which matches only
        rows without that selector."""
        gpu = parse_gpu_model(model)
        place = {"pool": pool, "region": region, "capacity_type": capacity_type}
        matching = [
            entry
            for entry in self._families.get(gpu.family, ())
            if entry.price.is_valid(at_ms)
            and entry.gpu.covers(gpu)
            and all(place.get(key, value) == value for key, value in entry.selectors)
        ]
        best = max(matching, key=lambda entry: len(entry.selectors), default=None)
        return best.price if best else None

    def near_row(self, model: str) -> PriceRow | None:
        """The row that nearly matches the name of a GPU without a price: one name begins with the other (L40 and
        L40S), or only other conditions differ. None if there is none."""
        words = parse_gpu_model(model).family.split()

        def common(row: PriceRow) -> int:
            own = parse_gpu_model(row.model).family.split()
            shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(own, words, strict=False)))
            whole = shared in (len(own), len(words))
            letter = len(own) == len(words) == 1 and (own[0].startswith(words[0]) or words[0].startswith(own[0]))
            return 2 * shared if whole else int(letter)

        nearest = max(self.rows, key=common, default=None)
        return nearest if nearest is not None and common(nearest) else None

    def shown_to(self, teams: Collection[str] | None) -> PriceBook:
        """The book as a caller with these teams (None: all) may see it: without the commitments that other teams own,
        and without their rates. For display only, because its prices are incomplete."""
        hidden = {one.id for one in self.commitments if teams is not None and one.owner not in {IDLE, *teams}}
        kept = {
            "commitments": tuple(one for one in self.commitments if one.id not in hidden),
            "rows": tuple(row for row in self.rows if row.commitment not in hidden),
        }
        return self.model_copy(update=kept) if hidden else self

    def committed(self, at_ms: int) -> tuple[Committed, ...]:
        """The commitments in force at that instant, in the book's order, each with its rate."""
        by_id = {one.id: one for one in self.commitments}
        return tuple(
            Committed(by_id[entry.row.commitment or ""], entry.price, entry.gpu)
            for entry in self._committed
            if entry.price.is_valid(at_ms)
        )

    def commits(self, start_ms: int, end_ms: int) -> bool:
        """Whether any commitment is in force in the span."""
        return any(entry.overlaps(start_ms, end_ms) for entry in self._committed)

    @property
    def _entries(self) -> list[_Entry]:
        return [*(entry for family in self._families.values() for entry in family), *self._committed]

    @cached_property
    def prices(self) -> tuple[Price, ...]:
        """Every row's price, by model, capacity type and id."""
        prices = [entry.price for entry in self._entries]
        return tuple(sorted(prices, key=lambda price: (price.row.model, price.row.capacity_type or "", price.id)))

    def cuts(self, start_ms: int, end_ms: int) -> tuple[int, ...]:
        """Instants strictly inside the span at which a row begins or ends, in order."""
        edges = {edge for entry in self._entries for edge in (entry.price.start_ms, entry.price.end_ms)}
        return tuple(sorted(edge for edge in edges if start_ms < edge < end_ms))


def load(path: Path) -> PriceBook:
    """Reads a price book. Raises gputally.base.yaml_file.FileFault with file:line for every fault."""
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
        raise PriceFault(index, "valid_to", f"the row ends at or before its start: {row.valid_from} to {row.valid_to}")
    if row.amortised is not None:
        in_service, end_of_life = row.amortised.life_ms(tz)
        if start_ms < in_service:
            raise PriceFault(
                index, "valid_from", f"the row begins before its GPUs are in service: {row.amortised.in_service}"
            )
        if row.valid_to is not None and end_ms > end_of_life:
            raise PriceFault(
                index, "valid_to", "the row ends after the life of its GPUs, when nothing is left to amortise"
            )
        end_ms = min(end_ms, end_of_life)
    price = Price(row.id, row.unit_price(tz), row.list_price(tz), row, start_ms, end_ms)
    return _Entry(index, row, price, gpu, row.selectors)


def _rates(one: Commitment, entries: list[_Entry]) -> list[_Entry]:
    """A commitment's rows in order of time. Raises PriceFault if two rates are valid at the same time."""
    ordered = sorted(entries, key=lambda entry: entry.price.start_ms)
    for first, second in pairwise(ordered):
        if second.price.start_ms < first.price.end_ms:
            raise PriceFault(second.number, "id", f"row {second.row.id!r} and row {first.row.id!r} are both the rate "
                                                 f"of commitment {one.id!r} at the same time: end one of them before "
                                                 "the other begins")  # fmt: skip
    return ordered


def _check_pair(first: _Entry, second: _Entry, family: list[_Entry]) -> None:
    """Refuses two rows that could both apply while neither is more specific. `pool: a` and `capacity_type: spot` are
    such a pair. They are allowed if rows with both conditions cover the time in which both are valid. The family is
    then closed under intersection, and the row with the most selectors includes all others."""
    start = max(first.price.start_ms, second.price.start_ms)
    end = min(first.price.end_ms, second.price.end_ms)
    if start >= end or first.selectors < second.selectors or second.selectors < first.selectors:
        return
    both = first.selectors | second.selectors
    if len(dict(both)) < len(both):
        return  # they require different values of the same property, so no GPU matches both
    if first.selectors != second.selectors and _covered(start, end, [e for e in family if e.selectors == both]):
        return
    if first.selectors == second.selectors:
        message = f"valid at the same time as row {first.row.id!r} for the same GPUs: end one before the other begins"
    else:
        conditions = ", ".join(f"{key}: {value}" for key, value in sorted(both))
        message = (
            f"ambiguous with row {first.row.id!r}: both match {conditions}, and no row has all these conditions; "
            "add such a row"
        )
    raise PriceFault(second.number, "id", f"row {second.row.id!r} is {message}")


def _covered(start: int, end: int, entries: list[_Entry]) -> bool:
    """Whether at every instant of [start, end) one of the entries is valid."""
    for price in sorted((entry.price for entry in entries), key=lambda price: price.start_ms):
        if price.is_valid(start):
            start = price.end_ms
    return start >= end


def _decimal_text(value: object) -> str:
    """A JSON default that writes equal decimals as equal text."""
    if isinstance(value, Decimal):
        return plain(value.normalize())
    raise TypeError(f"no canonical form for {type(value).__name__}")
