"""The report's sections beside costs: users, spot, waits, hours of the day, budgets and the month's end."""

from __future__ import annotations

import re
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from html import unescape
from urllib.parse import parse_qs, urlsplit

import pytest

from accountant.billing.queue_waits import queue_waits
from accountant.billing.statements import canonical, from_canonical
from accountant.bookkeeping.bookkeeper import Bookkeeper
from accountant.bookkeeping.corrections_and_adjustments import NewAdjustment
from accountant.core.periods import Month, zone
from accountant.ledger.protocols import QueuedPod
from accountant.prices.price_book import Billing, IdlePolicy
from accountant.reports import figure_formatting, html_page, report_builder, report_tables
from accountant.reports.report_breakdowns import SpanChange
from accountant.reports.report_builder import MonthBooks, Report, build
from accountant.reports.report_tables import records
from accountant.web.page_rows import to_lines
from accountant.wire.policy_models import Policy
from agent.wire import PodFacts
from gputally.base.clock import VirtualClock
from tests.billing.usage_rows import HOUR_MS, at, held, price_book, unheld
from tests.fakes.list_ledger import ListLedger, Row
from tests.reports import sample_month

ONE = "id: a, model: H100, price: 1, valid_from: 2026-01-01"
HOUR_US = HOUR_MS * 1000


def october(ledger: ListLedger, rows: str = ONE, end: str = "2026-11-01", **options: object):
    return build(ledger, price_book(rows), at("2026-10-01"), at(end), **options)


def of_rows(*rows: Row, prices: str = ONE, end: str = "2026-11-01") -> Report:
    return october(ListLedger(rows), prices, end)


def test_users_share_what_was_held() -> None:
    found = of_rows(
        held("2026-10-01", "2026-10-02", gpus=2, user="ann", job="Job/a"),
        held("2026-10-01", "2026-10-02", gpus=1, user="ann", job="Job/b"),
        held("2026-10-01", "2026-10-02", gpus=1, user="bob", job="Job/a", team="nlp"),
        held("2026-10-01", "2026-10-02", gpus=1, job="Job/c"),
        unheld("2026-10-01", "2026-10-02", gpus=9),
    )
    assert [(row.user, row.jobs, row.figures.cost) for row in found.users] == [
        ("ann", 2, 72),
        ("", 1, 24),
        ("bob", 1, 24),
    ]
    assert "not stated" in html_page.render_html(found)


def cells(page: str, caption: str) -> dict[str, list[str]]:
    """Return a table's rows by their first cell, as text."""
    table = page.partition(caption)[2].partition("</table>")[0]
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", table)]
    return {first: rest for first, *rest in ([unescape(re.sub(r"<[^>]+>", "", c)) for c in row] for row in rows)}


def test_start_up_that_the_cluster_pays_is_in_no_sum_of_the_teams() -> None:
    starting = replace(held("2026-10-02", "2026-10-03", 4, 0.5), starting=10 * HOUR_US)
    ledger = ListLedger([starting, unheld("2026-10-02", "2026-10-03", gpus=2)])
    book = price_book(ONE)
    billing = Billing(idle=IdlePolicy(starting="cluster"))
    found = build(ledger, book.model_copy(update={"billing": billing}), at("2026-10-01"), at("2026-11-01"))
    rows = cells(html_page.render_html(found), "Teams, the largest first")
    assert rows["vision"][:4] == rows["Teams"][:4] == ["86.0", "48.0", "38.0", "55.8 %"]
    assert rows["vision"][5:] == rows["Teams"][5:] == ["38.00", "86.00"]
    assert rows["Start-up, with the platform"] == ["10.0", "", "10.0", "", "", "10.00", "10.00"]
    assert [text for text in rows["Unallocated, with the platform"] if text] == ["48.0", "48.00"]
    assert report_tables.tables(found)[0].rows[0][7] == found.headline.unallocated_cost == 48


def test_what_has_no_price_is_never_zero_and_what_was_never_billed_is_not_unpriced() -> None:
    rows = [
        held("2026-10-02", "2026-10-03", 4, 0.5, user="ann"),
        held("2026-10-02", "2026-10-03", 4, 0.5, user="bob", gpu_model="Tesla T4"),
        unheld("2026-10-02", "2026-10-03", "down", 8, gpu_model="NVIDIA A100-SXM4-40GB"),
    ]
    page = html_page.render_html(of_rows(*rows))
    users, kinds = cells(page, "Who ran the jobs"), cells(page, "Models of GPU")
    assert (users["ann"][-2:], users["bob"][-2:]) == (["48.00", "96.00"], ["unpriced", "unpriced"])
    assert (kinds["NVIDIA A100-SXM4-40GB"][-2], kinds["Tesla T4"][-2]) == ("not billed", "unpriced")


