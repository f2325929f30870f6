"""The lake equals the ledger, however often it is published and whatever state it is in."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from accountant.billing.statements import from_canonical
from accountant.billing.usage_pricing import cost
from accountant.bookkeeping.month_closing import statement_hash
from accountant.core.errors import LakeUnavailable
from accountant.core.periods import Month
from accountant.lake import tables
from accountant.lake.duckdb_engine import DuckDbEngine
from accountant.lake.iceberg_catalog import Catalogue, Removed
from accountant.lake.lake_comparison import LakeComparison
from accountant.lake.publisher import Published
from accountant.ledger.protocols import Facts
from accountant.prices.price_book import Billing, Commitment, IdlePolicy, PriceBook
from accountant.reports import focus_charge_rows, report_builder
from accountant.reports.statement_line_charges import ChargeListing
from accountant.wire.usage_cost_and_job_models import Dimension
from agent.wire import Holder
from tests.hypothesis_examples import examples
from tests.lake.comparison_queries import HOUR, PROJECT, SPAN, KeptLedger, PublishedLedger, age, overwrite, published
from tests.lake.publishers import Unplugged, another_process
from tests.ledger.busy_ledger import BOOK, HAND
from tests.ledger.conftest import START_MS
from tests.moments import present

SEPTEMBER = Month(2026, 9)


@pytest.fixture(scope="module")
def kept_ended(tmp_path_factory: pytest.TempPathFactory) -> KeptLedger:
    """In New York the first four of its five hours are those of a September that is over."""
    with published(timezone="America/New_York") as found:
        return found.kept(tmp_path_factory.mktemp("kept") / "files")


@pytest.fixture
def running(known: PublishedLedger) -> PublishedLedger:
    """A published ledger whose publisher has seen that nothing is to be written."""
    assert known.publisher.publish().days == ()
    return known


@pytest.fixture
def ended(kept_ended: KeptLedger) -> Iterator[PublishedLedger]:
    with kept_ended.again() as found:
        yield found


def rows(known: PublishedLedger, table: tables.LakeTable) -> list[dict[str, Any]]:
    return known.connect().read(table)


def close_september(known: PublishedLedger) -> None:
    known.books.close(SEPTEMBER, "ana", "month end", [one.kind for one in known.books.standing(SEPTEMBER)])


def priced(known: PublishedLedger, book: PriceBook, *by: Dimension) -> Decimal:
    """Return the ledger's cost of the one day in the lake."""
    (total,) = rows(known, tables.DAYS)
    found = cost(present(known.ledger), book, total["start_ms"], total["end_ms"], by)
    return sum((one.cost for one in found.lines if one.cost is not None), Decimal(0))


def test_a_second_run_writes_nothing(running):
    before = {table.name: running.connect().open(table).snapshots() for table in tables.TABLES}
    again = running.publisher.publish()
    assert (again.days, again.months, again.registers) == ((), (), ())
    assert {table.name: running.connect().open(table).snapshots() for table in tables.TABLES} == before


def test_another_process_finds_every_day_written_already(known):
    days = rows(known, tables.DAYS)
    assert another_process(known).publish() == Published(days=(), months=(), registers=("ledgers",))
    assert rows(known, tables.DAYS) == days


def test_another_process_writes_the_part_of_a_register_that_changed_and_no_other(known):
    (last, *_) = present(known.ledger).decisions(*SPAN)
    known.ledger.record_decisions([last.model_copy(update={"id": "later", "at_ms": SPAN[1] + 24 * HOUR})], SPAN[1])
    assert another_process(known).publish().registers == ("decisions", "ledgers")
    snapshot = known.connect().open(tables.DECISIONS).current_snapshot()
    assert snapshot is not None
    assert snapshot.summary is not None
    assert snapshot.summary["added-records"] == "1"
    assert len(rows(known, tables.DECISIONS)) == 8
    totals = {(row["register"], row["part"]): row["rows"] for row in rows(known, tables.REGISTERS)}
    assert totals["decisions", "2026-10-02"] == 1
    for table in (tables.PODS, tables.NODES, tables.DECISIONS, tables.POLICIES, tables.PRICES, tables.ACTS):
        assert sum(n for (name, _), n in totals.items() if name == table.name) == len(rows(known, table))


