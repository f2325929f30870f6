"""Defines the tables of the lake: columns, units, keys, partitions and order.

Each ledger has tables of its own, in a namespace of its own (accountant.lake.iceberg_catalog.namespace_of). Every table
has the column `ledger`, the name under which the accountant publishes, so that rows of several ledgers can be put
together. A partition is replaced as a whole. All columns are nullable; null means "unknown" or "not applicable", never
zero. Instants are `timestamptz` in UTC, and also integer milliseconds since 1970 (`…_ms`), which all engines treat
alike. Amounts are decimal(38,9)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final, Literal, NamedTuple

import pyarrow as pa

from accountant.ledger.usage import ACCOUNTS, PRICED_BY, START_UP
from accountant.reports.focus_charge_rows import COST_AND_USAGE, NUMBERS, RESOURCE_TYPES
from accountant.wire.dimensions import DECLARED, IN_LAKE
from accountant.wire.usage_cost_and_job_models import Dimension
from gputally.base.measures import REPORTED

ColumnType = Literal["string", "long", "boolean", "date", "timestamptz", "decimal"]
ARROW: Final[dict[ColumnType, pa.DataType]] = {
    "string": pa.string(),
    "long": pa.int64(),
    "boolean": pa.bool_(),
    "date": pa.date32(),
    "timestamptz": pa.timestamp("us", tz="UTC"),
    "decimal": pa.decimal128(38, 9),
}
SQL_TYPE: Final[dict[ColumnType, str]] = {
    "string": "VARCHAR", "long": "BIGINT", "boolean": "BOOLEAN", "date": "DATE",
    "timestamptz": "TIMESTAMP WITH TIME ZONE", "decimal": "DECIMAL(38, 9)",
}  # fmt: skip
DECIMALS: Final = 9
"""Decimals of an amount."""
_QUANTUM: Final = Decimal(1).scaleb(-DECIMALS)


class Column(NamedTuple):
    """A column of a table. text: a description of its content, with the unit."""

    name: str
    type: ColumnType
    text: str


@dataclass(frozen=True, slots=True)
class LakeTable:
    """A table in the lake.

    text: a description of its rows.
    partition: the columns by which rows are divided into partitions. A partition is written as a whole.
    key: the columns that together identify a row.
    order: the columns by which the rows of a file are sorted."""

    name: str
    text: str
    columns: Sequence[Column]
    partition: Sequence[str]
    key: Sequence[str]
    order: Sequence[str]

    @property
    def arrow(self) -> pa.Schema:
        return pa.schema([(column.name, ARROW[column.type]) for column in self.columns])

    def complete(self, batches: pa.RecordBatchReader) -> pa.RecordBatchReader:
        """The same rows, with nulls in the columns that an earlier version did not publish."""
        missing = [column for column in self.columns if column.name not in batches.schema.names]
        schema = pa.schema([*batches.schema, *((column.name, ARROW[column.type]) for column in missing)])
        return pa.RecordBatchReader.from_batches(
            schema,
            (
                pa.record_batch(
                    [*batch.columns, *(pa.nulls(batch.num_rows, ARROW[column.type]) for column in missing)],
                    schema=schema,
                )
                for batch in batches
            ),
        )

    def of_rows(self, rows: Sequence[dict[str, Any]]) -> pa.Table:
        """The rows in the table's order, with amounts rounded to DECIMALS."""
        amounts = [column.name for column in self.columns if column.type == "decimal"]
        rounded = [
            {**row, **{name: row[name].quantize(_QUANTUM) for name in amounts if row.get(name) is not None}}
            for row in rows
        ]
        found = pa.Table.from_pylist(rounded, schema=self.arrow)
        return found.sort_by([(name, "ascending") for name in self.order])


_CHUNK: Final = 50_000
"""Number of rows that are hashed at one time."""


def digest(rows: pa.Table) -> str:
    """SHA-256 of the rows: equal rows have equal digests."""
    hashed = _Hash()
    with pa.ipc.new_stream(pa.PythonFile(hashed, mode="w"), rows.schema) as stream:
        stream.write_table(rows.combine_chunks(), max_chunksize=_CHUNK)
    return hashed.of.hexdigest()


