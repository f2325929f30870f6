"""Amounts that pages show: rows add up to their total, and what is one thing has one amount everywhere."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.billing.budget_forecast import states
from accountant.billing.charge import Charge, quantify_together, total_cost
from accountant.billing.cost_allocation import billed_tables, statement
from accountant.billing.displayed_amounts import both_ways
from accountant.billing.displayed_costs import displayed_costs
from accountant.billing.statement_breakdown import DIMENSIONS, LineFilter, itemise
from accountant.billing.statements import build as build_statement
from accountant.billing.statements import payable_lines
from accountant.billing.usage_pricing import charge_table
from accountant.core.periods import Month, zone
from accountant.ledger.usage import Usage
from accountant.reports.report_builder import build
from accountant.web import explore_table
from accountant.web.explore_table import Question, pivot, table_of
from accountant.wire.policy_models import IDLE, Policy
from gputally.base.money import Money, exact_sum, payable
from tests.billing.usage_rows import HOUR_MS, OCT, at, held, price_book, unheld
from tests.fakes.list_ledger import ListLedger, Row
from tests.hypothesis_examples import examples

MODELS = ("NVIDIA H100 80GB HBM3", "Tesla T4", "NVIDIA L40S")
TEAMS = ("audio", "nlp", "vision")
BOOK = price_book(
    "id: h100, model: H100, price: '2.133', valid_from: 2026-01-01, valid_to: 2026-10-02\n"
    "id: h100-new, model: H100, price: '1.9999', valid_from: 2026-10-02\n"
    "id: t4, model: T4, price: '0.35001', valid_from: 2026-01-01\n"
    "id: l40s, model: L40S, capacity_type: on-demand, price: '0.005', valid_from: 2026-01-01\n"
    "id: spot, model: L40S, capacity_type: spot, price: '0.077', valid_from: 2026-01-01"
)
POLICY = Policy.model_validate({
    "schema": 1,
    "queues": [{"name": "root"}, *({"name": name, "parent": "root", "team": name} for name in TEAMS)],
    "budgets": [
        {"name": "all", "queue": "root", "limit": 10_000, "currency": "USD"},
        *({"name": name, "team": name, "limit": 1_000, "currency": "USD"} for name in TEAMS),
        {"name": "of a queue", "queue": "nlp", "limit": 1_000, "currency": "USD"},
    ],
})  # fmt: skip
SPAN = at("2026-10-01"), at("2026-10-04")


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    """Up to 40 spans of GPUs, some of which nobody holds; lengths that no cent divides."""
    found = []
    for number in range(draw(st.integers(1, 40))):
        start = SPAN[0] + draw(st.integers(0, 70 * HOUR_MS))
        end = min(SPAN[1], start + draw(st.integers(1, 5 * HOUR_MS)))
        model, team = draw(st.sampled_from(MODELS)), draw(st.sampled_from((*TEAMS, IDLE)))
        kind = {"gpu_model": model, "capacity_type": draw(st.sampled_from(("on-demand", "spot"))),
                "gpu": f"GPU-{number}", "node": f"node-{number % 3}"}  # fmt: skip
        if team == IDLE:
            found.append(unheld(start, end, **kind))
            continue
        user = draw(st.sampled_from(("ann", "bo", "cy", "")))
        busy = draw(st.sampled_from((0.0, 0.37, 1.0, None)))
        names = {"team": team, "queue": team, "namespace": team, "user": user, "job": f"Job/{number % 7}"}
        found.append(held(start, end, busy=busy, **names, **kind))
    return found


def amounts_of(ledger: ListLedger, *by: str, **where: str) -> dict[tuple[str, ...], Decimal | None]:
    filters = {name: (value,) for name, value in where.items()}
    table = table_of(ledger, BOOK, *SPAN, Question(by, filters, "UTC", "cost", "day"))  # type: ignore[arg-type]
    return {key: amount for key, amount in zip(table.keys, table.amounts, strict=True) if amount is not None}


GROUPINGS = [
    (), ("team",), ("gpu_model",), ("user",), ("job", "namespace"), ("team", "day"), ("node", "user"),
    ("queue", "hour"),
]  # fmt: skip


@settings(max_examples=examples(25, 400), deadline=None)
@given(rows())
def test_rows_add_up_to_the_statement_whatever_they_are_of(spans: list[Row]) -> None:
    ledger = ListLedger(spans)
    stated = statement(ledger, BOOK, *SPAN)
    assert stated.payable_total is not None
    for by in GROUPINGS:
        found = amounts_of(ledger, *by)
        assert exact_sum(found.values()) == stated.payable_total, by  # type: ignore[type-var]
        unheld_amounts = displayed_costs(ledger, BOOK, *SPAN, by).unheld.values()  # type: ignore[arg-type]
        assert exact_sum(unheld_amounts) == stated.payable.get(IDLE, 0), by


@settings(max_examples=examples(25, 400), deadline=None)
@given(rows())
def test_one_thing_has_one_amount_on_month_explore_team_page_and_budget(spans: list[Row]) -> None:
    ledger = ListLedger(spans)
    ledger.put_policy(POLICY, SPAN[0] - 1)
    report = build(ledger, BOOK, *SPAN)
    by_team = {row.team: row.figures.cost for row in report.teams}
    explored = {key: amount for (key,), amount in amounts_of(ledger, "team").items()}
    assert by_team == {team: amount for team, amount in explored.items() if team in by_team}
    by_kind = {(row.gpu_model, row.capacity_type): row.figures.cost for row in report.kinds}
    assert by_kind == amounts_of(ledger, "gpu_model", "capacity_type")
    by_model = Counter[str]()
    for (model, _), cost in by_kind.items():
        by_model[model] += cost  # type: ignore[assignment]
    assert dict(by_model) == {model: amount for (model,), amount in amounts_of(ledger, "gpu_model").items()}
    for team in by_team:
        of_team = build(ledger, BOOK, *SPAN, team=team)
        assert of_team.headline.cost == by_team[team] == exact_sum(amounts_of(ledger, team=team).values())  # type: ignore[type-var]
        assert {row.team: row.figures.cost for row in of_team.teams} == {team: by_team[team]}
        for (_, model), amount in amounts_of(ledger, "team", "gpu_model", team=team).items():
            assert amount == exact_sum(row.figures.cost for row in of_team.kinds if row.gpu_model == model)
    spent = {one.name: one.spent_amount for one in states(ledger, BOOK, POLICY, OCT, SPAN[1], "UTC")}
    assert {team: spent[team] for team in by_team} == by_team
    assert spent["of a queue"] == spent["nlp"]
    assert spent["all"] == exact_sum(by_team.values())
    if report.outlook is not None:
        assert report.outlook.amount == spent["all"]


@settings(max_examples=examples(25, 400), deadline=None)
@given(rows())
def test_a_month_that_is_over_has_what_pages_show_as_spent_and_no_forecast(spans: list[Row]) -> None:
    ledger = ListLedger(spans)
    ledger.put_policy(POLICY, SPAN[0] - 1)
    for one in states(ledger, BOOK, POLICY, OCT, OCT.span(zone("UTC"))[1], "UTC"):
        assert one.spent_amount is not None
        assert one.forecast is one.forecast_low is one.forecast_high is None


@settings(max_examples=examples(25, 400), deadline=None)
@given(rows())
def test_a_filter_takes_the_amount_that_its_group_has_without_it(spans: list[Row]) -> None:
    ledger = ListLedger(spans)
    for (user,), amount in amounts_of(ledger, "user").items():
        for by in ((), ("job",), ("team", "day")):
            assert exact_sum(amounts_of(ledger, *by, user=user).values()) == amount  # type: ignore[type-var]


@settings(max_examples=examples(25, 400), deadline=None)
@given(rows())
def test_a_job_has_one_amount_on_its_page_in_lists_explore_and_statement_lines(spans: list[Row]) -> None:
    ledger = ListLedger(spans)
    by_job = DIMENSIONS["job"]
    exact: dict[tuple[str, ...], list[Charge]] = defaultdict(list)
    for charge in charge_table(ledger, BOOK, *SPAN, by_job).charges():
        if charge.key[by_job.index("job")]:
            exact[charge.key].append(charge)
    costs = {key: total_cost(quantify_together(of_job)) for key, of_job in exact.items()}
    shown = {key: Money(cost, "USD").rounded().amount for key, cost in costs.items() if cost is not None}
    table = table_of(ledger, BOOK, *SPAN, Question(by_job, {}, "UTC", "cost", "day"))
    assert shown == {key: table.row(at).amount for at, key in enumerate(table.keys) if key in shown}
    total = table.total(explore_table.np.arange(len(table)), metered=True).amount
    (billed,) = billed_tables(ledger, BOOK, *SPAN, [by_job])
    stated = build_statement(billed.by_line().charges, BOOK, (), *SPAN, "UTC")
    assert total == stated.payable_total
    for team in TEAMS:
        lines = itemise(stated, LineFilter(team), billed.by_line().groups, "job").rows()
        assert {row.key: row.part.amount for row in lines} == {key: shown[key] for key in shown if key[0] == team}
        for row in build(ledger, BOOK, *SPAN, team=team).jobs_by_cost:
            cost = Money(row.figures.cost, "USD").rounded().amount
            assert cost == shown[row.team, row.namespace, row.job, row.cluster]


SEVERAL_MONTHS = (at("2026-10-01"), at("2026-11-01"), at("2026-12-01"), at("2026-12-20"))


@st.composite
def rows_of_months(draw: st.DrawFn) -> list[Row]:
    """The drawn rows of three days, at the beginning of each of three months and across the turns between them."""
    moved = []
    for start in SEVERAL_MONTHS[:3]:
        by = start - SPAN[0] - draw(st.integers(0, 48)) * HOUR_MS * (start != SPAN[0])
        moved += [
            replace(
                row, start_ms=row.start_ms + by, end_ms=row.end_ms + by, names={**row.names, "gpu": f"GPU-{by}-{n}"}
            )
            for n, row in enumerate(draw(rows()))
        ]
    return moved


@settings(max_examples=examples(10, 200), deadline=None)
@given(rows_of_months(), st.sampled_from(("UTC", "Europe/Berlin")))
def test_a_span_of_several_months_has_the_sums_of_their_amounts(spans: list[Row], timezone: str) -> None:
    ledger = ListLedger(spans)
    tz = zone(timezone)
    months = [Month(2026, 10).span(tz), Month(2026, 11).span(tz), (Month(2026, 12).span(tz)[0], SEVERAL_MONTHS[3])]
    whole = months[0][0], months[-1][1]

    def amounts(span: tuple[int, int], *by: str, **where: str) -> Counter[tuple[str, ...]]:
        filters = {name: (value,) for name, value in where.items()}
        return Counter(displayed_costs(ledger, BOOK, *span, by, filters, timezone).amounts)  # type: ignore[arg-type]

    for by, where in [
        ((), {}), (("team",), {}), (("user", "gpu_model"), {}), (("job",), {"team": "nlp"}),
        (("team",), {"user": "ann"}), (("day",), {"gpu_model": MODELS[0]}),
    ]:  # fmt: skip
        by_month = {(*key, name): amount for name, span in zip(("2026-10", "2026-11", "2026-12"), months, strict=True)
                    for key, amount in amounts(span, *by, **where).items()}  # fmt: skip
        assert amounts(whole, *by, "month", **where) == by_month
        summed = Counter[tuple[str, ...]]()
        for key, amount in by_month.items():
            summed[key[:-1]] += amount  # type: ignore[assignment]
        assert amounts(whole, *by, **where) == summed
    told = build(ledger, BOOK, *whole, timezone)
    parts = [build(ledger, BOOK, *span, timezone) for span in months]
    of_team = amounts(whole, "team")
    assert {row.team: row.figures.cost for row in told.teams} == {
        team: of_team[(team,)] for team in {row.team for one in parts for row in one.teams}
    }
    assert exact_sum(told.payable.values()) == exact_sum(of_team.values())  # type: ignore[type-var]
    assert exact_sum(told.payable.values()) == exact_sum(part.payable_total or Decimal(0) for part in parts)
    assert told.due_total == exact_sum(part.due_total or Decimal(0) for part in parts)
    kinds = amounts(whole, "gpu_model", "capacity_type")
    assert {(row.gpu_model, row.capacity_type): row.figures.cost for row in told.kinds} == dict(kinds)
    users = {row.user: row.shown and row.shown.cost for row in told.users}
    of_users = Counter({key: value - displayed_costs(ledger, BOOK, *whole, ("user",), None, timezone).unheld.get(key, 0)
                        for key, value in amounts(whole, "user").items()})  # fmt: skip
    assert users == {user: of_users[(user,)] for user in users}


@settings(max_examples=examples(10, 200), deadline=None)
@given(rows(), st.sampled_from((("team",), ("user",), ("team", "gpu_model"), ("node", "user"), ("job",))))
def test_a_column_of_the_chart_has_the_amounts_of_a_table_by_time_and_adds_up_to_it(
    spans: list[Row], by: tuple[str, ...]
) -> None:
    ledger = ListLedger(spans)
    asked = Question(by, {}, "UTC", "cost", "day")  # type: ignore[arg-type]
    found = explore_table.explore(ledger, BOOK, SPAN, asked, 0, 4, str, compare=False)
    chart = found.chart
    assert chart.dimension is not None
    table = amounts_of(ledger, "day")
    several = table_of(ledger, BOOK, *SPAN, Question((chart.dimension, "day"), {}, "UTC", "cost", "day"))
    shown = {key: several.row(place).amount for place, key in enumerate(several.keys)}
    for cell in chart.cells:
        for place, amount in cell.parts.items():
            assert amount == amount.quantize(Decimal("0.01"))  # type: ignore[union-attr, operator]
            if place < len(chart.names) and chart.dimension in ("team", "job"):
                assert amount == shown[chart.names[place], cell.name]
        if chart.dimension == "team":
            assert exact_sum(cell.parts.values()) == table.get((cell.name,), 0)  # type: ignore[type-var]


@settings(max_examples=examples(25, 400), deadline=None)
@given(rows())
def test_a_users_row_on_the_month_is_that_of_explore(spans: list[Row]) -> None:
    ledger = ListLedger(spans)
    explored = displayed_costs(ledger, BOOK, *SPAN, ("user",))
    for row in build(ledger, BOOK, *SPAN).users:
        assert row.shown is not None
        held_amount = explored.amounts[(row.user,)] - explored.unheld.get((row.user,), Decimal(0))
        assert row.shown.cost == held_amount


@settings(max_examples=examples(25, 400), deadline=None)
@given(rows())
def test_a_table_side_by_side_adds_up_in_both_directions(spans: list[Row]) -> None:
    ledger = ListLedger(spans)
    asked = Question(("user", "gpu_model"), {}, "UTC", "cost", "day")
    table = table_of(ledger, BOOK, *SPAN, asked)
    at_all = explore_table.np.arange(len(table))
    crossed = pivot(table, at_all, 1, "cost", 13, in_order=False, by_sum=None, exact=False)
    for _, cells, whole in crossed.rows:
        assert exact_sum(cells.values()) == whole  # type: ignore[arg-type]
    assert exact_sum(whole for _, _, whole in crossed.rows) == crossed.sums[-1]  # type: ignore[misc]
    assert exact_sum(crossed.sums[:-1]) == crossed.sums[-1]  # type: ignore[arg-type]
    assert crossed.sums[-1] == table.total(at_all, metered=True).amount


def test_details_of_idle_time_change_no_other_amount() -> None:
    """The statement divides idle time by what it waited for, and Explore does not."""
    whole = [held("2026-10-01", "2026-10-01T07:00:00.007", busy=0.31, team=team, queue=team) for team in TEAMS]
    started = [Row(one.start_ms, one.end_ms, one.accounts, one.names, starting=one.accounts.allocated_idle // 3)
               for one in whole]  # fmt: skip
    by_account = [Counter[tuple[str, str]](), Counter[tuple[str, str]]()]
    for found, spans in zip(by_account, (whole, started), strict=True):
        for line, (_, _, amount) in payable_lines(statement(ListLedger(spans), BOOK, *SPAN)):
            found[line.team, line.account] += amount  # type: ignore[assignment,operator]
    assert by_account[0] == by_account[1]
    assert amounts_of(ListLedger(whole), "team") == amounts_of(ListLedger(started), "team")


@pytest.mark.parametrize("by", GROUPINGS)
def test_without_a_price_book_there_are_no_amounts(by: tuple[str, ...]) -> None:
    span = OCT.span(zone("UTC"))
    found = displayed_costs(ListLedger([held(*span)]), None, *span, by)  # type: ignore[arg-type]
    assert not found.amounts
    assert not any(found.known.values())


PARTS = st.lists(
    st.tuples(*(st.decimals(-1_000, 1_000, places=5) | st.just(Decimal(0)) for _ in range(4))), min_size=1, max_size=12
)


@given(PARTS)
@settings(max_examples=examples(200, 2_000))
def test_a_table_is_rounded_so_that_its_rows_and_its_columns_add_up(rows: list[tuple[Decimal, ...]]) -> None:
    """Every row is of whole cents, as the lines of an invoice are."""
    table = [[*row[:3], exact_sum([exact_sum(row).quantize(Decimal("0.01")), *(-part for part in row[:3])])]
             for row in rows]  # fmt: skip
    sums = {at: Money(exact_sum(column), "USD") for at, column in enumerate(zip(*table, strict=True))}
    totals = [money.amount for money in payable(sums, "USD").values()]
    shown = both_ways(table, totals, "USD")
    assert [exact_sum(column) for column in zip(*shown, strict=True)] == totals
    assert [exact_sum(row) for row in shown] == [exact_sum(row) for row in table]
    for row, amounts in zip(table, shown, strict=True):
        assert all(abs(part - amount) < Decimal("0.02") for part, amount in zip(row, amounts, strict=True))
        assert all(amount.as_tuple().exponent == -2 or not amount for amount in amounts)


@pytest.mark.parametrize(("where", "questions"), [({}, 1), ({"team": ("nlp",)}, 2)])
def test_usage_and_cost_of_a_table_are_of_one_question_and_of_its_wholes_if_it_is_filtered(
    where: Any, questions: int
) -> None:
    class Counting(ListLedger):
        asked = 0

        def usage(self, *question: Any, **more: Any) -> Usage:
            self.asked += 1
            return super().usage(*question, **more)

    ledger = Counting([held(*SPAN), held(*SPAN, busy=0.3, team="nlp", gpu="GPU-1")])
    by = ("user", "gpu")
    table = table_of(ledger, BOOK, *SPAN, Question(by, where, "UTC", "cost", "day"))  # type: ignore[arg-type]
    assert ledger.asked == questions
    whole = ListLedger.usage(ledger, SPAN, by, where)  # type: ignore[arg-type]
    assert (table.keys, table.figures.tolist()) == (list(whole.row_keys()), whole.figures.tolist())
