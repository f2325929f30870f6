"""The query on docs/lake.md gives the ledger's answer on every engine that the page names."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any

import polars as pl
import pytest

from accountant.billing.usage_pricing import cost
from accountant.core.settings import LakeCatalog
from accountant.lake.iceberg_catalog import namespace_of
from accountant.lake.tables import USAGE_HOURLY
from accountant.wire.policy_models import UNASSIGNED
from accountant.wire.usage_cost_and_job_models import Dimension
from gputally.__main__ import main
from scripts.reference_pages import LAKE_PAGE
from tests.docs.code_blocks import CodeBlock, code_blocks_of
from tests.lake.comparison_queries import CENTRE, PROJECT, SPAN, PublishedLedger, published
from tests.ledger.busy_ledger import BOOK
from tests.moments import present
from tests.real.clickhouse import clickhouse_rows
from tests.real.object_store import ObjectStore
from tests.real.rest_catalog import RestCatalog
from tests.real.spark import SparkCluster
from tests.real.trino import Trino

pytestmark = pytest.mark.real

Answer = Mapping[tuple[str, str], tuple[float, float, Decimal]]
"""GPU-hours, unpriced GPU-hours and cost by team and currency."""

COLUMNS = ("team", "currency", "gpu_hours", "unpriced_gpu_hours", "cost")


@pytest.fixture(scope="module")
def known() -> Iterator[PublishedLedger]:
    with published() as found:
        yield found


@pytest.fixture(scope="module")
def over_rest(
    rest_catalog: RestCatalog, object_store: ObjectStore, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PublishedLedger]:
    secrets = object_store.write_secrets(tmp_path_factory.mktemp("secrets") / "lake.yaml")
    catalog = LakeCatalog(type="rest", uri=rest_catalog.url)
    with published(rest_catalog.warehouse, catalog, secrets=secrets, name=f"prod-{uuid.uuid4().hex}") as found:
        yield found


def block(language: str, *words: str, holding: str = "") -> str:
    """Return the page's only block in this language."""
    text = LAKE_PAGE.read_text(encoding="utf-8")
    found: list[CodeBlock] = [
        one
        for one in code_blocks_of(LAKE_PAGE, text)
        if one.language == language and one.words == words and holding in one.text
    ]
    (one,) = found
    return one.text


def settings(text: str, separator: str | None) -> dict[str, str]:
    return {name: value.strip() for name, value in (line.split(separator, 1) for line in text.splitlines())}


def as_the_ledger_says(known: PublishedLedger, answer: Answer) -> bool:
    """Compare hours exactly, and costs, which the rows store with nine decimals, within a millionth. Time without a
    price is beside the cost."""
    held = {
        line.key["team"]: line.accounts_gpu_us.allocated
        for line in present(known.ledger).usage(SPAN, ("team",)).lines()
    }
    billed = {line.key["team"]: line for line in cost(present(known.ledger), BOOK, *SPAN, ("team",)).lines}
    priced = {line.key["team"]: line.cost for line in billed.values() if not line.unpriced_gpu_us}
    hours = {
        (team, "USD"): (us / 3.6e9, (billed[team].unpriced_gpu_us if team in billed else 0) / 3.6e9)
        for team, us in held.items()
    }
    assert any(unpriced for _, unpriced in hours.values())
    return answer.keys() == hours.keys() and all(
        found[:2] == pytest.approx(hours[of])
        and (of[0] not in priced or abs(found[2] - (priced[of[0]] or 0)) < Decimal("1e-6"))
        for of, found in answer.items()
    )


def test_pandas_and_polars(known: PublishedLedger) -> None:
    scan = known.connect().open(USAGE_HOURLY).scan("day >= '2026-10-01' and day < '2026-11-01'")
    names: dict[str, Any] = {"scan": scan, "pl": pl}
    exec(block("python", holding="to_pandas"), names)
    assert as_the_ledger_says(
        known,
        {
            of: (row.gpu_hours, row.unpriced_gpu_hours, Decimal(row.cost or 0))
            for of, row in names["by_team"].iterrows()
        },
    )
    exec(block("python", holding="to_polars"), names)
    assert as_the_ledger_says(known, answered(names["by_team"].select(*COLUMNS).rows()))
    names |= {"json": json}
    held_us = pl.col("busy_us") + pl.col("allocated_idle_us") + pl.col("allocated_unknown_us")
    for label, expression in of_labels("polars").items():
        by_value = scan.to_polars().group_by(eval(expression, names).alias("value")).agg(held_us.sum())
        assert {value: us for value, us in by_value.rows() if us} == held_by(known, label)
    for label, expression in of_labels("pandas").items():
        values = eval(expression, names).astype(object)
        sums = names["frame"].held_us.groupby(values.where(values.notna(), ""), dropna=False).sum()
        assert {value or None: us for value, us in sums.items() if us} == held_by(known, label)