class _Hash:
    """A file object that only computes a hash."""

    closed = False

    def __init__(self) -> None:
        self.of = hashlib.sha256()

    def write(self, content: bytes) -> int:
        self.of.update(content)
        return len(content)

    def flush(self) -> None:
        """Does nothing; there is no buffer."""

    def close(self) -> None:
        """Does nothing; there is no file."""


DIMENSIONS: Final[tuple[Dimension, ...]] = tuple(name for name in IN_LAKE if name not in PRICED_BY)
"""The dimensions of rows of `usage_hourly`, besides PRICED_BY, the hour and the price."""
LABELS: Final = "labels"
"""The column of `usage_hourly` with all exported labels of a pod."""
ACCOUNT_COLUMNS: Final = tuple(f"{name}_us" for name in (*ACCOUNTS, *START_UP))
MEASURE_COLUMNS: Final = (
    "node_down_us", "borrowed_busy_us", "unattributed_busy_us",
    *(name for each in REPORTED for name in (each.field, each.unknown_field)),
)  # fmt: skip
"""In the order of accountant.ledger.usage.MEASURES."""


def column_of(dimension: Dimension) -> str:
    """The column of a dimension of `usage_hourly`."""
    return DECLARED[dimension].column or dimension


_LEDGER = Column("ledger", "string", "name of the publishing ledger")
_DAY = Column("day", "date", "local day in the ledger's time zone")
_TEXTS: Final[dict[str, str]] = {
    **{name: DECLARED[name].text for name in IN_LAKE},
    "busy_us": "time held and in use, GPU-µs",
    "allocated_idle_us": "time held and not in use, GPU-µs",
    "allocated_unknown_us": "time held of which the use is not known, GPU-µs",
    "unallocated_us": "time not held, GPU-µs",
    "unmetered_us": "time without any record, GPU-µs",
    "down_us": "time for which the GPU or its node was out of service, GPU-µs",
    "starting_us": "part of allocated_idle_us before the pod's first container ran, GPU-µs",
    "gang_waiting_us": "part of allocated_idle_us while others of the gang did not run yet, GPU-µs",
    "node_down_us": "part of down_us for which the whole node was out of service, GPU-µs",
    "borrowed_busy_us": "busy time beyond the holder's own allocation, GPU-µs; in no account",
    "unattributed_busy_us": "busy time without a known holder, GPU-µs; in no account",
    **{each.field: each.text for each in REPORTED},
    **{each.unknown_field: each.unknown_text for each in REPORTED},
}