def test_where_nobody_says_who_runs_it_there_is_no_table_of_users() -> None:
    found = of_rows(held("2026-10-01", "2026-10-02"))
    assert found.users == ()
    assert "no job states its user" in html_page.render_html(found)


def test_names_in_charts_do_not_turn_the_reading_direction() -> None:
    page = html_page.render_html(of_rows(held("2026-10-01", "2026-10-02", team="vision\u202etxt.exe")))
    assert "<title>" in page
    assert "\u202e" not in page


def test_a_job_that_two_teams_pay_for_is_one_job() -> None:
    rows = [
        held("2026-10-01", "2026-10-02", team="vision", user="ann"),
        held("2026-10-02", "2026-10-03", team="language", user="ann"),
    ]
    found = of_rows(*rows)
    assert (found.headline.jobs, [user.jobs for user in found.users]) == (1, [1])


def test_the_largest_users_are_named_and_the_rest_counted() -> None:
    rows = [held("2026-10-01", "2026-10-02", gpus=i + 1, user=f"u{i:02d}") for i in range(20)]
    found = of_rows(*rows)
    assert (len(found.users), found.unnamed_users, found.users[0].user) == (15, 5, "u19")


def test_only_batch_jobs_with_a_cheaper_spot_row_are_candidates() -> None:
    day = "2026-10-01", "2026-10-02"
    prices = f"""{ONE}, capacity_type: on-demand
        id: s, model: H100, capacity_type: spot, price: '0.4', valid_from: 2026-01-01
        id: t, model: A100-40GB, price: 1, valid_from: 2026-01-01"""
    found = of_rows(
        held(*day, gpus=2, job="Job/train"),
        held(*day, gpus=8, job="Deployment/serve"),
        held(*day, gpus=4, job="Job/other", gpu_model="NVIDIA A100-SXM4-40GB"),
        held(*day, gpus=4, job="Job/there", capacity_type="spot"),
        held("2026-10-01T00:00", "2026-10-01T02:00", job="Job/short"),
        prices=prices,
    )
    (row,) = found.spot
    assert (row.job, row.gpu_us, row.cost, row.saving) == ("Job/train", 48 * HOUR_US, Decimal(48), Decimal("28.8"))


def test_the_hours_of_a_day_have_a_peak() -> None:
    found = of_rows(
        held("2026-10-05T14:00", "2026-10-05T15:00", gpus=8, busy=0.5),
        held("2026-10-06T02:00", "2026-10-06T03:00", gpus=2),
        unheld("2026-10-06T02:00", "2026-10-06T03:00", gpus=6),
        unheld("2026-10-06T02:00", "2026-10-06T03:00", "down", gpus=6),
    ).rhythm
    assert found.peak is not None
    assert (found.peak.hour, found.peak.held, found.peak.utilisation) == (14, 1.0, 0.5)
    assert found.busiest == "2026-10-05T14"
    assert found.trough is not None
    assert (found.trough.hour, found.trough.held, found.trough.capacity_us) == (2, 0.25, 8 * HOUR_US)


def pod(name: str, created: str, scheduled: str | None, team: str = "vision") -> QueuedPod:
    facts = PodFacts(
        seq=0, uid=name, namespace=team, name=name, node="", created_ms=at(created),
        scheduled_ms=at(scheduled) if scheduled else None, observed_ms=at("2026-12-01"),
    )  # fmt: skip
    return QueuedPod("prod", team, team, facts)