@pytest.mark.parametrize("table", [tables.REGISTERS, tables.ACTS, tables.LEDGERS], ids=lambda table: table.name)
def test_registers_that_a_failed_run_left_are_written_by_the_next(unpublished, table):
    """The next run of the same process writes them, and so does another process."""
    broken = Unplugged(unpublished, refused=table.name)
    publisher = another_process(unpublished, broken)
    with pytest.raises(LakeUnavailable, match=f"{table.name} was not written"):
        publisher.publish()
    broken.refused = ""
    assert publisher.publish().registers
    assert len(rows(unpublished, tables.ACTS)) == unpublished.ledger.status().last_act > 0
    assert another_process(unpublished).publish().registers == ("ledgers",)


def test_a_day_has_the_accounts_and_the_cost_of_the_ledger(known):
    (total,) = rows(known, tables.DAYS)
    hourly = rows(known, tables.USAGE_HOURLY)
    span = total["start_ms"], total["end_ms"]
    (line,) = present(known.ledger).usage(span, ()).lines()
    for name in tables.ACCOUNT_COLUMNS[:6]:
        expected = getattr(line.accounts_gpu_us, name.removesuffix("_us"))
        assert total[name] == sum(row[name] for row in hourly) == expected
    answer = cost(present(known.ledger), BOOK, *span, ("gpu_model", "capacity_type"))
    priced = sum((one.cost for one in answer.lines if one.cost is not None), Decimal(0))
    assert abs(total["cost"] - priced) < Decimal("1e-6")
    assert total["unpriced_us"] == answer.unpriced_gpu_us
    assert total["currency"] == "USD"
    assert total["rows"] == len(hourly)


@pytest.mark.parametrize(
    "book",
    [
        BOOK.model_copy(update={"billing": Billing(shared_gpus="busy", idle=IdlePolicy())}),
        BOOK.model_copy(update={"mig_basis": "memory"}),
    ],
    ids=["lent time", "parts of a MIG GPU by memory"],
)
def test_a_day_costs_the_same_by_the_books_that_need_more_than_a_place(book):
    with published(book=book) as known:
        (total,) = rows(known, tables.DAYS)
        assert abs(total["cost"] - priced(known, book, "gpu", "hour", "pod")) < Decimal("1e-6")


def test_days_that_a_failed_first_run_left_are_written_by_the_next(unpublished):
    """Also those older than the days that are checked each time."""
    unpublished.clock.advance(6 * 24 * HOUR)
    broken = Unplugged(unpublished, left=0)
    publisher = another_process(unpublished, broken, days_back=2)
    with pytest.raises(LakeUnavailable):
        publisher.publish()
    broken.left = 1_000
    assert len(publisher.publish().days) == 7
    assert another_process(unpublished, days_back=2).publish().days == ()
    assert [row["day"] for row in rows(unpublished, tables.DAYS)] == [date(2026, 10, day) for day in range(1, 8)]


def test_late_records_write_their_day_again(running):
    (before,) = rows(running, tables.DAYS)
    late = [
        HAND.row(
            seq, 240 + 15 * seq, 255 + 15 * seq, "gpu-0", gpu_model="H100",
            holder=Holder("pod", "p1", "ns-1", "p1"), busy_us=60_000_000,
        )
        for seq in (1, 2)
    ]  # fmt: skip
    running.clock.advance(2 * HOUR)
    running.ledger.append([HAND.batch(*late, node="n1", epoch="late")], running.clock.wall_ms())
    assert len(running.publisher.publish().days) == 1
    (after,) = rows(running, tables.DAYS)
    assert after["digest"] != before["digest"]
    (line,) = present(running.ledger).usage((after["start_ms"], after["end_ms"]), ()).lines()
    assert after["busy_us"] == line.accounts_gpu_us.busy > before["busy_us"]
    assert after["end_ms"] == before["end_ms"] + 2 * HOUR