USAGE_HOURLY: Final = LakeTable(
    "usage_hourly",
    "Every GPU-microsecond of capacity, by hour, GPU and holder, after overlapping records are resolved. The six "
    "accounts from busy_us to down_us add up to the capacity.",
    (
        _LEDGER,
        _DAY,
        Column("hour", "timestamptz", "start of the local hour"),
        Column("start_ms", "long", "start of the row's time: the hour, or the part of it between changes of a price"),
        Column("end_ms", "long", "end of the row's time, exclusive"),
        *(Column(column_of(name), "string", _TEXTS[name]) for name in (*DIMENSIONS, *PRICED_BY)),
        Column(
            LABELS,
            "string",
            'exported labels of the pod, JSON: `{"project":"search"}`; `__unassigned__` if a label is not set, '
            "`__other__` if its value was not kept; an unknown label is missing; null if none is known or nothing "
            "holds the GPU",
        ),
        *(Column(name, "long", _TEXTS[name]) for name in (*ACCOUNT_COLUMNS, *MEASURE_COLUMNS)),
        Column("currency", "string", "currency of the cost; null without a price book"),
        Column("price_book", "string", "version of the price book"),
        Column(
            "price_row", "string", "row of the price book; null if nothing is billed, or if no row or several apply"
        ),
        Column("unit_price", "decimal", "price of one GPU-hour; null if price_row is null"),
        Column(
            "cost",
            "decimal",
            "cost of all accounts but unmetered and down, as far as they have a price; null if none has",
        ),
        Column("unpriced_us", "long", "billed time without a price, GPU-µs; `cost` does not contain it"),
    ),
    ("day",),
    ("ledger", "start_ms", *map(column_of, (*DIMENSIONS, *PRICED_BY)), LABELS),
    ("team", "queue", "namespace", "job", "pod", "gpu", "start_ms"),
)
DAYS: Final = LakeTable(
    "days",
    "The control totals of each published day of `usage_hourly`.",
    (
        _LEDGER,
        _DAY,
        Column("start_ms", "long", "start of the day"),
        Column("end_ms", "long", "end of the day, or the instant up to which the current day is published"),
        Column("sealed", "boolean", "whether the day is over and all clusters have reported later records"),
        Column("rows", "long", "number of the day's rows"),
        *(Column(name, "long", _TEXTS[name]) for name in ACCOUNT_COLUMNS[:6]),
        Column("currency", "string", "currency of the cost; null without a price book"),
        Column("cost", "decimal", "sum of the known costs"),
        Column("unpriced_us", "long", "billed time without a price, GPU-µs"),
        Column("digest", "string", "SHA-256 of the day's rows"),
        Column("timezone", "string", "time zone of the ledger's days"),
        Column("published", "timestamptz", "instant at which the day was last written"),
    ),
    (),
    ("ledger", "day"),
    ("day",),
)
REGISTERS: Final = LakeTable(
    "registers",
    "The control totals of each published part of the other registers: pods, nodes, decisions and so on.",
    (
        _LEDGER,
        Column("register", "string", "name of the table"),
        Column("part", "string", "month or day of the rows; empty if the table is not divided by month or day"),
        Column("rows", "long", "number of rows of the part"),
        Column("digest", "string", "SHA-256 of the part's rows"),
    ),
    (),
    ("ledger", "register", "part"),
    ("register", "part"),
)
LEDGERS: Final = LakeTable(
    "ledgers",
    "The ledger that publishes here, in one row.",
    (
        _LEDGER,
        Column("id", "string", "id of the ledger; a ledger that is renamed keeps it"),
        Column("acts", "long", "number of acts in the ledger's journal"),
        Column("timezone", "string", "time zone of the ledger's months, days and hours"),
        Column("grace_days", "long", "days for which a month waits for late records after its end"),
        Column("first_ms", "long", "start of the oldest record"),
        Column("newest_ms", "long", "end of the newest record"),
        Column("until_ms", "long", "instant up to which the ledger's figures are published"),
        Column("clusters", "string", "end of the newest record of each cluster that reports, JSON"),
        Column("teams", "string", "teams that queues and namespaces name, JSON"),
        Column("exported_labels", "string", "labels of pods that are dimensions, JSON"),
        Column("published", "timestamptz", "instant of the last publication"),
        Column("version", "string", "version of gputally that published"),
        Column("renamed_to", "string", "name under which the ledger is published since; null if it is this one"),
    ),
    (),
    ("ledger",),
    ("ledger",),
)
STATEMENTS: Final = LakeTable(
    "statements",
    "Each month's statement as a whole.",
    (
        _LEDGER,
        Column("month", "string", "2026-10"),
        Column("status", "string", "`open`, `grace`, `due`, `closed` or `published`"),
        Column("timezone", "string", "time zone of the month"),
        Column("currency", "string", "currency of the amounts; null without a price book"),
        Column("price_book", "string", "version of the price book"),
        Column("gpu_us", "long", "capacity, GPU-µs"),
        Column("cost", "decimal", "exact sum of the priced lines"),
        Column("payable", "decimal", "cost, rounded to the currency's minor unit"),
        Column(
            "due", "decimal", "payable with commitments, corrections, credits and charges, of teams that are billed"
        ),
        Column("unpriced_gpu_us", "long", "billed time without a price, GPU-µs"),
        Column("hash", "string", "SHA-256 of `canonical`"),
        Column("canonical", "string", "the statement's canonical JSON"),
    ),
    (),
    ("ledger", "month"),
    ("month",),
)
STATEMENT_LINES: Final = LakeTable(
    "statement_lines",
    "The lines of each month's statement, and what is booked beside them.",
    (
        _LEDGER,
        Column("month", "string", "2026-10"),
        Column("line", "long", "number of the line in the statement, from 1"),
        Column("kind", "string", "`usage`, `commitment`, `correction` or `adjustment`"),
        Column("team", "string", _TEXTS["team"]),
        Column("account", "string", "account of the time; null for an adjustment"),
        Column("detail", "string", "subdivision of the account, or empty"),
        Column("gpu_model", "string", _TEXTS["gpu_model"]),
        Column("capacity_type", "string", _TEXTS["capacity_type"]),
        Column("price_row", "string", "row of the price book"),
        Column("unit_price", "decimal", "of one GPU-hour"),
        Column("gpu_us", "long", "time of the line, GPU-µs"),
        Column("gpu_hours", "decimal", "time of the line in GPU-hours, rounded to the nine decimals that are priced"),
        Column("cost", "decimal", "unit_price × gpu_hours, or the amount of a correction or adjustment"),
        Column("currency", "string", "currency of the amounts"),
        Column("about_month", "string", "month that a correction or adjustment is about"),
        Column("reason", "string", "reason of a correction or adjustment"),
    ),
    ("month",),
    ("ledger", "month", "line"),
    ("line",),
)
_FOCUS_TEXTS: Final[dict[str, str]] = {
    "AvailabilityZone": "zone of the node",
    "BilledCost": "price after discounts × quantity; a team's charges add up to what is due",
    "BillingAccountId": "setting `issuer.billing_account`",
    "BillingAccountName": "setting `issuer.billing_account_name`",
    "BillingCurrency": "currency of the amounts",
    "BillingPeriodEnd": "end of the month",
    "BillingPeriodStart": "start of the month",
    "ChargeCategory": "`Usage`, `Credit` or `Adjustment`",
    "ChargeClass": "`Correction` for late records of an earlier month",
    "ChargeDescription": "what is charged",
    "ChargeFrequency": "`Usage-Based` or `One-Time`",
    "ChargePeriodEnd": "end of the local day, or of the month for a charge without a day",
    "ChargePeriodStart": "start of the local day, or of the month for a charge without a day",
    "CommitmentDiscountCategory": "`Usage` for a commitment",
    "CommitmentDiscountId": "commitment of the price row",
    "CommitmentDiscountName": "equal to CommitmentDiscountId",
    "CommitmentDiscountQuantity": "GPU-hours of the commitment",
    "CommitmentDiscountStatus": "`Used` or `Unused`",
    "CommitmentDiscountType": "`Committed GPUs`",
    "CommitmentDiscountUnit": "`GPU-Hours`",
    "ConsumedQuantity": "GPU-hours; null for an unused commitment",
    "ConsumedUnit": "`GPU-Hours`",
    "ContractedCost": "equal to BilledCost",
    "ContractedUnitPrice": "price of the price row after its discount",
    "EffectiveCost": "equal to BilledCost",
    "HostProviderName": "setting `issuer.host`",
    "InvoiceDetailId": "line of the team's invoice",
    "InvoiceId": "the team's invoice of the month; null for what no team is billed for",
    "InvoiceIssuerName": "setting `issuer.name`",
    "ListCost": "list price × quantity, rounded as BilledCost",
    "ListUnitPrice": "price of the price row before its discount",
    "PricingCategory": "`Standard`, `Dynamic` (spot) or `Committed`",
    "PricingQuantity": "GPU-hours",
    "PricingUnit": "`GPU-Hours`",
    "RegionId": "region of the node",
    "RegionName": "equal to RegionId",
    "ResourceId": "`cluster/namespace/pod`, or the commitment that was not used",
    "ResourceName": "the pod, or the commitment",
    "ResourceType": " or ".join((", ".join(f"`{one}`" for one in RESOURCE_TYPES[:-1]), f"`{RESOURCE_TYPES[-1]}`")),
    "ServiceCategory": "`Compute`",
    "ServiceName": "`GPU cluster`",
    "ServiceProviderName": "setting `issuer.name`",
    "ServiceSubcategory": "`Containers`",
    "SkuId": "GPU model and capacity type",
    "SkuMeter": "`GPU Hours`",
    "SkuPriceDetails": "GPU model, JSON",
    "SkuPriceId": "SkuId with the price row",
    "SubAccountId": "team that pays",
    "SubAccountName": "equal to SubAccountId",
    "SubAccountType": "`Team`",
    "Tags": "job, namespace, pool, queue, user and exported labels, JSON",
    "x_Account": "account of the time",
    "x_AboutMonth": "month that a correction or credit is about",
    "x_ChargeKey": "identifier of the charge, equal in every export with the same exported labels",
    "x_ClusterId": "cluster of the node",
    "x_Detail": "subdivision of the account",
    "x_GpuHoursAllocated": "GPU-hours held",
    "x_GpuHoursIdle": "GPU-hours held and not in use",
    "x_GpuHoursUsed": "GPU-hours in use",
    "x_PriceBookVersion": "version of the price book",
    "x_Reason": "reason of a correction or credit",
}