def test_waits_are_as_known_at_the_end_of_the_span() -> None:
    pods = [
        pod("before", "2026-09-30T10:00", "2026-09-30T11:00"),
        pod("into", "2026-09-30T23:00", "2026-10-01T01:00"),
        pod("inside", "2026-10-05T00:00", "2026-10-05T01:00"),
        pod("over", "2026-10-31T23:00", "2026-11-02T00:00"),
        pod("never", "2026-10-31T21:00", None, "nlp"),
        pod("after", "2026-11-01T00:00", "2026-11-01T01:00"),
    ]
    span = at("2026-10-01"), at("2026-11-01")
    vision, nlp = sorted(queue_waits(pods, *span, None, watched="prod"), key=lambda row: -row.pods)
    assert (vision.pods, vision.waiting, vision.queued.median_ms, vision.queued.longest_ms) == (
        3,
        1,
        HOUR_MS,
        2 * HOUR_MS,
    )
    assert (nlp.pods, nlp.waiting, nlp.queued.longest_ms) == (1, 1, 3 * HOUR_MS)
    assert [row.queue for row in queue_waits(pods, *span, "nlp", watched="prod")] == ["nlp"]


@pytest.mark.parametrize("watched", ["prod", "", "another"])
def test_how_many_pods_still_wait_is_unknown_where_only_nodes_report_them(watched: str) -> None:
    """A node reports the pods that are on it: that it reports none that waits says nothing."""
    span = at("2026-10-01"), at("2026-11-01")
    placed = pod("inside", "2026-10-05T00:00", "2026-10-05T01:00")
    (row,) = queue_waits([placed], *span, None, watched=watched)
    assert (row.pods, row.waiting, row.queued.longest_ms) == (1, 0 if watched == "prod" else None, HOUR_MS)
    (row,) = queue_waits([placed, pod("over", "2026-10-31T23:00", "2026-11-02T00:00")], *span, None, watched=watched)
    assert row.waiting == 1, "what is known to wait counts"


def test_a_running_month_has_an_outlook() -> None:
    ledger = ListLedger([held("2026-10-01", "2026-11-01", gpus=1)])
    found = october(ledger, end="2026-10-11T12:00").outlook
    assert found is not None
    assert (found.spent, found.days_over, found.days_left) == (Decimal("252.000000000"), 10.5, 20.5)
    assert found.straight_line == pytest.approx(744)
    assert found.forecast is not None
    assert (found.forecast.expected, found.forecast.low, found.forecast.high) == (744, 744, 744)
    assert october(ledger).outlook is None
    assert october(ledger, end="2026-10-02T12:00").outlook.forecast is None  # type: ignore[union-attr]
    assert build(ledger, price_book(ONE), at("2026-10-05"), at("2026-10-09")).outlook is None


def test_the_outlook_of_a_young_ledger_goes_by_its_own_days() -> None:
    ledger = ListLedger([held("2026-10-20T12:00", "2026-11-01", gpus=1)])
    found = october(ledger, end="2026-10-27")
    assert found.outlook is not None
    assert (found.outlook.days_over, found.outlook.days_metered, found.outlook.days_left) == (26, 6.5, 5)
    assert found.outlook.straight_line == pytest.approx(11.5 * 24)
    assert found.outlook.forecast is not None
    assert found.outlook.forecast.expected == 11.5 * 24
    assert "The ledger has records of 6.5 of them" in html_page.render_html(found)