def test_labels_that_are_seen_late_write_their_day_again(running):
    def held(one: Any) -> dict[str, int]:
        lines = one.usage(SPAN, (PROJECT,), {"pod": ("p5",)}).lines()
        return {line.key[PROJECT]: line.accounts_gpu_us.allocated for line in lines}

    before = held(present(running.ledger))
    assert set(before) == {""}, "nobody has seen the labels of this pod"
    late = HAND.fact(
        1, "p5", namespace="ns-1", name="p5", workload="Job/j1", created_ms=START_MS, labels={"project": "late"}
    )
    running.ledger.observe(Facts(pods=(("prod", late),)), running.clock.wall_ms())
    assert len(running.publisher.publish().days) == 1
    with closing(DuckDbEngine(running.connect())) as engine:
        assert held(running.asked(engine)) == held(present(running.ledger)) == {"late": before[""]}


def test_the_lake_tells_of_a_day_that_was_written_again_without_newer_records(running):
    """Otherwise cached answers of a fleet would stay as they were."""
    with closing(DuckDbEngine(running.connect())) as engine:
        before = running.asked(engine)
        running.clock.advance(HOUR)
        late = HAND.row(1, 0, 15, "gpu-late", gpu_model="H100")
        running.ledger.append([HAND.batch(late, node="n9", epoch="late")], running.clock.wall_ms())
        assert len(running.publisher.publish().days) == 1
        after = running.asked(engine)
        assert after.row.newest_ms == before.row.newest_ms
        assert after.status().mark(*SPAN) != before.status().mark(*SPAN)


def test_new_prices_write_the_days_and_the_statement_of_an_open_month_again(known):
    known.clock.advance(24 * HOUR)
    known.publisher.publish()
    before = {row["day"]: row for row in rows(known, tables.DAYS)}
    rated = [{**row.model_dump(), "price": row.price and row.price * 2} for row in BOOK.rows]
    dearer = PriceBook.model_validate({**BOOK.model_dump(by_alias=True), "rows": rated})
    known.books.prices.take(dearer, "put", "ana", "dearer", known.clock.wall_ms())
    found = known.publisher.publish()
    assert (found.days, found.months) == ((date(2026, 10, 1), date(2026, 10, 2)), ("2026-10",))
    after = {row["day"]: row for row in rows(known, tables.DAYS)}
    day = date(2026, 10, 1)
    priced = cost(present(known.ledger), dearer, after[day]["start_ms"], after[day]["end_ms"], ("gpu_model",))
    assert abs(after[day]["cost"] - sum(one.cost for one in priced.lines if one.cost)) < Decimal("1e-6")
    assert after[day]["cost"] > before[day]["cost"]
    assert after[day]["busy_us"] == before[day]["busy_us"]
    assert known.publisher.compare() == LakeComparison(2, ())


def test_a_closed_month_is_published_as_it_was_stated_and_tagged(ended):
    close_september(ended)
    ended.publisher.publish()
    stated = {row["month"]: row for row in rows(ended, tables.STATEMENTS)}
    assert stated["2026-09"]["status"] == "closed"
    kept = ended.books.kept(SEPTEMBER)
    assert kept is not None
    assert from_canonical(stated["2026-09"]["canonical"].encode()) == kept
    assert stated["2026-09"]["hash"] == statement_hash(kept)
    lines = [row for row in rows(ended, tables.STATEMENT_LINES) if row["month"] == "2026-09"]
    assert sum(row["gpu_us"] for row in lines) == kept.gpu_us
    tag = f"prod-2026-09-{statement_hash(kept)[:12]}"
    for table in (tables.USAGE_HOURLY, tables.STATEMENT_LINES, tables.FOCUS):
        assert tag in ended.connect().open(table).refs()
    assert ended.publisher.compare().differences == ()