def _focus_type(name: str) -> ColumnType:
    if name in NUMBERS:
        return "decimal"
    return "timestamptz" if name.endswith(("PeriodStart", "PeriodEnd")) else "string"


FOCUS: Final = LakeTable(
    "focus",
    "The charges of each month in the form of FOCUS 1.4, Cost and Usage. The columns have FOCUS's own names.",
    (
        _LEDGER,
        Column("month", "string", "2026-10"),
        *(Column(name, _focus_type(name), _FOCUS_TEXTS[name]) for name in COST_AND_USAGE),
    ),
    ("month",),
    ("ledger", "month", "x_ChargeKey"),
    ("SubAccountId", "ChargePeriodStart", "x_ChargeKey"),
)
PODS: Final = LakeTable(
    "pods",
    "Pods as their nodes and their cluster saw them.",
    (
        _LEDGER,
        Column("month", "string", "local month in which the pod was created"),
        Column("cluster", "string", "cluster of the pod"),
        Column("uid", "string", "UID of the pod"),
        Column("namespace", "string", "namespace of the pod"),
        Column("pod", "string", "name of the pod"),
        Column("job", "string", _TEXTS["job"]),
        Column("team", "string", "team when the pod was created"),
        Column("queue", "string", "queue when the pod was created"),
        Column("created", "timestamptz", "creation of the pod"),
        Column("scheduled", "timestamptz", "placement on a node"),
        Column("started", "timestamptz", "start of the first container"),
        Column("ended", "timestamptz", "end of the pod"),
        Column("facts", "string", "all known facts of the pod, JSON"),
    ),
    ("month",),
    ("ledger", "cluster", "uid"),
    ("cluster", "namespace", "pod", "uid"),
)
NODES: Final = LakeTable(
    "nodes",
    "Nodes as they were read last, and those that no inventory lists.",
    (
        _LEDGER,
        Column("cluster", "string", "cluster of the node"),
        Column("node", "string", "name of the node"),
        Column("pool", "string", _TEXTS["pool"]),
        Column("region", "string", _TEXTS["region"]),
        Column("capacity_type", "string", _TEXTS["capacity_type"]),
        Column("facts", "string", "all known facts of the node, also what its agent said of itself, JSON"),
        Column("newest_ms", "long", "end of the node's newest record; null if unknown"),
    ),
    (),
    ("ledger", "cluster", "node"),
    ("cluster", "node"),
)
DECISIONS: Final = LakeTable(
    "decisions",
    "The decisions of the fairshare controller.",
    (
        _LEDGER,
        _DAY,
        Column("cluster", "string", "cluster of the controller"),
        Column("id", "string", "id that the controller gave the decision"),
        Column("at", "timestamptz", "instant of the decision"),
        Column("at_ms", "long", "instant of the decision"),
        Column("kind", "string", "kind of the decision"),
        Column("subject", "string", "queue, node or pod that it is about"),
        Column("decision", "string", "the decision, JSON"),
    ),
    ("day",),
    ("ledger", "cluster", "id"),
    ("at_ms", "id"),
)
POLICIES: Final = LakeTable(
    "policies",
    "Policies, each with the instant from which it is in force.",
    (
        _LEDGER,
        Column("version", "string", "version of the policy"),
        Column("effective", "timestamptz", "instant from which the policy is in force"),
        Column("effective_ms", "long", "instant from which the policy is in force"),
        Column("policy", "string", "the policy, JSON"),
    ),
    (),
    ("ledger", "effective_ms"),
    ("effective_ms",),
)
PRICES: Final = LakeTable(
    "prices",
    "The rows of every price book that was in force.",
    (
        _LEDGER,
        Column("price_book", "string", "version of the price book"),
        Column("taken", "timestamptz", "instant at which the price book came into force"),
        Column("price_row", "string", "id of the row"),
        Column("gpu_model", "string", "GPU model as the row names it"),
        Column("pool", "string", "pool for which the price is; null: any"),
        Column("region", "string", "region for which the price is; null: any"),
        Column("capacity_type", "string", "capacity type for which the price is; null: any"),
        Column("price", "decimal", "price in the unit `per`"),
        Column("per", "string", "unit of the price"),
        Column("currency", "string", "currency of the price"),
        Column("row", "string", "the whole row, JSON"),
    ),
    (),
    ("ledger", "price_book", "price_row"),
    ("taken", "price_book", "price_row"),
)
ACTS: Final = LakeTable(
    "acts",
    "The journal: each closing, correction, credit, price book and other act, chained by digests.",
    (
        _LEDGER,
        Column("number", "long", "1, 2, 3, … in the order of recording"),
        Column("at", "timestamptz", "instant of the act"),
        Column("at_ms", "long", "instant of the act"),
        Column("kind", "string", "kind of the act"),
        Column("subject", "string", "month, price book version, node, delivery or other thing that the act is about"),
        Column("who", "string", "author of the act"),
        Column("reason", "string", "reason that the author gave"),
        Column("content", "string", "content of the act, JSON; its fields depend on the kind"),
        Column("digest", "string", "SHA-256 over the digest of the preceding act and this act"),
    ),
    (),
    ("ledger", "number"),
    ("number",),
)
EPOCHS: Final = LakeTable(
    "epochs",
    "Epochs that jobs reported.",
    (
        _LEDGER,
        Column("cluster", "string", "cluster of the job"),
        Column("namespace", "string", "namespace of the job"),
        Column("job", "string", _TEXTS["job"]),
        Column("epoch", "long", "number of the epoch"),
        Column("at_ms", "long", "end of the epoch"),
        Column("who", "string", "caller that reported the epoch"),
    ),
    (),
    ("ledger", "cluster", "namespace", "job", "epoch"),
    ("cluster", "namespace", "job", "epoch"),
)
OUTBOXES: Final = LakeTable(
    "outboxes",
    "How far the ledger has taken the records of each agent. A ledger that has fewer does not publish.",
    (
        _LEDGER,
        Column("cluster", "string", "cluster of the agent's node"),
        Column("node", "string", "node of the agent"),
        Column("epoch", "string", "id of the agent's outbox"),
        Column("number", "long", "highest number up to which the ledger has every record of the outbox"),
    ),
    (),
    ("ledger", "cluster", "node", "epoch"),
    ("cluster", "node", "epoch"),
)
FIGURES: Final = (USAGE_HOURLY, DAYS, LEDGERS, STATEMENTS, STATEMENT_LINES, FOCUS, REGISTERS)
TABLES: Final = (*FIGURES, PODS, NODES, DECISIONS, POLICIES, PRICES, ACTS, EPOCHS, OUTBOXES)
"""FIGURES and the registers."""
BY_NAME: Final = {table.name: table for table in TABLES}