def test_jobs_of_one_name_in_two_clusters_are_two_jobs() -> None:
    one = held("2026-10-01", "2026-10-03", gpus=1, busy=0.2, cluster="east")
    two = held("2026-10-01", "2026-10-02", gpus=2, busy=0.5, cluster="west", gpu="GPU-1", node="node-1")
    found = of_rows(one, two)
    assert found.headline.jobs == 2
    rows = [(job.cluster, job.figures.accounts.allocated // HOUR_US) for job in found.jobs_by_cost]
    assert rows == [("east", 48), ("west", 48)]
    assert [(hint.job.cluster, hint.peak_busy) for hint in found.hints] == [("east", 0.2), ("west", 1.0)]
    page = html_page.render_html(found)
    assert "east/vision" in page
    assert "west/vision" in page
    assert "/vision<" not in html_page.render_html(of_rows(one)), "one cluster needs no name"


def test_an_outlook_with_unpriced_time_would_be_too_small() -> None:
    ledger = ListLedger([held("2026-10-01", "2026-11-01"), held("2026-10-02", "2026-10-03", gpu_model="Tesla T4")])
    assert october(ledger, end="2026-10-11").outlook is None


def test_budgets_of_a_team_are_its_own_and_its_queues() -> None:
    every = {state.name for state in sample_month.report().budgets}
    assert every == {"vision in October", "language", "lab hours", "euros"}
    assert [state.name for state in sample_month.report("robotics").budgets] == ["lab hours"]
    assert [state.name for state in sample_month.report("vision").budgets] == ["vision in October"]


def test_what_is_booked_beside_is_shown_with_what_is_due() -> None:
    found = sample_month.report("vision")
    assert found.due == {"vision": found.statement.payable["vision"] - Decimal("284.40")}
    page = html_page.render_html(found)
    assert "Corrections and credits" in page
    assert "node-7 lost a night" in page
    assert "Corrections and credits" not in html_page.render_html(sample_month.report("language"))


def test_a_closed_month_says_when_later_records_differ() -> None:
    ledger = ListLedger([held("2026-10-01", "2026-10-02")])
    closed = from_canonical(canonical(replace(october(ledger).statement, status="closed")))
    same = october(ledger, booked=MonthBooks(closed, period="published"))
    assert (same.late, same.period, same.statement) == (False, "published", closed)
    ledger.add(held("2026-10-03", "2026-10-04"))
    later = october(ledger, booked=MonthBooks(closed))
    assert (later.late, later.headline.cost) == (True, same.headline.cost)
    assert "records that came later" in html_page.render_html(later)


def test_a_month_is_compared_with_what_the_one_before_was_closed_with() -> None:
    """Not with the cost of its records at this month's prices."""
    ledger = ListLedger([held("2026-09-01", "2026-11-10")])
    keeper = Bookkeeper(ledger, VirtualClock(at("2026-11-10")))
    keeper.prices.take(price_book("id: h100, model: H100, price: '2', valid_from: 2026-01-01"), "file", "a", "", 0)
    keeper.close(Month(2026, 9), "ann")
    keeper.prices.take(price_book("id: h100, model: H100, price: '3', valid_from: 2026-01-01"), "file", "a", "", 0)

    def of(month: Month, end: str) -> Report:
        start_ms = month.span(zone("UTC"))[0]
        found = report_builder.readings(ledger, keeper, start_ms, at(end), "UTC", month)
        report = report_builder.report(ledger, keeper, start_ms, at(end), "UTC", month=month)
        assert report_builder.made_of(found) == report
        return report

    whole = of(Month(2026, 10), "2026-11-01")
    assert whole.before is not None
    assert (whole.headline.cost, whole.before.cost) == (31 * 24 * 3, 30 * 24 * 2)
    assert whole.teams[0].change == SpanChange(Decimal(792), 792 / 1440)
    part = of(Month(2026, 10), "2026-10-11")
    assert part.before is not None
    assert (part.headline.cost, part.before.cost) == (10 * 24 * 3, 10 * 24 * 2)


def test_a_closed_month_says_what_was_booked_about_it_since() -> None:
    ledger = ListLedger([held("2026-10-01", "2026-11-10"), held("2026-10-01", "2026-11-01", team="nlp")])
    keeper = Bookkeeper(ledger, VirtualClock(at("2026-11-10")))
    keeper.prices.take(price_book("id: h100, model: H100, price: '2', valid_from: 2026-01-01"), "file", "a", "", 0)
    keeper.close(Month(2026, 10), "ann")
    span = Month(2026, 10).span(zone("UTC"))

    def of(team: str | None) -> Report:
        return report_builder.report(ledger, keeper, *span, "UTC", month=Month(2026, 10), team=team)

    assert of(None).restated == {}
    assert "Corrections of this month that were booked later" not in html_page.render_html(of(None))
    ledger.add(held("2026-10-03", "2026-10-04"))
    keeper.correct("ann")
    credit = {"month": "2026-10", "team": "nlp", "amount": "-5", "reason": "a gift", "approved_by": "cfo"}
    keeper.credits.adjust(NewAdjustment.model_validate(credit), "ann")
    assert of(None).restated == {"2026-11": (2, Decimal(43))}
    assert of("vision").restated == {"2026-11": (1, Decimal(48))}
    page = " ".join(html_page.render_html(of("nlp")).split())
    assert "due in the month of booking: USD \N{MINUS SIGN}5.00 in 2026-11 (1 line)" in page
    summary = report_tables.tables(of(None))[0]
    assert dict(zip([name for name, _ in summary.columns], summary.rows[0], strict=True))["booked_since"] == 43
    assert of(None).statement == keeper.month(Month(2026, 10))


def test_a_month_that_was_closed_without_prices_says_what_it_came_to() -> None:
    ledger = ListLedger([held("2026-10-01", "2026-11-10")])
    keeper = Bookkeeper(ledger, VirtualClock(at("2026-11-10")))
    keeper.close(Month(2026, 10), "ann", "no contract yet", ("unpriced",))
    found = price_book("id: h100, model: H100, price: '2', valid_from: 2026-01-01")
    keeper.reprice(Month(2026, 10), found, "ann", "the contract is signed")
    span = Month(2026, 10).span(zone("UTC"))
    report = report_builder.report(ledger, keeper, *span, "UTC", month=Month(2026, 10))
    assert (report.currency, report.restated) == (None, {"2026-11": (1, Decimal(31 * 24 * 2))})
    page = " ".join(html_page.render_html(report).split())
    assert "due in the month of booking: 1488.00 in 2026-11 (1 line)" in page


def test_an_unlimited_policy_has_no_budget() -> None:
    ledger = ListLedger([held("2026-10-01", "2026-10-02")])
    ledger.put_policy(Policy.model_validate({"schema": 1, "queues": [{"name": "q"}]}), 0)
    assert october(ledger).budgets == ()


def test_what_is_due_is_made_of_what_is_shown() -> None:
    found = sample_month.report()
    line = replace(found.corrections[0].line, account="unused_commitment", cost=Decimal("12.50"), gpu_us=HOUR_US)
    stated = replace(found.statement, commitments=(line,))
    with_one = replace(found, statement=stated)
    kinds = [record.record for record in records(with_one)]
    assert kinds.count("commitment") == 1
    assert "commitment not used" in html_page.render_html(with_one)
    amounts = {
        kind: sum(r.cost or 0 for r in records(found) if r.record == kind)
        for kind in ("payable", "correction", "adjustment", "due", "not_billed")
    }
    assert amounts["payable"] + amounts["correction"] + amounts["adjustment"] == amounts["due"] + amounts["not_billed"]
    assert amounts["due"] == found.due_total


def test_what_an_epoch_cost_of_jobs_that_report_their_progress() -> None:
    (row,) = sample_month.report().epochs
    assert (row.job, row.epochs, row.last) == ("Job/policy-search", 5, 5)
    assert row.gpu_us == 8 * 45 * HOUR_US, "five epochs of nine hours on eight GPUs"
    assert row.cost == Decimal("6.88") * 8 * 45
    assert row.mean_cost == Decimal("6.88") * 8 * 9
    assert row.rest_us + row.gpu_us == 8 * (14 * 24) * HOUR_US
    assert [one.epochs for one in sample_month.report("robotics").epochs] == [5]
    assert sample_month.report("vision").epochs == ()


@pytest.mark.parametrize("team", [None, "robotics"])
def test_budgets_forecast_and_jobs_lead_to_what_is_behind_them(team: str | None) -> None:
    """Every figure of a budget and of the forecast links to lines; a job's link names its cluster."""
    jobs: list[tuple[str, str, str]] = []

    def job(row: html_page.JobNamed) -> str:
        jobs.append((row.cluster, row.namespace, row.job))
        return "/job/one"

    links = html_page.Links(
        lines=to_lines(Month.parse("2026-10"), team), job=job, team=lambda name: f"/team/{name}",
        month=lambda name: f"/month/{name}", act=lambda _: "/act/1", user=lambda name: f"/user/{name}", jobs="/jobs",
        savings="/savings",
        order=html_page.TABLES.sorting(),
    )  # fmt: skip
    found = sample_month.report(team)
    page = html_page.render_html(found, links)
    table = page[page.index("Budgets and how much is spent") :].split("</table>")[0]
    rows = re.findall(r"<tr>(?:(?!</tr>).)*</tr>", table)
    assert len(rows) == 1 + len(found.budgets) > 1
    for row, budget in zip(rows[1:], found.budgets, strict=True):
        addresses = re.findall(r'href="([^"]+)"', row)
        figures = [budget.spent, budget.ratio, budget.forecast, budget.forecast_low, budget.exhausted_ms]
        assert len(addresses) == sum(figure is not None for figure in figures)
        asked = [parse_qs(urlsplit(unescape(address)).query) for address in addresses]
        owner = budget.team or team
        assert all(one.get("team") == (None if owner is None else [owner]) for one in asked)
        assert [one["by"] for one in asked[:2]] == [["queue" if budget.queue else "job"]] * min(2, len(asked))
        assert all(one["account"] == ["allocated"] for one in asked)
    if found.outlook is not None and found.outlook.forecast is not None:
        outlook = page[page.index("Straight line") :].split("</dl>")[0]
        assert outlook.count("by=day") == 4, "the straight line, and the forecast with its bounds"
    shown = {(row.cluster, row.namespace, row.job) for row in (*found.epochs, *found.spot)}
    assert shown
    assert shown <= set(jobs)
    assert all(cluster for cluster, _, _ in shown)


def test_a_job_of_two_clusters_is_a_candidate_in_each() -> None:
    prices = f"""{ONE}, capacity_type: on-demand
        id: s, model: H100, capacity_type: spot, price: '0.4', valid_from: 2026-01-01"""
    day = "2026-10-01", "2026-10-02"
    lines = [held(*day, gpus=gpus, job="Job/train", cluster=cluster) for cluster, gpus in (("east", 2), ("west", 1))]
    assert [(row.cluster, row.job, row.gpu_us) for row in of_rows(*lines, prices=prices).spot] == [
        ("east", "Job/train", 48 * HOUR_US), ("west", "Job/train", 24 * HOUR_US),
    ]  # fmt: skip


def test_the_cost_of_a_kind_of_capacity_is_that_of_the_hours_beside_it() -> None:
    """A price times the allocated and unallocated hours of a row, except for the rounding of its lines to cents."""
    report = sample_month.charged()
    priced = [row for row in report.kinds if len(row.unit_prices) == 1 and not row.figures.unpriced_us]
    assert priced
    assert any(row.figures.accounts.unallocated for row in priced)
    for row in priced:
        accounts = row.figures.accounts
        hours = Fraction(accounts.allocated + accounts.unallocated, 3_600_000_000)
        assert abs(hours * Fraction(row.unit_prices[0]) - Fraction(row.figures.cost)) < Fraction(1, 20)
    page = html_page.render_html(report)
    table = page[page.index("By GPU and kind of capacity") :].partition("</table>")[0]
    assert "Unallocated<small>GPU-h</small>" in table
    for row in priced:
        assert f">{figure_formatting.hours(row.figures.accounts.unallocated)}</td>" in table


BY_DAY = "id: h, model: H100, price: 2, valid_from: 2026-01-01"


@pytest.mark.parametrize("part", [("2026-11-01", "2026-11-05"), ("2026-11-01", "2026-12-01")])
def test_a_month_before_that_is_recorded_in_part_is_compared_by_day(part: tuple[str, str]) -> None:
    """Records begin on 16 October: 48 a day then, and 96 a day in November until the 5th. No sum is compared, and the
    days of October without records are not 0."""
    ledger = ListLedger([
        held("2026-10-16", "2026-11-01"), held("2026-11-01", "2026-11-05", 2),
    ])  # fmt: skip
    found = build(ledger, price_book(BY_DAY), at(part[0]), at(part[1]))
    assert found.before_ms == (at("2026-10-16"), at("2026-11-01"))
    assert found.by_day is not None
    assert (found.by_day.now, found.by_day.before) == (4, 16)
    assert found.by_day.rates(found.headline.cost, found.before.cost if found.before else Decimal(0)) == (96, 48)
    (row,) = found.teams
    assert row.change == SpanChange(None, 1.0)
    page = html_page.render_html(found)
    assert "96.00 a day against 48.00 a day" in page
    assert "from 16 Oct" in page
    (summary,) = [one for one in report_tables.tables(found) if one.name == "summary"]
    told = dict(zip((name for name, _ in summary.columns), summary.rows[0], strict=True))
    assert (f"{told['before_start']:%m-%d}", f"{told['before_end']:%m-%d}") == ("10-16", "11-01")
    (teams,) = [one for one in report_tables.tables(found) if one.name == "teams"]
    assert teams.rows[0][-1] is None, "the change of a sum is unknown"


def test_a_month_before_that_is_whole_is_compared_as_a_whole() -> None:
    ledger = ListLedger([held("2026-09-20", "2026-11-01"), held("2026-11-01", "2026-11-05", 2)])
    found = build(ledger, price_book(BY_DAY), at("2026-11-01"), at("2026-11-05"))
    assert found.by_day is None
    assert found.before_ms == (at("2026-10-01"), at("2026-10-05"))
    assert found.teams[0].change == SpanChange(Decimal("192.00"), 1.0)
    assert "a day against" not in html_page.render_html(found)
