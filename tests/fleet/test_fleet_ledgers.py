"""A fleet's answer is the sum of its ledgers' answers, to the microsecond and the cent."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from datetime import date
from decimal import Decimal
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from sqlglot import exp

from accountant.billing.statements import canonical
from accountant.billing.usage_pricing import cost
from accountant.core.errors import LakeUnavailable, UnsupportedQuestion
from accountant.core.periods import Month
from accountant.fleet.fleet_ledgers import Fleet, FleetQuery, Rates, SeveralCurrencies
from accountant.lake.duckdb_engine import DuckDbEngine
from accountant.lake.engines.protocol import Engine
from accountant.ledger.usage import sum_of_usage_lines
from accountant.reports import report_builder
from accountant.wire.policy_models import IDLE, UNASSIGNED, Policy, WindowSpec
from accountant.wire.usage_cost_and_job_models import Accounts, UsageLine, label_dimension
from gputally.base.money import exact_sum
from tests.fleet.conftest import TwoLedgers
from tests.lake.comparison_queries import CENTRE, SPAN, PublishedLedger, published
from tests.ledger.busy_ledger import MINUTE, START_MS
from tests.moments import present

OCTOBER = Month(2026, 10)


def test_a_label_that_one_ledger_does_not_export_is_unknown_there(two: TwoLedgers) -> None:
    def held(fleet: Fleet, *names: str) -> dict[str, int]:
        lines = fleet.usage(fleet.members(names), FleetQuery(*SPAN, (CENTRE,))).lines
        return {line.key[CENTRE]: line.accounts_gpu_us.total for line in lines}

    members = two.fleet.members()
    both, north = held(two.fleet), held(two.fleet, "north")
    assert {"4711", UNASSIGNED, "", IDLE} == both.keys()
    assert both["4711"] == north["4711"]
    idle = present(two.south.ledger).usage(SPAN, ("queue",), {"queue": (IDLE,)}).sum_of_accounts()
    assert both[IDLE] - north[IDLE] == idle.total
    (whole,) = two.fleet.usage(members, FleetQuery(*SPAN, ())).lines
    assert sum(both.values()) == whole.accounts_gpu_us.total
    assert "south" in two.fleet.usage(members, FleetQuery(*SPAN, (CENTRE,))).note
    assert "south" in two.fleet.cost(members, FleetQuery(*SPAN, (CENTRE,))).note
    for ask in (two.fleet.usage, two.fleet.cost):
        with pytest.raises(UnsupportedQuestion, match="stage"):
            ask(members, FleetQuery(*SPAN, ("team",), {label_dimension("stage"): ("test",)}))
    with pytest.raises(UnsupportedQuestion, match="cost-center"):
        held(two.fleet, "south")


def test_a_decayed_window_is_near_the_ledgers_own(two: TwoLedgers) -> None:
    """The lake has whole hours only: the figures differ by less than an hour's decay."""
    spec = WindowSpec(size=4 * 3_600, half_life=24 * 3_600)
    found = two.fleet.window(two.fleet.members(), spec, SPAN[1], "allocated")
    own = [present(one.ledger).window(spec, SPAN[1], "allocated", 0.5) for one in two.both]
    for queue in found.usage:
        expected = sum(window.usage.get(queue, 0) for window in own)
        assert found.usage[queue] == pytest.approx(expected, rel=1 - 2 ** (-1 / 24))
    plain = two.fleet.window(two.fleet.members(), WindowSpec(size=4 * 3_600), SPAN[1], "allocated")
    assert 0 < found.capacity < plain.capacity


def test_cost_is_the_sum_of_the_ledgers_at_their_own_prices(two: TwoLedgers) -> None:
    found = two.fleet.cost(two.fleet.members(), FleetQuery(*SPAN, ("gpu_model",)))
    own = [cost(present(one.ledger), one.books.prices.current, *SPAN, ("gpu_model",)) for one in two.both]
    for line in found.lines:
        parts = [each.cost for answer in own for each in answer.lines if each.key == line.key]
        assert line.cost == (None if None in parts else exact_sum(part for part in parts if part is not None))
    assert {line.cost is None for line in found.lines} == {True, False}


def test_the_months_of_the_fleet_are_the_statements_of_its_ledgers(two: TwoLedgers) -> None:
    summary, stated = two.fleet.month(two.fleet.members(), OCTOBER)
    own = {one.publisher.name: one.books.month(OCTOBER) for one in two.both}
    assert {name: canonical(one) for name, one in stated.items()} == {name: canonical(one) for name, one in own.items()}
    assert summary.totals == {"USD": exact_sum(one.due_total for one in own.values() if one.due_total is not None)}
    assert [one.not_billed for one in summary.ledgers] == [one.not_billed for one in own.values()]
    beside = [one.not_billed for one in own.values() if one.not_billed]
    assert summary.not_billed == ({"USD": exact_sum(beside)} if beside else {})
    assert {row.due for row in summary.teams if row.team == IDLE} == {None}
    assert sum(row.gpu_us for row in summary.teams) == sum(one.gpu_us for one in own.values())
    assert [one.ledger for one in summary.ledgers] == ["north", "south"]
    computed = {one.name: one.books.month(OCTOBER) for one in two.fleet.members()}
    assert {name: canonical(one) for name, one in computed.items()} == {
        name: canonical(one) for name, one in own.items()
    }, "what the hours add up to is the same"