def test_duckdb_with_labels(known: PublishedLedger) -> None:
    connection = known.connect().open(USAGE_HOURLY).scan().to_duckdb("usage_hourly")
    for label, expression in of_labels("DuckDB").items():
        found = held_on(lambda sql: connection.sql(sql).fetchall(), expression, "usage_hourly")
        assert found == held_by(known, label)
    connection.close()


def test_clickhouse(known: PublishedLedger) -> None:
    table = known.connect().open(USAGE_HOURLY)
    place, _, version = table.metadata_location.removeprefix("file://").rpartition("/metadata/")
    shown = block("sql", "clickhouse")
    asked = shown.replace("/lake/gputally_prod_eu/usage_hourly", place).replace("00012-….metadata.json", version)
    rows = clickhouse_rows(asked)
    assert as_the_ledger_says(known, answered([tuple(row[name] for name in COLUMNS) for row in rows]))
    (read,) = re.findall(r"^FROM (icebergLocal\(.*\))$", asked, re.MULTILINE)
    for label, expression in of_labels("ClickHouse").items():
        found = held_on(lambda sql: [tuple(row.values()) for row in clickhouse_rows(sql)], expression, read)
        assert found == held_by(known, label)


def test_clickhouse_over_all_ledgers(known: PublishedLedger, capsys: pytest.CaptureFixture[str]) -> None:
    assert known.settings.lake is not None
    with published(known.settings.lake.warehouse, name="lab", seed=3) as other:
        query = of_all_ledgers(known, "clickhouse", "lake", capsys)

        def rows(sql: str) -> list[tuple[Any, ...]]:
            return [tuple(row.values()) for row in clickhouse_rows(f"WITH usage AS ({query}) {sql}")]

        found = of_both(block("sql", holding="FROM usage"), rows)
        assert found == of_the_ledgers(known, other)
        other.connect().retire()


