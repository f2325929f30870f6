"""The report: sections that agree to the last cent, as page, table and chart."""

from __future__ import annotations

import re
from dataclasses import replace
from decimal import Decimal
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.bookkeeping.month_closing import statement_hash
from accountant.core.periods import Month, zone
from accountant.prices.price_book import Billing, IdlePolicy
from accountant.reports import charts, html_page, report_tables
from accountant.reports.figure_formatting import advice
from accountant.reports.report_builder import build, made_of, read_data
from accountant.wire.policy_models import IDLE
from accountant.wire.usage_cost_and_job_models import Accounts
from tests.billing.month_reports import OCTOBER, build_month, busy_ledger
from tests.billing.usage_rows import SAMPLE_PRICES, at, busy_month, held, ledger_of, price_book, quota_policy, unheld
from tests.fakes.list_ledger import ListLedger
from tests.hypothesis_examples import examples

HOUR = 3_600_000_000
AT_ONE_USD = price_book("id: a, model: H100, price: 1, valid_from: 2026-01-01")


class Page(HTMLParser):
    """Checks that every tag is closed by its own; stores tags, attributes and text."""

    VOID = frozenset({"meta", "br", "link", "img", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def text_of(report):
    """Return the page's text without spaces."""
    return "".join(Page(html_page.render_html(report)).text.split())


def part_of(row, numerator, denominator):
    """Return a row with this part of its time."""
    parts = {account: us * numerator // denominator for account, us in row.accounts.model_dump().items()}
    return replace(row, accounts=Accounts(**parts))


def cents(*values):
    return sum(values, Decimal(0))


def test_accounts_add_up_to_the_capacity(report, ledger):
    lines = ledger.usage((report.start_ms, report.end_ms), ()).lines()
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


def test_a_teams_page_shows_what_the_clusters_page_says_of_it(ledger, report):
    book = price_book(SAMPLE_PRICES)
    for row in report.teams:
        own = build_month(ledger, book, OCTOBER, team=row.team)
        assert own.headline.cost == row.figures.cost == own.statement.payable[row.team]
        assert own.teams == (row,)
        assert cents(*(kind.figures.cost for kind in own.kinds)) == row.figures.cost
        assert cents(*(account.cost for account in own.accounts)) == row.figures.cost
        assert statement_hash(own.statement) == statement_hash(report.statement)
        assert {job.team for job in own.jobs_by_cost} == {row.team}


@pytest.mark.parametrize("starting", ["holder", "cluster"])
def test_one_reading_makes_the_report_of_every_team(ledger, starting):
    """Also if jobs are read charge by charge, because other teams may pay for their start-up."""
    book = price_book(SAMPLE_PRICES)
    book = book.model_copy(update={"billing": Billing(idle=IdlePolicy(starting=starting))})
    found = read_data(ledger, book, *OCTOBER.span(zone("UTC")))
    assert len(found.scopes) > 4
    for team in (None, "vision", "teaching", IDLE, "nobody") if starting == "holder" else (None, "vision"):
        assert made_of(found, team=team) == build_month(ledger, book, OCTOBER, team=team)
    alone = read_data(ledger, book, *OCTOBER.span(zone("UTC")), scopes=("vision",))
    with pytest.raises(ValueError, match="teaching"):
        made_of(alone, team="teaching")


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


def test_share_of_the_cluster_vector(vectors):
    case = vectors["princeton-sponsor-report"]
    group, total = case["input"]["group_gpu_hours"], case["input"]["total_gpu_hours"]
    ledger = ledger_of(
        held("2026-10-01T00:00", "2026-10-01T01:00", group, team="group"),
        held("2026-10-01T00:00", "2026-10-01T01:00", total - group, team="others"),
    )
    rows = build_month(ledger, None, OCTOBER, team="group").teams
    assert round(rows[0].share * 100, 1) == case["expect"]["gpu_share_pct"]


def test_utilisation_leaves_unknown_out():
    span = "2026-10-01T00:00", "2026-10-01T01:00"
    ledger = ledger_of(held(*span, busy=0.5), held(*span, busy=None))
    found = build_month(ledger, None, OCTOBER).headline.figures
    assert found.utilisation == 0.5
    assert build_month(ListLedger(), None, OCTOBER).headline.figures.utilisation is None


def test_changes_are_against_the_month_before():
    ledger = ledger_of(held("2026-09-01T00:00", "2026-09-01T10:00"), held("2026-10-01T00:00", "2026-10-01T15:00"))
    found = build_month(ledger, AT_ONE_USD, OCTOBER)
    assert found.before.cost == 10
    assert (found.teams[0].change.absolute, found.teams[0].change.relative) == (5, 0.5)
    assert build_month(ledger, AT_ONE_USD, Month(2026, 9)).before is None


def test_a_month_so_far_compares_with_the_same_stretch():
    ledger = ledger_of(held("2026-09-01", "2026-11-01"))
    found = build(ledger, AT_ONE_USD, at("2026-10-01"), at("2026-10-08"))
    assert (found.statement.month, found.headline.cost, found.before.cost) == (None, 168, 168)
    assert "1–7 October 2026" in html_page.render_html(found)


@pytest.mark.parametrize(
    ("month", "timezone", "hours"), [(OCTOBER, "Europe/Berlin", 745), (Month(2028, 2), "UTC", 696)]
)
def test_hours_of_the_calendar(month, timezone, hours):
    book = price_book("id: a, model: H100, price: 1, valid_from: 2020-01-01", timezone=timezone)
    found = build_month(ledger_of(held("2020-01-01", "2030-01-01")), book, month, timezone)
    assert found.headline.cost == hours
    assert sum(sum(day.allocated_us.values()) for day in found.daily) == hours * HOUR


def test_hints_give_their_evidence():
    day = "2026-10-02T00:00", "2026-10-03T00:00"
    ledger = ledger_of(
        held(*day, gpus=8, busy=0.22, job="Job/wide"),
        held(*day, gpus=1, busy=0.3, job="Job/small"),
        held(*day, gpus=1, busy=0.01, job="StatefulSet/notebook"),
        held(*day, gpus=8, busy=0.95, job="Job/good"),
        held(*day, gpus=8, busy=None, job="Job/blind"),
        held("2026-10-02T00:00", "2026-10-02T01:00", gpus=2, busy=0.1, job="Job/short"),
    )
    found = build_month(ledger, AT_ONE_USD, OCTOBER)
    hints = {hint.job.job: hint for hint in found.hints}
    assert set(hints) == {"Job/wide", "Job/small", "StatefulSet/notebook"}
    wide = hints["Job/wide"]
    assert (wide.kind, wide.held, wide.peak_busy, wide.needed) == ("fewer", 8, pytest.approx(1.76), 2)
    assert wide.saving == 24 * 8 * Decimal("0.75")
    assert (hints["Job/small"].kind, hints["Job/small"].needed) == ("slice", 3)
    assert hints["StatefulSet/notebook"].kind == "idle"
    assert [job.job for job in found.idle_holders] == ["StatefulSet/notebook"]
    assert {job for job, hint in hints.items() if "slice" in advice(hint).lower()} == {"Job/small"}
    text = html_page.render_html(found)
    assert (
        "Held 8 GPUs; its busiest hour used 1.8 (192.0 GPU-hours held, 22.0 % busy). 2 would have been enough." in text
    )


def test_a_slice_is_counted_in_those_of_the_gpu():
    day = "2026-10-02T00:00", "2026-10-03T00:00"
    models = {
        "NVIDIA RTX PRO 6000 Blackwell Server Edition": 4,
        "NVIDIA RTX PRO 5000 Blackwell": 2,
        "NVIDIA A30": 4,
        "H100": 7,
    }
    ledger = ledger_of(*(held(*day, gpus=1, busy=0.3, job=f"Job/{model}", gpu_model=model) for model in models))
    rows = [f"id: r{number}, model: {model}, price: 1, valid_from: 2026-01-01" for number, model in enumerate(models)]
    book = price_book("\n".join(rows))
    hints = {hint.job.job.removeprefix("Job/"): hint for hint in build_month(ledger, book, OCTOBER).hints}
    assert {model: (int(hint.needed), hint.needed_of) for model, hint in hints.items()} == {
        "NVIDIA RTX PRO 6000 Blackwell Server Edition": (2, 4), "NVIDIA RTX PRO 5000 Blackwell": (1, 2),
        "NVIDIA A30": (2, 4), "H100": (3, 7),
    }  # fmt: skip
    assert {hint.saving for model, hint in hints.items() if model != "H100"} == {Decimal(12)}


@pytest.mark.parametrize(
    ("timezone", "month", "name"),
    [("Europe/Berlin", OCTOBER, "2026-10-25T02"), ("Atlantic/Azores", OCTOBER, "2026-10-25T00")],
)
def test_an_hour_that_the_clocks_repeat_holds_no_more_gpus_than_any_other(timezone, month, name):
    """A holder of one GPU does not count as two in it, and it is not the busiest hour."""
    book = price_book("id: a, model: H100, price: 1, valid_from: 2026-01-01", timezone=timezone)
    start, end = month.span(zone(timezone))
    ledger = ledger_of(
        held(start, end, gpus=1, busy=0.45, job="Job/one"),
        held(start + 86_400_000, start + 90_000_000, gpus=2, busy=1.0, job="Job/two"),
        unheld(start, start + 86_400_000, gpus=2),
        unheld(start + 90_000_000, end, gpus=2),
    )
    found = build_month(ledger, book, month, timezone)
    (hint,) = found.hints
    assert (hint.job.job, hint.kind, hint.held, hint.needed) == ("Job/one", "slice", 1.0, 4)
    assert found.rhythm.busiest is not None
    assert found.rhythm.busiest[:10] == f"{month}-02"
    assert found.rhythm.busiest_row.allocated_us == 3 * HOUR
    usage = ledger.usage((start, end), ("hour",), None, timezone).lines()
    twice = {line.key["hour"]: line.accounts_gpu_us.total for line in usage if line.key["hour"].startswith(name)}
    assert list(twice.values()) == [3 * HOUR] * 2, "two hours of one name are two lines, of an hour each"
    assert next(iter(twice)) == name
    assert sum(accounts.capacity_us for accounts in found.rhythm.hours) == 3 * (end - start) * 1000


def test_a_slice_is_advised_to_who_held_a_whole_gpu():
    """Not to a holder that has a part already, nor to one that used its whole GPU for a part of each hour."""

    def bursts(job: str, busy: float) -> list[Any]:
        return [
            held(f"2026-10-02T{hour:02}:00", f"2026-10-02T{hour:02}:20", busy=busy, job=job) for hour in range(24)
        ] + [held("2026-10-03T00:00", "2026-10-03T04:00", busy=0.1, job=job)]

    day = "2026-10-02T00:00", "2026-10-04T00:00"
    ledger = ledger_of(
        part_of(held(*day, busy=0.3, job="Job/instance"), 1, 3),
        part_of(held(*day, busy=0.01, job="Job/idle-instance"), 1, 3),
        *bursts("Job/cron", 1.0),
        *bursts("Job/quiet-cron", 0.2),
    )
    found = build_month(ledger, AT_ONE_USD, OCTOBER)
    assert {hint.job.job: hint.kind for hint in found.hints} == {
        "Job/idle-instance": "idle", "Job/quiet-cron": "slice"
    }  # fmt: skip
    assert all(0 < hint.saving <= hint.job.figures.idle_cost for hint in found.hints)


@pytest.mark.parametrize(("basis", "words"), [("compute", "compute slices, a"), ("memory", "memory slices in all")])
def test_it_is_said_by_what_an_instance_counts(basis, words):
    """A 3g.40gb counts as 3 of 7 compute slices, or as 4 of 8 memory slices."""
    week, model = ("2026-10-02", "2026-10-09"), "NVIDIA A100-SXM4-80GB"
    ledger = ledger_of(
        part_of(held(*week, gpu_model=model, mig_profile="3g.40gb"), 3, 7),
        part_of(unheld(*week, gpu_model=model), 4, 7),
    )
    book = price_book("id: a, model: A100, price: 1, valid_from: 2026-01-01")
    found = build_month(ledger, book.model_copy(update={"mig_basis": basis}), OCTOBER)
    part = 3 / 7 if basis == "compute" else 1 / 2
    assert found.headline.figures.accounts.allocated == pytest.approx(7 * 24 * HOUR * part, abs=3)
    assert words in html_page.render_html(found)


def test_one_busy_hour_is_enough_to_need_the_gpus():
    ledger = ledger_of(
        held("2026-10-02T00:00", "2026-10-02T23:00", gpus=8, busy=0.1),
        held("2026-10-02T23:00", "2026-10-03T00:00", gpus=8, busy=1.0),
    )
    assert build_month(ledger, None, OCTOBER).hints == ()


def test_unpriced_is_listed_and_in_no_amount(report):
    (row,) = report.unpriced
    assert (row.gpu_model, row.gpu_us) == ("Tesla T4", 72 * HOUR)
    text = html_page.render_html(report)
    assert "Without a price" in text
    assert "+ unpriced" in text


def test_a_price_row_that_nearly_matches_is_named():
    day = "2026-10-02", "2026-10-03"
    ledger = ledger_of(held(*day, gpu_model="NVIDIA L40S"), held(*day, gpu_model="Tesla T4"))
    found = build_month(ledger, price_book("id: small, model: L40, price: 1, valid_from: 2026-01-01"), OCTOBER)
    assert [(row.gpu_model, row.near_row, row.near_model) for row in found.unpriced] == [
        ("NVIDIA L40S", "small", "L40"), ("Tesla T4", "", ""),
    ]  # fmt: skip
    assert "row small is for L40" in html_page.render_html(found)


def test_what_has_no_price_is_no_zero():
    """Neither on the page nor in the files, whether all of a team's time has no price or a part of it."""
    ledger = ledger_of(
        held("2026-10-02", "2026-10-03", busy=0.5),
        held("2026-10-02", "2026-10-03", busy=0.5, gpu_model="B300"),
        held("2026-10-02", "2026-10-03", busy=0.5, team="language", gpu_model="B300"),
        unheld("2026-10-02", "2026-10-03", gpu_model="B300"),
    )
    book = price_book("id: h100, model: H100, price: '2.00', valid_from: 2026-01-01")
    found = build_month(ledger, book, OCTOBER)
    rows = {table.name: [dict(zip([name for name, _ in table.columns], row, strict=True)) for row in table.rows]
            for table in report_tables.tables(found)}  # fmt: skip
    assert {row["team"]: (row["cost"], row["idle_cost"]) for row in rows["teams"]} == {
        "vision": (Decimal(48), Decimal(24)), "language": (None, None)
    }  # fmt: skip
    assert {row["account"]: row["cost"] for row in rows["accounts"]}["unallocated"] is None
    assert (rows["summary"][0]["cost"], rows["summary"][0]["unallocated_cost"]) == (Decimal(48), None)
    text = text_of(found)
    assert "USD48.00and48GPU-hwithoutaprice" in text
    assert "USD24.00+unpricedofthecost" in text
    assert "Unallocated24.025.0%unpriced" in text
    own = text_of(build_month(ledger, book, OCTOBER, team="language"))
    assert "Costunpriced24GPU-hwithoutaprice" in own
    assert "Busy12.050.0%unpriced" in own
    ledger.add(held("2026-09-02", "2026-09-03", busy=0.5))
    assert [row.change for row in build_month(ledger, book, OCTOBER).teams] == [None, None]


def test_a_team_that_pays_and_held_nothing_is_a_team_all_the_same():
    """It pays for an unused guarantee: rows add up to the amount billed to teams, and nothing is left to the
    platform."""
    ledger = ledger_of(held("2026-10-01", "2026-10-02"), unheld("2026-10-01", "2026-10-02"))
    ledger.put_policy(quota_policy(vision=1, language=1), 0)
    book = price_book("id: h100, model: H100, price: '2.00', valid_from: 2026-01-01")
    book = book.model_copy(update={"billing": Billing(idle=IdlePolicy(guaranteed="owner"))})
    found = build_month(ledger, book, OCTOBER)
    assert [(row.team, row.rank, row.figures.cost) for row in found.teams] == [("vision", 1, 48), ("language", 2, 48)]
    assert (found.headline.cost, found.headline.platform.accounts.unallocated) == (96, 0)
    text = text_of(found)
    assert "Unallocated,withtheplatform0.0" in text
    assert "nobodyisbilledforit" not in text


def test_without_a_price_book(ledger):
    found = build_month(ledger, None, OCTOBER)
    page = Page(html_page.render_html(found))
    assert "no price book" in page.text
    assert "None" not in page.text


def test_an_empty_ledger():
    found = build_month(ListLedger(), price_book(SAMPLE_PRICES), OCTOBER)
    page = Page(html_page.render_html(found))
    assert "October 2026" in page.text
    assert found.accounts[0].share is None
    assert "No records of this time" in page.text
    assert "100.0 % metered" not in page.text


def test_any_span(ledger):
    found = build(ledger, None, at("2026-10-05T06:00"), at("2026-10-07T18:30"), "Asia/Kolkata")
    assert found.statement.month is None
    assert found.before_ms == (at("2026-10-02T17:30"), at("2026-10-05T06:00"))
    assert "5 Oct 2026 11:30 to 8 Oct 2026 00:00" in html_page.render_html(found)
    with pytest.raises(ValueError, match="empty"):
        build(ledger, None, 5, 5)


def test_guarantees_do_not_carry_over():
    ledger = ledger_of(
        held("2026-10-01T00:00", "2026-10-01T01:00", gpus=6), held("2026-10-01T02:00", "2026-10-01T03:00", gpus=1)
    )
    ledger.put_policy(quota_policy(vision=4, nlp=2, ops=-1), 0)
    ledger.put_policy(quota_policy(vision=2, nlp=2), at("2026-10-01T02:00"))
    found = build(ledger, None, at("2026-10-01T00:00"), at("2026-10-01T04:00"))
    rows = {row.queue: row for row in found.quotas}
    vision = rows["vision"]
    assert [vision.guaranteed_us, vision.within_us, vision.borrowed_us, vision.unused_us] == [
        12 * HOUR, 5 * HOUR, 2 * HOUR, 7 * HOUR,
    ]  # fmt: skip
    assert (rows["nlp"].guaranteed_us, rows["nlp"].within_us) == (8 * HOUR, 0)
    assert (rows["ops"].guaranteed_us, rows["ops"].unused_us) == (None, None)
    text = html_page.render_html(found)
    assert "Guaranteed and borrowed" in text
    assert "unlimited" in text
    own = build(ledger, None, at("2026-10-01T00:00"), at("2026-10-01T04:00"), team="vision")
    assert [row.queue for row in own.quotas] == ["vision"]


@pytest.mark.parametrize(("timezone", "hours"), [("Europe/Berlin", 745), ("Asia/Kolkata", 744)])
def test_guarantees_of_a_month_are_its_hours(timezone, hours):
    ledger = ledger_of(held("2026-09-01", "2026-12-01", gpus=1))
    ledger.put_policy(quota_policy(vision=2.5), 0)
    (row,) = build_month(ledger, None, OCTOBER, timezone).quotas
    assert (row.guaranteed_us, row.within_us, row.borrowed_us) == (int(2.5 * hours * HOUR), hours * HOUR, 0)


def test_time_of_which_nothing_is_known_is_neither_guaranteed_nor_unused():
    """Records begin on the 16th at half past ten, and nothing is metered from 20:00 to 22:00."""
    ledger = ledger_of(
        held("2026-10-16T10:30", "2026-10-16T20:00", gpus=3),
        unheld("2026-10-16T20:00", "2026-10-16T22:00", "unmetered", gpus=3),
        held("2026-10-16T22:00", "2026-10-17", gpus=1), unheld("2026-10-16T22:00", "2026-10-17", gpus=2, gpu="GPU-9"),
    )  # fmt: skip
    ledger.put_policy(quota_policy(vision=2), 0)
    (row,) = build(ledger, None, at("2026-10-01"), at("2026-10-17")).quotas
    assert [row.guaranteed_us, row.within_us, row.borrowed_us, row.unused_us] == [
        23 * HOUR, 21 * HOUR, 19 * HOUR // 2, 2 * HOUR,
    ]  # fmt: skip


def test_a_guarantee_begins_with_the_first_record():
    ledger = ledger_of(held("2026-10-16T10:30", "2026-10-16T12:00", gpus=1))
    ledger.put_policy(quota_policy(vision=2), 0)
    (row,) = build(ledger, None, at("2026-10-01"), at("2026-10-16T12:00")).quotas
    assert (row.guaranteed_us, row.unused_us) == (3 * HOUR, 3 * HOUR // 2)


HOSTILE = '</td><script>alert("x")</script>{{7*7}}'


def test_the_page_stands_alone(report):
    text = html_page.render_html(report)
    page = Page(text)
    names = [tag for tag, _ in page.tags]
    assert not {"script", "link", "img", "iframe", "object", "form"} & set(names)
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text)
    assert names.count("h1") == 1
    tables = names.count("table")
    assert tables == names.count("caption") > 5
    assert all(attrs.get("scope") in ("col", "row") for tag, attrs in page.tags if tag == "th")
    assert names.count("svg") - 1 == names.count("desc") == 3  # the brand's mark is hidden from readers


def test_the_same_ledger_gives_the_same_bytes(report):
    again = build_month(busy_ledger(reversed(busy_month())), price_book(SAMPLE_PRICES), OCTOBER)
    assert html_page.render_html(again) == html_page.render_html(report)


def test_hostile_names_stay_text():
    names = {"team": HOSTILE, "namespace": HOSTILE, "job": HOSTILE, "gpu_model": HOSTILE, "pool": HOSTILE}
    ledger = ledger_of(held("2026-10-01", "2026-10-03", gpus=8, busy=0.01, **names))
    for team in (None, HOSTILE):
        text = html_page.render_html(build_month(ledger, price_book(SAMPLE_PRICES), OCTOBER, team=team))
        page = Page(text)
        assert "script" not in [tag for tag, _ in page.tags]
        assert "<script" not in text
        assert HOSTILE in page.text


def test_more_teams_than_colours():
    rows = [held("2026-10-01", "2026-10-02", team=f"team-{i:02d}", gpus=20 - i) for i in range(12)]
    found = build_month(ListLedger(rows), None, OCTOBER)
    shown = charts.series(found.daily, found.everyone)
    assert len(shown) == charts.SERIES
    assert (shown[-1].name, len(shown[-1].teams)) == ("6 other teams", 6)
    assert sum(one.gpu_us for one in shown) == found.headline.figures.accounts.allocated


def test_charts_are_drawn_to_scale(report):
    svg = ET.fromstring(charts.accounts(report.accounts, "Accounts"))
    widths = [float(rect.get("width")) for rect in svg.iter("{http://www.w3.org/2000/svg}rect")]
    shares = [row.share for row in report.accounts if row.gpu_us]
    assert widths == pytest.approx([share * 1040 for share in shares], abs=2.1)
    chart = ET.fromstring(charts.daily(report.daily, "Days"))
    rects = list(chart.iter("{http://www.w3.org/2000/svg}rect"))
    heights = [float(rect.get("height")) for rect in rects if rect.get("class") not in ("unknown", "weekend")]
    held = sum(sum(day.allocated_us.values()) for day in report.daily)
    per_hour = sum(heights) / (held / HOUR)
    assert 'class="capacity"' in charts.daily(report.daily, "Days")
    assert 'class="capacity"' not in charts.daily(report.daily, "Days", capacity=False)
    assert per_hour == pytest.approx((280 - 12 - 28) / 2000, rel=0.01)


def test_time_that_nobody_metered_is_hatched_in_the_chart():
    span = "2026-10-01", "2026-10-04"
    rows = [
        held("2026-10-01", "2026-10-02"), held("2026-10-03T00:00", "2026-10-03T12:00"),
        unheld("2026-10-03T12:00", "2026-10-04", "unmetered"),
    ]  # fmt: skip
    found = build(ledger_of(*rows), None, *map(at, span))
    chart = ET.fromstring(charts.daily(found.daily, "Days"))
    days = [[float(rect.get("height", 0)) for rect in group if rect.get("class") == "unknown"]
            for group in chart.iter("{http://www.w3.org/2000/svg}g")]  # fmt: skip
    whole = 280 - 12 - 28
    assert days == [[], [whole], [whole / 2]]


@pytest.mark.parametrize(
    ("gpus", "ticks"),
    [(1, "0 6 12 18 24"), (10, "0 60 120 180 240"), (400, "0 2,500 5,000 7,500 10,000"), (64, "0 400 800 1,200 1,600")],
)
def test_ticks_say_what_they_stand_for(gpus, ticks):
    day = "2026-10-01", "2026-10-02"
    found = build(ledger_of(held(*day, gpus=gpus)), None, *map(at, day))
    chart = ET.fromstring(charts.daily(found.daily, "Days"))
    texts = [text.text for text in chart.iter("{http://www.w3.org/2000/svg}text") if text.get("class") == "tick end"]
    assert texts == ticks.split()


@given(st.permutations([f"team-{i}" for i in range(9)]), st.integers(1, 9), st.integers(1, charts.SERIES))
@settings(max_examples=examples(50, 200), deadline=None)
def test_no_two_teams_of_a_chart_have_one_colour_and_few_teams_always_keep_theirs(names, known, shown):
    everyone = sorted(names)[:known]
    css = charts.colours(names[:shown], everyone)
    assert set(css) == set(names[:shown])
    assert len(set(css.values())) == shown
    alone = {team: charts.colours([team], everyone)[team] for team in names}
    if known <= charts.SERIES:
        assert all(css[team] == alone[team] for team in names[:shown] if team in everyone)
