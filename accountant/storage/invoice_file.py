"""Reads a provider's invoice (FOCUS or AWS CUR, CSV or Parquet, also `.csv.gz`).

A separate DuckDB database in memory, limited to 256 MB, sums the charges. Arrow reads CSV as a stream, and only the
columns that count: users write into the others (tags, names, descriptions), and no text of theirs, such as a line end
or a `#`, may change or lose a charge. Amounts are exact decimals and never become floats. Rows are summed per kind of
item, so a month of millions of lines becomes a few items. The columns of the file determine its format. Taxes are an
item of their own, because they are not part of a GPU's price.

A charge belongs to the month that contains the middle of its charge period, because the provider's days and months are
in UTC and the accountant's months may begin some hours earlier or later. A charge for more than a month (such as a year
paid in advance) belongs to the month that contains the middle of its first day.

Sources: FOCUS specification (BilledCost, BillingCurrency, ChargeCategory, ChargePeriodStart, ChargePeriodEnd, RegionId,
PricingCategory, SkuId, SkuPriceDetails.InstanceType); AWS CUR data dictionary (line_item_*, product_*, pricing_term).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Final

import duckdb
import pyarrow as pa
import pyarrow.csv

from accountant.storage.duckdb_engine import one_line
from gputally.base.errors import AccountantError
from gputally.base.units import MS_PER_SECOND


class InvoiceUnreadable(AccountantError):
    """The file is not a readable invoice of a known format; the message has the place and the reason."""


@dataclass(frozen=True, slots=True)
class InvoiceItem:
    """The cost of one kind of item in the span.

    instance: the machine type; without one, the provider's id of the item or of its service; `Tax` for taxes."""

    instance: str
    region: str
    capacity_type: str
    currency: str
    amount: Decimal


_FOCUS = {
    "tax": "{ChargeCategory}",
    "instance": (
        "coalesce(CASE WHEN json_valid({SkuPriceDetails}) "
        "THEN json_extract_string({SkuPriceDetails}, '$.InstanceType') END, {SkuId}, {ServiceName})"
    ),
    "region": "{RegionId}",
    "kind": "{PricingCategory}",
    "currency": "{BillingCurrency}",
    "amount": "{BilledCost}",
    "start": "{ChargePeriodStart}",
    "end": "{ChargePeriodEnd}",
}
_CUR = {
    "tax": "{line_item_line_item_type}",
    "instance": "coalesce(nullif({product_instance_type}, ''), {line_item_usage_type}, {line_item_product_code})",
    "region": "{product_region}",
    "kind": "CASE WHEN {line_item_usage_type} LIKE '%Spot%' THEN 'Spot' ELSE {pricing_term} END",
    "currency": "{line_item_currency_code}",
    "amount": "{line_item_unblended_cost}",
    "start": "{line_item_usage_start_date}",
    "end": "{line_item_usage_end_date}",
}
_CAPACITY = {
    "Standard": "on-demand", "OnDemand": "on-demand", "Dynamic": "spot", "Spot": "spot", "Committed": "reserved",
    "Reserved": "reserved",
}  # fmt: skip


_DAY_S: Final = 86_400
_MONTH_S: Final = 32 * _DAY_S
"""No month is longer, even with a clock change."""
_MODEST: dict[str, str | bool | int | float | list[str]] = {"memory_limit": "256MB", "threads": 1}
_BLOCK_BYTES: Final = 8 * 2**20
"""Part of a CSV file that is read at once; no line may be longer."""