def stated_cost(known: PublishedLedger) -> tuple[Decimal, Decimal, Decimal]:
    """The cost of September by its statement, by the hours at its tag, and by the newest hours."""
    kept = known.books.kept(SEPTEMBER)
    assert kept is not None
    hourly = known.connect().open(tables.USAGE_HOURLY)
    tag = hourly.scan().use_ref(f"prod-2026-09-{statement_hash(kept)[:12]}")
    sums = [
        sum((row["cost"] or Decimal(0) for row in scan.to_arrow().to_pylist() if row["day"].month == 9), Decimal(0))
        for scan in (tag, hourly.scan())
    ]
    return kept.cost, *sums


def late_in_september(known: PublishedLedger) -> None:
    late = HAND.row(1, 0, 15, "gpu-late", gpu_model="H100")
    known.ledger.append([HAND.batch(late, node="n9", epoch="late")], known.clock.wall_ms())


def test_the_tag_of_a_closed_month_is_its_statement_although_a_record_came_after_the_closing(ended):
    """The lake had the month's hours already when the month was closed."""
    close_september(ended)
    late_in_september(ended)
    ended.publisher.publish()
    stated, tagged, newest = stated_cost(ended)
    assert abs(tagged - stated) < Decimal("0.005") < newest - stated
    ended.clock.advance(HOUR)
    ended.publisher.publish()
    assert abs(stated_cost(ended)[1] - stated) < Decimal("0.005")


def test_the_tag_of_a_month_that_was_closed_with_records_that_no_publication_had_is_made_after_its_days(ended):
    late_in_september(ended)
    close_september(ended)
    another_process(ended).publish()
    stated, tagged, newest = stated_cost(ended)
    assert tagged == newest
    assert abs(tagged - stated) < Decimal("0.005")


def test_a_tag_is_never_on_hours_of_which_another_team_had_a_part(ended):
    """Between a publication and the closing an hour is found to be another pod's: no total differs."""
    owner = Holder("pod", "p1", "ns-1", "p1")
    rows_ = [HAND.row(1 + n, 15 * n, 15 * n + 15, "gpu-0", gpu_model="H100", holder=owner) for n in range(4)]
    batch = HAND.batch(*rows_, node="n1", epoch="00000000-0000-7000-8000-000000000000")
    ended.ledger.append([batch], ended.clock.wall_ms())
    close_september(ended)
    ended.publisher.publish()
    kept = ended.books.kept(SEPTEMBER)
    assert kept is not None
    hourly = ended.connect().open(tables.USAGE_HOURLY)
    tagged = hourly.scan().use_ref(f"prod-2026-09-{statement_hash(kept)[:12]}").to_arrow().to_pylist()
    busy: Counter[str] = Counter()
    for row in tagged:
        busy[row["team"]] += row["busy_us"] * (row["day"].month == 9)
    assert +busy == +Counter(
        {team: sum(one.gpu_us for one in kept.lines if (one.team, one.account) == (team, "busy")) for team in busy}
    )


def test_hours_that_were_never_those_of_the_statement_have_no_tag_but_its_lines_and_charges_have(ended):
    """One record came before the closing, and one between it and the publication."""
    late_in_september(ended)
    close_september(ended)
    later = HAND.row(2, 15, 30, "gpu-late", gpu_model="H100")
    ended.ledger.append([HAND.batch(later, node="n9", epoch="late")], ended.clock.wall_ms())
    ended.publisher.publish()
    kept = ended.books.kept(SEPTEMBER)
    assert kept is not None
    tag = f"prod-2026-09-{statement_hash(kept)[:12]}"
    assert tag not in ended.connect().open(tables.USAGE_HOURLY).refs()
    lines = ended.connect().open(tables.STATEMENT_LINES).scan("month = '2026-09'").use_ref(tag).to_arrow().to_pylist()
    in_lines = sum(row["cost"] for row in lines if row["kind"] == "usage" and row["cost"] is not None)
    assert abs(in_lines - kept.cost) < Decimal("1e-6")
    charges = ended.connect().open(tables.FOCUS).scan("month = '2026-09'").use_ref(tag).to_arrow().to_pylist()
    assert sum(row["BilledCost"] for row in charges) == sum(kept.charged.values())


