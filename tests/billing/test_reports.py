"""The report: sections that meet to the last cent."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from accountant.bookkeeping.month_closing import statement_hash
from accountant.core.periods import Month, zone
from accountant.ledger.usage_columns import repeated
from accountant.prices.price_book import Billing, IdlePolicy
from accountant.reports import csv_xlsx_parquet, html_and_pdf, report_tables
from accountant.reports.report_builder import build, made_of, read_data
from accountant.wire.policy_models import IDLE
from accountant.wire.usage_cost_and_job_models import Accounts
from tests.billing.october import HOUR, OCTOBER, Page, build_month


def cents(*values):
    return sum(values, Decimal(0))


def test_accounts_add_up_to_the_capacity(report, ledger):
    lines = ledger.usage(report.start_ms, report.end_ms, ())
    capacity = sum(line.accounts_gpu_us.total for line in lines)
    assert sum(row.gpu_us for row in report.accounts) == capacity == report.headline.figures.accounts.total


def test_every_table_meets_the_same_cent(report):
    total = report.statement.payable_total
    assert cents(*(row.cost for row in report.accounts)) == total
    assert cents(*(row.figures.cost for row in report.kinds)) == total
    assert cents(*(row.figures.cost for row in report.teams)) == report.headline.cost
    assert report.headline.cost + report.headline.unallocated_cost == total
    assert cents(*(row.figures.idle_cost for row in report.teams)) == report.headline.figures.idle_cost
    by_account = {row.account: row.cost for row in report.accounts}
    assert by_account["unallocated"] == report.headline.unallocated_cost == report.statement.payable[IDLE]
    assert by_account["allocated_idle"] == report.headline.figures.idle_cost
    assert {row.team: row.figures.cost for row in report.teams} == {
        team: amount for team, amount in report.statement.payable.items() if team != IDLE
    }


def test_a_teams_page_shows_what_the_clusters_page_says_of_it(books, ledger, report):
    book = books.price_book(books.sample_prices)
    for row in report.teams:
        own = build_month(ledger, book, OCTOBER, team=row.team)
        assert own.headline.cost == row.figures.cost == own.statement.payable[row.team]
        assert own.teams == (row,)
        assert cents(*(kind.figures.cost for kind in own.kinds)) == row.figures.cost
        assert cents(*(account.cost for account in own.accounts)) == row.figures.cost
        assert statement_hash(own.statement) == statement_hash(report.statement)
        assert {job.team for job in own.jobs_by_cost} == {row.team}


@pytest.mark.parametrize("starting", ["holder", "cluster"])
def test_one_reading_makes_the_report_of_every_team(books, ledger, starting):
    """Also where jobs are looked at charge by charge, because others may pay for what they began with."""
    book = books.price_book(books.sample_prices)
    book = book.model_copy(update={"billing": Billing(idle=IdlePolicy(starting=starting))})
    found = read_data(ledger, book, *OCTOBER.span(zone("UTC")))
    assert len(found.scopes) > 4
    for team in (None, "vision", "teaching", IDLE, "nobody") if starting == "holder" else (None, "vision"):
        assert made_of(found, ledger, team=team) == build_month(ledger, book, OCTOBER, team=team)
    alone = read_data(ledger, book, *OCTOBER.span(zone("UTC")), scopes=("vision",))
    with pytest.raises(ValueError, match="teaching"):
        made_of(alone, ledger, team="teaching")


def test_days_add_up(report):
    assert [str(day.day) for day in report.daily] == [f"2026-10-{day:02d}" for day in range(1, 32)]
    for row in report.teams:
        assert sum(day.allocated_us.get(row.team, 0) for day in report.daily) == row.figures.accounts.allocated
    down = next(row.gpu_us for row in report.accounts if row.account == "down")
    assert sum(day.capacity_us for day in report.daily) == report.headline.figures.accounts.total - down


def test_ranks_and_shares(report):
    assert [row.rank for row in report.teams] == [1, 2, 3, 4, 5]
    held = [row.figures.accounts.allocated for row in report.teams]
    assert held == sorted(held, reverse=True)
    assert sum(row.share for row in report.teams) == pytest.approx(1)


def test_share_of_the_cluster_vector(books, vectors):
    case = vectors["princeton-sponsor-report"]
    group, total = case["input"]["group_gpu_hours"], case["input"]["total_gpu_hours"]
    ledger = books.ledger(
        [
            books.held("2026-10-01T00:00", "2026-10-01T01:00", group, team="group"),
            books.held("2026-10-01T00:00", "2026-10-01T01:00", total - group, team="others"),
        ]
    )
    rows = build_month(ledger, None, OCTOBER, team="group").teams
    assert round(rows[0].share * 100, 1) == case["expect"]["gpu_share_pct"]


def test_utilisation_leaves_unknown_out(books):
    span = "2026-10-01T00:00", "2026-10-01T01:00"
    ledger = books.ledger([books.held(*span, busy=0.5), books.held(*span, busy=None)])
    found = build_month(ledger, None, OCTOBER).headline.figures
    assert found.utilisation == 0.5
    assert build_month(books.ledger(), None, OCTOBER).headline.figures.utilisation is None


def test_changes_are_against_the_month_before(books):
    book = books.price_book("id: a, model: H100, price: 1, valid_from: 2026-01-01")
    ledger = books.ledger(
        [books.held("2026-09-01T00:00", "2026-09-01T10:00"), books.held("2026-10-01T00:00", "2026-10-01T15:00")]
    )
    found = build_month(ledger, book, OCTOBER)
    assert found.before.cost == 10
    assert (found.teams[0].change.absolute, found.teams[0].change.relative) == (5, 0.5)
    assert build_month(ledger, book, Month(2026, 9)).before is None


def test_a_month_so_far_compares_with_the_same_stretch(books):
    book = books.price_book("id: a, model: H100, price: 1, valid_from: 2026-01-01")
    ledger = books.ledger([books.held("2026-09-01", "2026-11-01")])
    found = build(ledger, book, books.at("2026-10-01"), books.at("2026-10-08"))
    assert (found.statement.month, found.headline.cost, found.before.cost) == (None, 168, 168)
    assert "1–7 October 2026" in html_and_pdf.render_html(found)


@pytest.mark.parametrize(
    ("month", "timezone", "hours"), [(OCTOBER, "Europe/Berlin", 745), (Month(2028, 2), "UTC", 696)]
)
def test_hours_of_the_calendar(books, month, timezone, hours):
    book = books.price_book("id: a, model: H100, price: 1, valid_from: 2020-01-01", timezone=timezone)
    found = build_month(books.ledger([books.held("2020-01-01", "2030-01-01")]), book, month, timezone)
    assert found.headline.cost == hours
    assert sum(sum(day.allocated_us.values()) for day in found.daily) == hours * HOUR


def test_hints_give_their_evidence(books):
    day = "2026-10-02T00:00", "2026-10-03T00:00"
    book = books.price_book("id: a, model: H100, price: 1, valid_from: 2026-01-01")
    ledger = books.ledger(
        [
            books.held(*day, gpus=8, busy=0.22, job="Job/wide"),
            books.held(*day, gpus=1, busy=0.3, job="Job/small"),
            books.held(*day, gpus=1, busy=0.01, job="StatefulSet/notebook"),
            books.held(*day, gpus=8, busy=0.95, job="Job/good"),
            books.held(*day, gpus=8, busy=None, job="Job/blind"),
            books.held("2026-10-02T00:00", "2026-10-02T01:00", gpus=2, busy=0.1, job="Job/short"),
        ]
    )
    found = build_month(ledger, book, OCTOBER)
    hints = {hint.job.job: hint for hint in found.hints}
    assert set(hints) == {"Job/wide", "Job/small", "StatefulSet/notebook"}
    wide = hints["Job/wide"]
    assert (wide.kind, wide.held, wide.peak_busy, wide.needed) == ("fewer", 8, pytest.approx(1.76), 2)
    assert wide.saving == 24 * 8 * Decimal("0.75")
    assert (hints["Job/small"].kind, hints["Job/small"].needed) == ("slice", 3)
    assert hints["StatefulSet/notebook"].kind == "idle"
    assert [job.job for job in found.idle_holders] == ["StatefulSet/notebook"]
    text = html_and_pdf.render_html(found)
    assert "Held 8 GPUs; its busiest hour used 1.8 (192.0 GPU-hours held, 22.0 % busy). 2 would have done." in text


@pytest.mark.parametrize(
    ("timezone", "month", "name"),
    [
        ("Europe/Berlin", OCTOBER, "2026-10-25T02"),
        ("Atlantic/Azores", OCTOBER, "2026-10-25T00"),
    ],
)
def test_an_hour_that_the_clocks_repeat_holds_no_more_gpus_than_any_other(books, timezone, month, name):
    """Nobody who held one GPU held two in it, and it is not the busiest."""
    book = books.price_book("id: a, model: H100, price: 1, valid_from: 2026-01-01", timezone=timezone)
    start, end = month.span(zone(timezone))
    ledger = books.ledger(
        [
            books.held(start, end, gpus=1, busy=0.45, job="Job/one"),
            books.held(start + 86_400_000, start + 90_000_000, gpus=2, busy=1.0, job="Job/two"),
            books.unheld(start, start + 86_400_000, gpus=2),
            books.unheld(start + 90_000_000, end, gpus=2),
        ]
    )
    found = build_month(ledger, book, month, timezone)
    (hint,) = found.hints
    assert (hint.job.job, hint.kind, hint.held, hint.needed) == ("Job/one", "slice", 1.0, 4)
    assert found.rhythm.busiest is not None
    assert found.rhythm.busiest[:10] == f"{month}-02"
    assert found.rhythm.busiest_row.allocated_us == 3 * HOUR
    assert name in repeated(start, end, timezone)


def test_a_slice_is_advised_to_who_held_a_whole_gpu(books):
    """Neither to who has a part of one already, nor to who used all of it a part of each hour."""

    def third(row: Any) -> Any:
        parts = {account: gpu_us // 3 for account, gpu_us in row.accounts.model_dump().items()}
        return replace(row, accounts=Accounts(**parts))

    def bursts(job: str, busy: float) -> list[Any]:
        return [
            books.held(f"2026-10-02T{hour:02}:00", f"2026-10-02T{hour:02}:20", busy=busy, job=job) for hour in range(24)
        ] + [books.held("2026-10-03T00:00", "2026-10-03T04:00", busy=0.1, job=job)]

    day = "2026-10-02T00:00", "2026-10-04T00:00"
    ledger = books.ledger(
        [
            third(books.held(*day, busy=0.3, job="Job/instance")),
            third(books.held(*day, busy=0.01, job="Job/idle-instance")),
            *bursts("Job/cron", 1.0),
            *bursts("Job/quiet-cron", 0.2),
        ]
    )
    book = books.price_book("id: a, model: H100, price: 1, valid_from: 2026-01-01")
    found = build_month(ledger, book, OCTOBER)
    assert {hint.job.job: hint.kind for hint in found.hints} == {
        "Job/idle-instance": "idle", "Job/quiet-cron": "slice"
    }  # fmt: skip
    assert all(0 < hint.saving <= hint.job.figures.idle_cost for hint in found.hints)


@pytest.mark.parametrize(("basis", "words"), [("compute", "compute slices, a"), ("memory", "memory slices in all")])
def test_it_is_said_by_what_an_instance_counts(books, basis, words):
    """Of 3g.40gb that is 3 of 7 compute slices, or 4 of 8 of the memory."""
    row = books.held("2026-10-02", "2026-10-09", gpu_model="NVIDIA A100-SXM4-80GB", mig_profile="3g.40gb")
    free = books.unheld("2026-10-02", "2026-10-09", gpu_model="NVIDIA A100-SXM4-80GB")
    parts = [
        replace(one, accounts=Accounts(**{name: us * of // 7 for name, us in one.accounts.model_dump().items()}))
        for one, of in ((row, 3), (free, 4))
    ]
    book = books.price_book("id: a, model: A100, price: 1, valid_from: 2026-01-01")
    found = build_month(books.ledger(parts), book.model_copy(update={"mig_basis": basis}), OCTOBER)
    part = 3 / 7 if basis == "compute" else 1 / 2
    assert found.headline.figures.accounts.allocated == pytest.approx(7 * 24 * HOUR * part, abs=3)
    assert words in html_and_pdf.render_html(found)


def test_one_busy_hour_is_enough_to_need_the_gpus(books):
    ledger = books.ledger(
        [
            books.held("2026-10-02T00:00", "2026-10-02T23:00", gpus=8, busy=0.1),
            books.held("2026-10-02T23:00", "2026-10-03T00:00", gpus=8, busy=1.0),
        ]
    )
    assert build_month(ledger, None, OCTOBER).hints == ()


def test_unpriced_is_listed_and_in_no_amount(report):
    (row,) = report.unpriced
    assert (row.gpu_model, row.gpu_us) == ("Tesla T4", 72 * HOUR)
    text = html_and_pdf.render_html(report)
    assert "Without a price" in text
    assert "+ unpriced" in text


def test_what_has_no_price_is_no_zero(books):
    """Neither on the page nor in the files, be it all of a team's time or a part of it."""
    ledger = books.ledger(
        [
            books.held("2026-10-02", "2026-10-03", busy=0.5),
            books.held("2026-10-02", "2026-10-03", busy=0.5, gpu_model="B300"),
            books.held("2026-10-02", "2026-10-03", busy=0.5, team="language", gpu_model="B300"),
            books.unheld("2026-10-02", "2026-10-03", gpu_model="B300"),
        ]
    )
    book = books.price_book("id: h100, model: H100, price: '2.00', valid_from: 2026-01-01")
    found = build_month(ledger, book, OCTOBER)
    rows = {table.name: [dict(zip([name for name, _ in table.columns], row, strict=True)) for row in table.rows]
            for table in report_tables.tables(found)}  # fmt: skip
    assert {row["team"]: (row["cost"], row["idle_cost"]) for row in rows["teams"]} == {
        "vision": (Decimal(48), Decimal(24)), "language": (None, None)
    }  # fmt: skip
    assert {row["account"]: row["cost"] for row in rows["accounts"]}["unallocated"] is None
    assert (rows["summary"][0]["cost"], rows["summary"][0]["unallocated_cost"]) == (Decimal(48), None)
    text = "".join(Page(html_and_pdf.render_html(found)).text.split())
    assert "USD48.00and48GPU-hwithoutaprice" in text
    assert "USD24.00+unpricedofthecost" in text
    assert "Unallocated24.025.0%unpriced" in text
    own = "".join(Page(html_and_pdf.render_html(build_month(ledger, book, OCTOBER, team="language"))).text.split())
    assert "Costunpriced24GPU-hwithoutaprice" in own
    assert "Busy12.050.0%unpriced" in own
    ledger.add(books.held("2026-09-02", "2026-09-03", busy=0.5))
    assert [row.change for row in build_month(ledger, book, OCTOBER).teams] == [None, None]