def read_invoice(path: Path, start_ms: int, end_ms: int) -> list[InvoiceItem]:
    """Return the items of the charges that belong to [start_ms, end_ms), sorted. Raises InvoiceUnreadable."""
    if not path.is_file():
        raise InvoiceUnreadable(f"{path}: there is no such file")
    bounds = {"start": start_ms / MS_PER_SECOND, "end": end_ms / MS_PER_SECOND}
    try:
        with duckdb.connect(config=_MODEST) as connection:
            connection.execute("SET TimeZone = 'UTC'")
            connection.execute("SET enable_progress_bar = false")  # DuckDB would print it into the command's output
            if path.suffix == ".parquet":
                source, given = "read_parquet($path)", {"path": str(path), **bounds}
                described = connection.execute(f"DESCRIBE FROM {source}", {"path": str(path)}).fetchall()
                names = [str(row[0]) for row in described]
            else:
                source, given, names = "charges", dict(bounds), _csv(path).schema.names
            query = _query(path, {_plain(name): name for name in names}, source)
            if source == "charges":
                connection.register(source, _csv(path, [name for name in names if _plain(name) in _COUNTED]))
            rows = connection.execute(query, given).fetchall()
    except pa.ArrowException as error:
        raise InvoiceUnreadable(f"{path}: {one_line(error)}") from error
    except duckdb.Error as error:
        raise InvoiceUnreadable(f"{path}: {one_line(error)}") from error
    if any(not currency for _, _, _, currency, amount in rows if amount):
        raise InvoiceUnreadable(f"{path}: charges without a currency: get an export in which every charge has one")
    return [
        InvoiceItem(instance or "", region or "", _CAPACITY.get(kind or "", ""), currency or "", amount)
        for instance, region, kind, currency, amount in rows
    ]


def _csv(path: Path, columns: Sequence[str] = ()) -> pa.RecordBatchReader:
    """Open a CSV file with these columns, by default all, as texts. An empty text is null."""
    return pyarrow.csv.open_csv(
        str(path),
        pyarrow.csv.ReadOptions(block_size=_BLOCK_BYTES, use_threads=False),
        pyarrow.csv.ParseOptions(newlines_in_values=True),
        pyarrow.csv.ConvertOptions(
            include_columns=columns,
            column_types=dict.fromkeys(columns, pa.string()),
            null_values=[""],
            strings_can_be_null=True,
        ),
    )


def _query(path: Path, columns: Mapping[str, str], source: str) -> str:
    for fields in (_FOCUS, _CUR):
        needed = _plain(fields["amount"].strip("{}")), _plain(fields["start"].strip("{}"))
        if all(name in columns for name in needed):
            break
    else:
        raise InvoiceUnreadable(
            f"{path}: neither FOCUS (columns BilledCost and ChargePeriodStart) nor an AWS Cost and Usage Report "
            "(columns line_item_unblended_cost and line_item_usage_start_date)"
        )
    said = {name: _filled(text, columns) for name, text in fields.items()}
    start, end = (f"epoch(CAST({said[edge]} AS TIMESTAMPTZ))" for edge in ("start", "end"))
    ended = f"least(coalesce({end}, {start}), {start} + CASE WHEN {end} - {start} > {_MONTH_S} THEN {_DAY_S} END)"
    middle = f"({start} + {ended}) / 2"
    return (
        f"SELECT CASE WHEN {said['tax']} = 'Tax' THEN 'Tax' ELSE {said['instance']} END, "  # noqa: S608
        f"{said['region']}, {said['kind']}, upper({said['currency']}), "
        f"sum(CAST({said['amount']} AS DECIMAL(38, 18))) FROM {source} "
        f"WHERE {middle} >= $start AND {middle} < $end "
        "GROUP BY ALL ORDER BY ALL"
    )


def _filled(text: str, columns: Mapping[str, str]) -> str:
    """Return the expression with the file's own column names. A missing column is null."""
    parts = text.split("{")
    found = [parts[0]]
    for part in parts[1:]:
        name, _, rest = part.partition("}")
        column = columns.get(_plain(name))
        quoted = None if column is None else column.replace('"', '""')
        found.append(("NULL" if quoted is None else f'CAST("{quoted}" AS VARCHAR)') + rest)
    return "".join(found)


def _plain(name: str) -> str:
    """Return the normal form of a column name: `lineItem/UnblendedCost` and `line_item_unblended_cost` are equal."""
    return "".join(char for char in name.lower() if char.isalnum())


_COUNTED: Final = frozenset(
    _plain(name) for fields in (_FOCUS, _CUR) for text in fields.values() for name in re.findall(r"{(\w+)}", text)
)
"""The columns that any query uses, in their normal form."""