def test_a_closed_month_that_a_failed_run_did_not_tag_is_tagged_by_another_process(ended):
    close_september(ended)
    with pytest.raises(LakeUnavailable):
        another_process(ended, Unplugged(ended, refused=f"{tables.FOCUS.name} tag")).publish()
    another_process(ended).publish()
    for table in (tables.USAGE_HOURLY, tables.STATEMENT_LINES, tables.FOCUS):
        assert any(name.startswith("prod-2026-09-") for name in ended.connect().open(table).refs())


def test_the_charges_of_a_month_are_those_of_the_export_and_add_up_to_what_is_due(ended):
    begin, end = SEPTEMBER.span(ended.settings.zone)
    report = report_builder.report(
        ended.ledger, ended.books, begin, end, ended.settings.timezone, month=SEPTEMBER,
        listing=ChargeListing(ended.settings.issuer, ended.settings.exported_labels),
    )  # fmt: skip
    exported = {row["x_ChargeKey"]: row for row in focus_charge_rows.rows(report, focus_charge_rows.charges(report))}
    published_rows = {row["x_ChargeKey"]: row for row in rows(ended, tables.FOCUS) if row["month"] == "2026-09"}
    assert len(exported) > 10
    assert published_rows.keys() == exported.keys()
    for key, row in exported.items():
        for name in focus_charge_rows.COST_AND_USAGE:
            text, there = row.get(name, ""), published_rows[key][name]
            if not text:
                assert there is None, name
            elif name in focus_charge_rows.NUMBERS:
                assert abs(there - Decimal(text)) <= Decimal("1e-9"), name
            elif name.endswith(("PeriodStart", "PeriodEnd")):
                assert there == datetime.fromisoformat(text), name
            else:
                assert there == text, name
    charged = defaultdict[str, Decimal](Decimal)
    for row in published_rows.values():
        charged[row["SubAccountId"]] += row["BilledCost"]
    owed = {team: amount for team, amount in report.due.items() if amount}
    assert {team: amount for team, amount in charged.items() if amount} == owed


def test_the_comparison_names_a_team_whose_charges_were_changed(ended):
    assert ended.publisher.compare().differences == ()
    lake = ended.connect()
    charges = lake.open(tables.FOCUS).scan("month = '2026-09'").to_arrow()
    team = charges["SubAccountId"][0].as_py()
    overwrite(lake, tables.FOCUS, charges.slice(1), {"month": "2026-09"})
    (found,) = ended.publisher.compare().differences
    assert found.startswith(f"2026-09 {team}: ")


def test_the_running_months_charges_are_written_once_a_day(unpublished):
    def versions() -> int:
        return len(unpublished.connect().open(tables.FOCUS).snapshots())

    unpublished.publisher.publish()
    first = versions()
    assert first > 0
    unpublished.clock.advance(HOUR)
    unpublished.publisher.publish()
    assert versions() == first
    unpublished.clock.advance(24 * HOUR)
    unpublished.publisher.publish()
    assert versions() > first


def test_another_process_writes_a_closed_month_only_where_it_is_missing(ended):
    close_september(ended)
    ended.publisher.publish()
    assert "2026-09" not in another_process(ended).publish().months
    overwrite(ended.connect(), tables.STATEMENTS, tables.STATEMENTS.arrow.empty_table(), {})
    assert "2026-09" in another_process(ended).publish().months