def test_a_team_that_pays_and_held_nothing_is_a_team_all_the_same(books):
    """Of a guarantee that it left unused: rows add up to what is billed to teams; nothing stays with the platform."""
    ledger = books.ledger([books.held("2026-10-01", "2026-10-02"), books.unheld("2026-10-01", "2026-10-02")])
    ledger.put_policy(books.quota_policy(vision=1, language=1), 0)
    book = books.price_book("id: h100, model: H100, price: '2.00', valid_from: 2026-01-01")
    book = book.model_copy(update={"billing": Billing(idle=IdlePolicy(guaranteed="owner"))})
    found = build_month(ledger, book, OCTOBER)
    assert [(row.team, row.rank, row.figures.cost) for row in found.teams] == [("vision", 1, 48), ("language", 2, 48)]
    assert (found.headline.cost, found.headline.platform.accounts.unallocated) == (96, 0)
    text = "".join(Page(html_and_pdf.render_html(found)).text.split())
    assert "Unallocated,withtheplatform0.0" in text
    assert "nobodyisbilledforit" not in text


def test_without_a_price_book(books, ledger):
    found = build_month(ledger, None, OCTOBER)
    page = Page(html_and_pdf.render_html(found))
    assert "no price book" in page.text
    assert "None" not in page.text
    assert "payable" not in csv_xlsx_parquet.render_csv(found)