def of_labels(engine: str) -> dict[Dimension, str]:
    """Return the page's expressions for the values of two labels on an engine, by the label."""
    (row,) = re.findall(rf"^\| {engine} \| `(.*)` \| `(.*)` \|$", LAKE_PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return dict(zip((PROJECT, CENTRE), row, strict=True))


def held_by(known: PublishedLedger, label: Dimension) -> dict[str | None, int]:
    """Return the held GPU-µs of each value of a label as the ledger has it; None: unknown."""
    lines = present(known.ledger).usage(SPAN, (label,)).lines()
    found = {line.key[label] or None: line.accounts_gpu_us.allocated for line in lines}
    assert {None, UNASSIGNED} < found.keys()
    return {value: held for value, held in found.items() if held}


def held_on(rows: Callable[[str], list[tuple[Any, ...]]], expression: str, table: str) -> dict[str | None, int]:
    """Return the held GPU-µs of each value of a label on an engine."""
    held = "sum(busy_us + allocated_idle_us + allocated_unknown_us)"
    return {value: int(us) for value, us in rows(f"SELECT {expression}, {held} FROM {table} GROUP BY 1") if us}


def of_ledger(sql: str, catalog: str, known: PublishedLedger) -> str:
    """Return the page's query of this ledger."""
    return sql.replace("lake.gputally_prod_eu", f"{catalog}.{namespace_of(known.publisher.name)}")


def of_all_ledgers(known: PublishedLedger, dialect: str, catalog: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what the page's command prints for a lake of two ledgers."""
    asked = block("sh", "elsewhere", holding="fleet view").split()
    assert asked == ["gputally", "fleet", "view", "--lake", "lake.yaml", "--dialect", "trino"]
    assert known.settings.lake is not None
    file = known.settings.data / "view-lake.yaml"
    file.write_text(known.settings.lake.model_dump_json(exclude_none=True, exclude={"ledger"}))
    capsys.readouterr()
    assert main(["fleet", "view", "--lake", str(file), "--dialect", dialect, "--catalog", catalog]) == 0
    return capsys.readouterr().out


def of_both(sql: str, rows: Callable[[str], list[tuple[Any, ...]]]) -> dict[str, Decimal]:
    """Return the cost of each ledger by the page's query over all ledgers."""
    found: dict[str, Decimal] = {}
    for ledger, _, currency, _, _, amount in rows(sql):
        assert currency == "USD"
        found[ledger] = found.get(ledger, Decimal(0)) + Decimal(amount or 0)
    return found


def of_the_ledgers(*several: PublishedLedger) -> dict[str, Decimal]:
    return {
        one.publisher.name: sum((row["cost"] or Decimal(0) for row in one.connect().read(USAGE_HOURLY)), Decimal(0))
        for one in several
    }


@pytest.fixture(scope="module")
def beside_rest(
    over_rest: PublishedLedger,
    rest_catalog: RestCatalog,
    object_store: ObjectStore,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[PublishedLedger]:
    """A second ledger in the same lake, which an earlier version published."""
    secrets = object_store.write_secrets(tmp_path_factory.mktemp("secrets") / "lake.yaml")
    catalog = LakeCatalog(type="rest", uri=rest_catalog.url)
    name = f"lab-{uuid.uuid4().hex}"
    with published(rest_catalog.warehouse, catalog, secrets=secrets, name=name, seed=3) as found:
        with found.connect().open(USAGE_HOURLY).update_schema() as update:
            update.delete_column("tensor_active_us")
        yield found


def answered(rows: list[tuple[Any, ...]]) -> Answer:
    return {
        (team, currency): (float(hours), float(unpriced), Decimal(amount or 0))
        for team, currency, hours, unpriced, amount in rows
    }


@pytest.mark.timeout(600)
def test_spark_over_a_rest_catalog(
    over_rest: PublishedLedger, rest_catalog: RestCatalog, object_store: ObjectStore, spark_cluster: SparkCluster
) -> None:
    name = f"lake{uuid.uuid4().hex}"
    text = block("ini", "spark").replace("catalog.lake", f"catalog.{name}")
    text = text.replace("https://catalog.example", rest_catalog.url).replace("https://store.example", object_store.url)
    for key, value in settings(text, None).items():
        spark_cluster.session.conf.set(key, value)
    for key in ("s3.access-key-id", "s3.secret-access-key", "client.region"):
        spark_cluster.session.conf.set(f"spark.sql.catalog.{name}.{key}", object_store.iceberg[key])
    one = block("sql", holding="FROM lake.")
    assert as_the_ledger_says(over_rest, answered(spark_cluster.rows(of_ledger(one, name, over_rest))))
    table = of_ledger("lake.gputally_prod_eu.usage_hourly", name, over_rest)
    for label, expression in of_labels("Spark").items():
        assert held_on(spark_cluster.rows, expression, table) == held_by(over_rest, label)


@pytest.mark.timeout(600)
def test_trino_over_a_rest_catalog(
    over_rest: PublishedLedger,
    beside_rest: PublishedLedger,
    rest_catalog: RestCatalog,
    object_store: ObjectStore,
    trino: Trino,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = f"lake{uuid.uuid4().hex}"
    text = block("ini", "trino").replace("https://catalog.example", rest_catalog.url)
    shown = settings(text.replace("https://store.example", object_store.url), "=")
    assert shown.pop("connector.name") == "iceberg"
    keys = {"s3.aws-access-key": object_store.access_key, "s3.aws-secret-key": object_store.secret_key}
    trino.create_catalog(name, {**shown, **keys})
    one = block("sql", holding="FROM lake.")
    assert as_the_ledger_says(over_rest, answered(trino.rows(of_ledger(one, name, over_rest))))
    table = of_ledger("lake.gputally_prod_eu.usage_hourly", name, over_rest)
    for label, expression in of_labels("Trino").items():
        assert held_on(trino.rows, expression, table) == held_by(over_rest, label)
    query = of_all_ledgers(over_rest, "trino", name, capsys)
    found = of_both(block("sql", holding="FROM usage"), lambda sql: trino.rows(f"WITH usage AS ({query}) {sql}"))
    theirs = of_the_ledgers(over_rest, beside_rest)
    assert {ledger: found[ledger] for ledger in theirs} == theirs