@pytest.mark.thorough
def test_a_run_that_ends_between_any_two_writes_is_made_good_by_the_next(kept_unpublished):
    failures = 0
    for writes in range(0, 20, 20 // examples(2, 20)):
        with kept_unpublished.again() as known:
            try:
                another_process(known, Unplugged(known, left=writes)).publish()
            except LakeUnavailable:
                failures += 1
            known.clock.advance(HOUR)
            second = another_process(known)
            second.publish()
            (total,) = rows(known, tables.DAYS)[:1]
            hourly = [row for row in rows(known, tables.USAGE_HOURLY) if row["day"] == total["day"]]
            (line,) = present(known.ledger).usage((total["start_ms"], total["end_ms"]), ()).lines()
            assert sum(row["busy_us"] for row in hourly) == line.accounts_gpu_us.busy
            assert sum(row["unmetered_us"] for row in hourly) == line.accounts_gpu_us.unmetered
            assert second.compare() == LakeComparison(1, ())
    assert failures


def test_the_lake_names_no_number_of_the_ledger_and_no_secret(known, tmp_path):
    secrets = tmp_path / "secrets.yaml"
    secrets.write_text(json.dumps({"s3.secret-access-key": "hunter2"}))
    assert known.settings.lake is not None
    with closing(Catalogue.connect(known.settings.lake.model_copy(update={"secrets": secrets}))) as lake:
        assert "hunter2" not in lake.place
        found = lake.read(tables.USAGE_HOURLY)
    assert {row["ledger"] for row in found} == {"prod"}
    assert {row["node"] for row in found} == {"n1"}


def test_commitments_are_priced_as_charges_are():
    rated = BOOK.rows[1].model_copy(
        update={"id": "contract", "commitment": "c1", "model": "A100-80GB", "valid_from": "2026-01-01"}
    )
    book = BOOK.model_validate({
        **BOOK.model_dump(by_alias=True),
        "rows": [row.model_dump() for row in (*BOOK.rows, rated)],
        "commitments": [Commitment(id="c1", gpus=1).model_dump()],
    })  # fmt: skip
    with published(book=book) as known:
        (total,) = rows(known, tables.DAYS)
        assert abs(total["cost"] - priced(known, book, "gpu", "hour")) < Decimal("1e-6")


def test_the_comparison_finds_nothing_after_a_run_and_names_what_another_hand_changed(known):
    assert known.publisher.compare().differences == ()
    assert known.publisher.compare().days == 1
    lake = known.connect()
    hourly = lake.open(tables.USAGE_HOURLY).scan().to_arrow()
    day = hourly["day"][0].as_py()
    overwrite(lake, tables.USAGE_HOURLY, hourly.slice(0, hourly.num_rows - 3), {"day": day})
    found = known.publisher.compare().differences
    assert any(line.startswith(f"{day} prod: ") and " in the lake and " in line for line in found)


def test_records_that_came_after_the_publication_are_no_difference(known):
    known.clock.advance(2 * HOUR)
    known.publisher.publish()
    later = HAND.row(1, 400, 415, "gpu-0", gpu_model="H100", holder=Holder("pod", "p1", "ns-1", "p1"))
    known.ledger.append([HAND.batch(later, node="n1", epoch="late")], known.clock.wall_ms())
    assert known.publisher.compare() == LakeComparison(0, ())
    known.publisher.publish()
    assert known.publisher.compare() == LakeComparison(1, ())


def test_a_day_that_left_the_lake_is_named_and_written_again_by_the_next_process(running):
    """With this an operator has a differing day rewritten: the accountant repairs nothing by itself."""
    before = rows(running, tables.USAGE_HOURLY)
    running.connect().open(tables.DAYS).delete("ledger = 'prod' and day = '2026-10-01'")
    found = running.publisher.compare()
    assert found.differences == ("2026-10-01: the table days has no row of this published day",)
    running.publisher.publish()
    assert rows(running, tables.DAYS) == []
    restarted = another_process(running)
    assert restarted.publish().days == (date(2026, 10, 1),)
    assert restarted.compare() == LakeComparison(1, ())
    assert rows(running, tables.USAGE_HOURLY) == before


def test_days_of_long_ago_are_compared_too(known):
    known.clock.advance(5 * 24 * HOUR)
    publisher = another_process(known, days_back=2)
    publisher.publish()
    lake, hourly = known.connect(), rows(known, tables.USAGE_HOURLY)
    spoilt = [{**row, "busy_us": row["busy_us"] + 1} for row in hourly if row["day"] == date(2026, 10, 1)]
    overwrite(lake, tables.USAGE_HOURLY, tables.USAGE_HOURLY.of_rows(spoilt), {"day": date(2026, 10, 1)})
    named = 0
    for _ in range(2):
        found = publisher.compare()
        assert found.days == 4
        named += any(line.startswith("2026-10-01 prod: busy_us is ") for line in found.differences)
        known.clock.advance(24 * HOUR)
        publisher.publish()
    assert named == 1


def test_metadata_files_and_manifests_stay_few_however_often_a_part_is_written(known):
    lake = claimed_again(known)
    totals = lake.open(tables.DAYS).scan().to_arrow()
    for _ in range(22):  # two more than the versions that the metadata keep
        lake.replace(tables.DAYS, totals, {})
    age(folder_of(known), 3)
    lake.replace(tables.DAYS, totals, {})
    age(folder_of(known), 3)
    lake.replace(tables.LEDGERS, lake.open(tables.LEDGERS).scan().to_arrow(), {})
    lake.replace(tables.DAYS, totals, {})
    lake.remove_old_versions(3_600)
    table = lake.open(tables.DAYS)
    assert len(list(table.scan().plan_files())) == 1
    assert len(table.snapshots()) <= 4
    folder = Path(table.location().removeprefix("file://"))
    assert len(list((folder / "data").rglob("*.parquet"))) <= 2
    described = list((folder / "metadata").glob("*.json"))
    assert len(described) <= 1 + int(table.properties["write.metadata.previous-versions-max"])
    assert len(list((folder / "metadata").glob("*.avro"))) <= 12


def test_old_versions_and_their_files_leave_and_what_is_stated_stays(ended):
    close_september(ended)
    ended.publisher.publish()
    lake = claimed_again(ended)
    (tag,) = [name for name in lake.open(tables.USAGE_HOURLY).refs() if name != "main"]
    stated = lake.open(tables.USAGE_HOURLY).scan().use_ref(tag).to_arrow().num_rows
    hourly = lake.open(tables.USAGE_HOURLY).scan().to_arrow()
    days = sorted(set(hourly["day"].to_pylist()))
    for _ in range(3):
        lake.replace(tables.USAGE_HOURLY, hourly, {"day": days})
    for _ in range(2):
        age(folder_of(ended), 3)
        lake.replace(tables.USAGE_HOURLY, hourly, {"day": days})
    removed = lake.remove_old_versions(3_600)
    assert removed.versions >= 3
    assert removed.files > 0
    assert lake.remove_old_versions(3_600) == Removed(0, 0)
    table = lake.open(tables.USAGE_HOURLY)
    assert table.scan().to_arrow().num_rows == hourly.num_rows
    assert table.scan().use_ref(tag).to_arrow().num_rows == stated


def test_a_file_that_a_writer_is_about_to_commit_stays(known):
    lake = claimed_again(known)
    age(folder_of(known), 8)
    table = lake.open(tables.USAGE_HOURLY)
    fresh = Path(table.location().removeprefix("file://")) / "data" / "pending.parquet"
    fresh.write_bytes(b"PAR1")
    lake.remove_old_versions(3_600)
    assert fresh.exists()


def claimed_again(known: PublishedLedger) -> Catalogue:
    """The ledger's tables, claimed by another process of it."""
    lake = known.connect()
    (row,) = lake.read(tables.LEDGERS)
    lake.claim(row["id"])
    return lake


def folder_of(known: PublishedLedger) -> Path:
    assert known.settings.lake is not None
    return Path(known.settings.lake.warehouse.removeprefix("file://"))