def test_an_empty_ledger(books):
    found = build_month(books.ledger(), books.price_book(books.sample_prices), OCTOBER)
    page = Page(html_and_pdf.render_html(found))
    assert "October 2026" in page.text
    assert found.accounts[0].share is None
    assert "No records of this time" in page.text
    assert "100.0 % metered" not in page.text
    assert csv_xlsx_parquet.render_csv(found).count("\r\n") == 2


def test_any_span(books, ledger):
    found = build(ledger, None, books.at("2026-10-05T06:00"), books.at("2026-10-07T18:30"), "Asia/Kolkata")
    assert found.statement.month is None
    assert found.before_ms == (books.at("2026-10-02T17:30"), books.at("2026-10-05T06:00"))
    assert "5 Oct 2026 11:30 to 8 Oct 2026 00:00" in html_and_pdf.render_html(found)
    with pytest.raises(ValueError, match="empty"):
        build(ledger, None, 5, 5)


def test_guarantees_do_not_carry_over(books):
    ledger = books.ledger(
        [
            books.held("2026-10-01T00:00", "2026-10-01T01:00", gpus=6),
            books.held("2026-10-01T02:00", "2026-10-01T03:00", gpus=1),
        ]
    )
    ledger.put_policy(books.quota_policy(vision=4, nlp=2, ops=-1), 0)
    ledger.put_policy(books.quota_policy(vision=2, nlp=2), books.at("2026-10-01T02:00"))
    found = build(ledger, None, books.at("2026-10-01T00:00"), books.at("2026-10-01T04:00"))
    rows = {row.queue: row for row in found.quotas}
    vision = rows["vision"]
    assert [vision.guaranteed_us, vision.within_us, vision.borrowed_us, vision.unused_us] == [
        12 * HOUR, 5 * HOUR, 2 * HOUR, 7 * HOUR,
    ]  # fmt: skip
    assert (rows["nlp"].guaranteed_us, rows["nlp"].within_us) == (8 * HOUR, 0)
    assert (rows["ops"].guaranteed_us, rows["ops"].unused_us) == (None, None)
    text = html_and_pdf.render_html(found)
    assert "Guaranteed and borrowed" in text
    assert "unlimited" in text
    own = build(ledger, None, books.at("2026-10-01T00:00"), books.at("2026-10-01T04:00"), team="vision")
    assert [row.queue for row in own.quotas] == ["vision"]


@pytest.mark.parametrize(("timezone", "hours"), [("Europe/Berlin", 745), ("Asia/Kolkata", 744)])
def test_guarantees_of_a_month_are_its_hours(books, timezone, hours):
    ledger = books.ledger([books.held("2026-09-01", "2026-12-01", gpus=1)])
    ledger.put_policy(books.quota_policy(vision=2.5), 0)
    (row,) = build_month(ledger, None, OCTOBER, timezone).quotas
    assert (row.guaranteed_us, row.within_us, row.borrowed_us) == (int(2.5 * hours * HOUR), hours * HOUR, 0)