class NotedTables:
    """An engine that records the tables it reads."""

    name = "noted"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.asked: set[str] = set()

    def namespaces(self) -> Sequence[str]:
        return self._engine.namespaces()

    def query(self, question: exp.Select, namespace: str, days: tuple[date, date] | None = None) -> pa.Table:
        self.asked |= {table.name for table in question.find_all(exp.Table)}
        return self._engine.query(question, namespace, days)

    def close(self) -> None:
        """Do nothing: the engine's owner closes it."""


def test_a_month_is_read_from_its_statements_and_not_added_up_again(two: TwoLedgers) -> None:
    engine = NotedTables(two.engine)
    fleet = Fleet(engine)
    assert fleet.month(fleet.members(), OCTOBER)[0].totals["USD"] > 0
    assert engine.asked == {"ledgers", "acts", "statements"}


def test_a_month_that_is_not_published_is_empty(two: TwoLedgers) -> None:
    summary, _ = two.fleet.month(two.fleet.members(), Month(2026, 7))
    assert [(one.accounts_gpu_us.total, one.due) for one in summary.ledgers] == [(0, 0), (0, 0)]


def test_a_ledger_that_bills_shared_gpus_by_busy_time_has_its_month(billed_by_busy_time: PublishedLedger) -> None:
    """The lake's hours lack that time, but its statement has it."""
    engine = DuckDbEngine(billed_by_busy_time.connect())
    fleet = Fleet(engine)
    summary, stated = fleet.month(fleet.members(["south"]), OCTOBER)
    own = billed_by_busy_time.books.month(OCTOBER)
    assert stated["south"] == own
    assert summary.ledgers[0].due == own.due_total
    engine.close()


def test_a_cluster_that_does_not_publish_is_named(two: TwoLedgers) -> None:
    with pytest.raises(LakeUnavailable, match="no ledger 'nroth' publishes in this lake; did you mean 'north'"):
        two.fleet.members(["nroth"])


def test_amounts_of_several_currencies_are_added_only_at_the_operator_s_rates(two_currencies: PublishedLedger) -> None:
    engine = DuckDbEngine(two_currencies.connect())
    with pytest.raises(SeveralCurrencies, match="amounts in EUR, USD cannot be added up"):
        Fleet(engine).cost(Fleet(engine).members(), FleetQuery(*SPAN, ("gpu_model",)))
    summary, stated = Fleet(engine).month(Fleet(engine).members(), OCTOBER)
    assert set(summary.totals) == {"EUR", "USD"}
    assert summary.converted is None
    rated = Fleet(engine, Rates(to="USD", rates={"EUR": Decimal("1.25")}))
    converted, _ = rated.month(rated.members(), OCTOBER)
    assert converted.converted == summary.totals["USD"] + summary.totals["EUR"] * Decimal("1.25")
    with pytest.raises(SeveralCurrencies, match="no rate from EUR to CHF"):
        Fleet(engine, Rates(to="CHF", rates={"USD": Decimal(1)})).month(rated.members(), OCTOBER)
    assert {one.currency for one in stated.values()} == {"EUR", "USD"}
    engine.close()


def test_a_span_beyond_what_is_published_says_up_to_when_figures_reach(two: TwoLedgers) -> None:
    later = SPAN[1] + 3_600_000
    found = two.fleet.usage(two.fleet.members(), FleetQuery(SPAN[0], later, ("team",)))
    assert found.note == "published until: north 2026-10-01T05:00:00Z, south 2026-10-01T05:00:00Z"
    assert found.lines == two.fleet.usage(two.fleet.members(), FleetQuery(*SPAN, ("team",))).lines


def test_memory_of_a_sum_is_unknown_if_no_ledger_knows_it() -> None:
    """Unallocated time uses no memory, so adding it does not make the memory of held time known."""
    held = UsageLine(
        key={}, accounts_gpu_us=Accounts(allocated_idle=7), memory_mib_s=None, memory_unknown_us=7, energy_uj=2
    )
    unheld = UsageLine(key={}, accounts_gpu_us=Accounts(unallocated=9), memory_mib_s=0, energy_uj=1)
    total = sum_of_usage_lines({}, [held, unheld])
    assert (total.memory_mib_s, total.memory_unknown_us, total.energy_uj) == (None, 7, 3)
    assert total.accounts_gpu_us == Accounts(allocated_idle=7, unallocated=9)


def test_a_month_in_which_quotas_by_gpu_model_began_within_an_hour_is_reported_as_by_its_accountant() -> None:
    queue = {"name": "left", "team": "red", "gpu_models": {"H100": {"deserved": 1}, "A100-80GB": {"deserved": 1}}}
    with published(publish=False) as known:
        known.ledger.put_policy(Policy.model_validate({"queues": [queue]}), START_MS + 130 * MINUTE, "ana")
        known.publisher.publish()
        month = Month(2026, 10)
        span = month.span(ZoneInfo("UTC"))[0], known.clock.wall_ms()
        own = report_builder.report(known.ledger, known.books, *span, "UTC", month=month)
        with closing(DuckDbEngine(known.connect())) as engine:
            (member,) = Fleet(engine).members()
            of_fleet = member.report(month)
    assert own.quotas
    assert (of_fleet.quotas, of_fleet.statement.lines) == (own.quotas, own.statement.lines)
