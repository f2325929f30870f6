"""The same bills on the real ledger, also at the boundaries of months."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from itertools import pairwise, product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.billing.cost_allocation import statement
from accountant.billing.statements import canonical, from_canonical
from accountant.billing.usage_pricing import charge_table, cost
from accountant.bookkeeping.bookkeeper import Bookkeeper
from accountant.core.gpu_time_accounts import split
from accountant.core.periods import Month, days, zone
from accountant.ledger.protocols import Down, Facts, NamespaceFacts, NodeFacts
from accountant.reports import html_page
from accountant.reports.report_builder import build
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from accountant.wire.policy_models import IDLE
from accountant.wire.usage_cost_and_job_models import Accounts
from agent.wire import Gap, Holder
from gputally.base.clock import VirtualClock
from gputally.base.instants import midnight_ms
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR, US_PER_HOUR, US_PER_MS
from tests.billing.usage_rows import at, price_book, time_by
from tests.empty_ledger import fresh
from tests.fakes.list_ledger import ListLedger, Row
from tests.moments import present
from tests.usage_records import batch, deliver, interval, pod_facts, pod_holder

QUARTER_MS = 900_000
DAYS = 2
NODES = {"n1": ("NVIDIA H100 80GB HBM3", "on-demand"), "n2": ("NVIDIA A100-SXM4-40GB", "spot")}
TEAMS = ("vision", "language")
BOOK = (
    "id: h100, model: H100, capacity_type: on-demand, price: '6.88', valid_from: 2026-01-01, valid_to: 2026-10-02\n"
    "id: h100-new, model: H100, capacity_type: on-demand, price: '6.451', valid_from: 2026-10-02\n"
    "id: a100, model: A100, capacity_type: spot, price: '1.293355', valid_from: 2026-01-01"
)


ORIGIN = at("2026-10-01")
SPAN = ORIGIN, ORIGIN + DAYS * MS_PER_DAY


def intervals():
    """Two GPUs on each of two nodes in quarter-hours: held by turns, sometimes free, lost, unread or never sent."""
    for quarter, (node, (model, _)), gpu in product(range(DAYS * 96), NODES.items(), range(2)):
        turn = (quarter // 13 + gpu) % 5
        if turn == 4 and quarter % 31 == 0:
            continue  # nobody says what happened
        start, full_us, team = ORIGIN + quarter * QUARTER_MS, QUARTER_MS * US_PER_MS, TEAMS[turn % 2]
        free = turn == 3
        holder = None if free else pod_holder(f"train-{node}-{gpu}", team, f"uid-{node}-{gpu}-{team}")
        busy_us = None if quarter % 41 == 7 else (full_us * (quarter % 7) // 7)
        yield node, interval(
            start, f"GPU-{node}-{gpu}", holder, gpu_model=model, busy_us=0 if free else busy_us,
            health="lost" if turn == 2 and quarter % 29 == 0 else "ok",
            gaps=(Gap(start, start + 60_000, "nvml"),) if quarter % 17 == 3 and not free else (),
        )  # fmt: skip


@pytest.fixture(scope="module")
def duck(tmp_path_factory):
    nodes = tuple(
        NodeFacts(cluster="c", name=name, pool=f"pool-{name}", region="eu", capacity_type=capacity_type)
        for name, (_, capacity_type) in NODES.items()
    )
    namespaces = tuple(NamespaceFacts("c", team, team) for team in TEAMS)
    place = tmp_path_factory.mktemp("ledger") / "ledger.duckdb"
    with closing(open_ledger(fresh(place), VirtualClock(SPAN[1]))) as ledger:
        ledger.observe(Facts(nodes=nodes, namespaces=namespaces), ORIGIN)
        for node in NODES:
            own = [row for name, row in intervals() if name == node]
            facts = [
                pod_facts(
                    f"train-{node}-{gpu}", ORIGIN, uid=f"uid-{node}-{gpu}-{team}", namespace=team, node=node,
                    workload=f"Job/train-{gpu}",
                )
                for gpu, team in product(range(2), TEAMS)
            ]  # fmt: skip
            (receipt,) = ledger.append([batch(own, facts, node=node, epoch=f"e-{node}")], SPAN[1])
            assert (receipt.stored, receipt.quarantined) == (len(own), 0)
        yield ledger


@pytest.fixture(scope="module")
def plain():
    """The same intervals as plain rows, split by the same rules; missing time is unmetered."""
    found, seen = [], defaultdict(set)
    places = {
        node: {"gpu_model": model, "node": node, "pool": f"pool-{node}", "region": "eu", "capacity_type": capacity_type}
        for node, (model, capacity_type) in NODES.items()
    }
    for node, row in intervals():
        cells = split(row)
        held = row.holder is not None and row.health == "ok"
        names = {"team": row.holder.namespace, "namespace": row.holder.namespace} if held else {}
        accounts = Accounts(
            busy=cells.busy_us, allocated_idle=cells.idle_us, allocated_unknown=cells.unknown_us,
            unallocated=cells.unheld_us, down=cells.down_us,
        )  # fmt: skip
        found.append(Row(row.start_ms, row.end_ms, accounts, places[node] | names))
        seen[node, row.gpu_uuid].add(row.start_ms)
    hole = Accounts(unmetered=QUARTER_MS * US_PER_MS)
    for (node, _), starts in seen.items():
        missing = set(range(*SPAN, QUARTER_MS)) - starts
        found += [Row(start, start + QUARTER_MS, hole, places[node]) for start in missing]
    return ListLedger(found)


@pytest.fixture(scope="module")
def book():
    return price_book(BOOK)


@pytest.mark.parametrize("by", [(), ("team",), ("gpu_model", "team"), ("day",), ("node",)])
def test_costs_are_equal(duck, plain, book, by):
    assert cost(present(duck), book, *SPAN, by) == cost(plain, book, *SPAN, by)


def test_statements_are_equal_to_the_byte(duck, plain, book):
    assert canonical(statement(present(duck), book, *SPAN)) == canonical(statement(plain, book, *SPAN))


@settings(max_examples=8)
@given(cuts=st.lists(st.integers(1, DAYS * MS_PER_DAY - 1), min_size=1, max_size=3, unique=True))
def test_priced_time_is_additive_over_any_split(duck, book, cuts):
    def priced(start, end):
        return time_by(
            charge_table(present(duck), book, start, end, ("team",)).charges(),
            lambda charge: (charge.key[0], charge.bucket),
        )

    edges = [ORIGIN, *sorted(ORIGIN + cut for cut in cuts), SPAN[1]]
    assert sum((priced(*piece) for piece in pairwise(edges)), Counter()) == priced(*SPAN)


def test_the_report_is_drawn_from_it(duck, book):
    with duck.moment() as moment:
        report = build(moment, book, *SPAN)
    assert {row.team for row in report.teams} == set(TEAMS)
    assert report.headline.jobs == 4
    assert sum(row.gpu_us for row in report.accounts) == 4 * DAYS * 86_400_000_000
    assert report.statement.payable[IDLE] == report.headline.unallocated_cost
    text = html_page.render_html(report)
    assert "1–2 October 2026" in text
    assert "Job/train-1" in text


def test_a_node_in_maintenance_is_not_billed(book, tmp_path):
    down = Down(ORIGIN, ORIGIN + 2 * QUARTER_MS, "firmware")
    with closing(open_ledger(fresh(tmp_path / "ledger.duckdb"), VirtualClock(SPAN[1]))) as ledger:
        ledger.observe(Facts(nodes=(NodeFacts("c", "n1", capacity_type="on-demand", down=(down,)),)), ORIGIN)
        rows = [interval(ORIGIN + i * QUARTER_MS, "GPU-1") for i in range(4)]
        deliver(ledger, SPAN[1], batch(rows, node="n1"))
        answer = cost(present(ledger), book, ORIGIN, ORIGIN + 4 * QUARTER_MS, ("team",))
    assert [(line.key["team"], line.gpu_us) for line in answer.lines] == [(IDLE, 2 * QUARTER_MS * 1000)]


MODEL = "NVIDIA H100 80GB HBM3"


@dataclass(frozen=True)
class Edge:
    """month: its hours, and its longest or shortest local day. changed: hours of that day; None if every day has 24."""

    timezone: str
    month: Month
    hours: float
    changed: str | None = None
    day_hours: float = 24


EDGES = (
    Edge("Europe/Berlin", Month(2026, 3), 743, "2026-03-29", 23),
    Edge("Europe/Berlin", Month(2026, 10), 745, "2026-10-25", 25),
    Edge("America/New_York", Month(2026, 3), 743, "2026-03-08", 23),
    Edge("America/New_York", Month(2026, 11), 721, "2026-11-01", 25),  # on the first day of the month
    Edge("America/Santiago", Month(2026, 9), 719, "2026-09-06", 23),  # its midnight does not exist
    Edge("Australia/Lord_Howe", Month(2026, 4), 720.5, "2026-04-05", 24.5),
    Edge("Asia/Kathmandu", Month(2026, 4), 720),  # UTC+5:45
    Edge("Pacific/Kiritimati", Month(2026, 10), 744),  # UTC+14
    Edge("Pacific/Pago_Pago", Month(2026, 12), 744),  # UTC-11, into another year
    Edge("UTC", Month(2028, 2), 696),
    Edge("UTC", Month(2026, 2), 672),
)


@pytest.fixture(params=EDGES, ids=lambda edge: f"{edge.timezone}-{edge.month}")
def edge(request: pytest.FixtureRequest) -> Edge:
    found = request.param
    assert isinstance(found, Edge)
    return found


@pytest.fixture
def ledger_of_edge(edge: Edge, tmp_path: Path) -> Iterator[DuckLedger]:
    """The month and two days before and after, in quarter-hours: odd ones belong to vision, even ones to language."""
    start, end = edge.month.span(zone(edge.timezone))
    begin, stop = start - 2 * MS_PER_DAY, end + 2 * MS_PER_DAY
    found = open_ledger(tmp_path / "ledger.duckdb", VirtualClock(stop), month_zone=edge.timezone)
    found.observe(Facts(namespaces=tuple(NamespaceFacts("c", team, team) for team in ("vision", "language"))), begin)
    busy_us = QUARTER_MS * US_PER_MS // 3
    rows = [
        interval(at, "GPU-0", _holder(at), gpu_model=MODEL, busy_us=busy_us) for at in range(begin, stop, QUARTER_MS)
    ]
    (receipt,) = found.append([batch(rows)], stop)
    assert not isinstance(receipt, Exception)
    assert (receipt.stored, receipt.quarantined) == (len(rows), 0)
    yield found
    found.close()


def _team(at_ms: int) -> str:
    return "vision" if at_ms // QUARTER_MS % 2 else "language"


def _holder(at_ms: int) -> Holder:
    return Holder("pod", f"uid-{_team(at_ms)}", _team(at_ms), "train-0")


def keeper(ledger_of_edge: DuckLedger, edge: Edge, *days_of_change: str) -> Bookkeeper:
    """A bookkeeper in the zone; the price rises by one at the start of each of these local days."""
    edges = ["2025-01-01", *days_of_change, None]
    rows = "\n".join(
        f"id: p{number}, model: H100, price: '{number + 1}.07', valid_from: {since}"
        + (f", valid_to: {until}" if until else "")
        for number, (since, until) in enumerate(pairwise(edges))
    )
    found = Bookkeeper(ledger_of_edge, VirtualClock(edge.month.next.next.span(zone(edge.timezone))[1]), edge.timezone)
    found.prices.take(price_book(rows, timezone=edge.timezone), "file", "prices.yaml", "", 0)
    return found


def test_a_month_has_its_own_hours_its_price_from_its_first_midnight_and_closes_so(ledger_of_edge, edge):
    tz = zone(edge.timezone)
    start, end = edge.month.span(tz)
    books = keeper(ledger_of_edge, edge, f"{edge.month}-01", f"{edge.month.next}-01")
    before, stated, after = (books.month(one) for one in (edge.month.previous, edge.month, edge.month.next))
    assert stated.gpu_us == int(edge.hours * US_PER_HOUR) == (end - start) * US_PER_MS
    assert stated.coverage == 1.0
    assert stated.cost == Decimal("2.07") * stated.gpu_hours
    assert stated.gpu_hours == Decimal(str(edge.hours))
    assert (before.end_ms, after.start_ms) == (start, end)
    for beside, price in ((before, "1.07"), (after, "3.07")):
        held = [line for line in beside.lines if line.unit_price is not None]
        assert {line.unit_price for line in held} == {Decimal(price)}
        assert sum(line.gpu_us for line in held) == 2 * MS_PER_DAY * US_PER_MS
    quarters = range(start, end, QUARTER_MS)
    for team in ("vision", "language"):
        expected = sum(_team(at) == team for at in quarters) * QUARTER_MS * US_PER_MS
        assert sum(line.gpu_us for line in stated.lines if line.team == team) == expected

    books.close(edge.month.previous, "ada", "begins in its last days", ("coverage",))
    kept = from_canonical(books.close(edge.month, "ada").content.encode())
    assert kept.lines == stated.lines
    assert (kept.start_ms, kept.end_ms) == (before.end_ms, after.start_ms)
    assert books.month(edge.month) == kept


def test_days_and_hours_have_their_own_length_and_a_price_changes_between_two_days(ledger_of_edge, edge):
    """The price changes at midnight before and after the day on which the clocks change (or the 15th)."""
    tz = zone(edge.timezone)
    start, end = edge.month.span(tz)
    day = date.fromisoformat(edge.changed or f"{edge.month}-15")
    books = keeper(ledger_of_edge, edge, str(day), str(day + timedelta(days=1)))
    found = cost(present(ledger_of_edge), books.prices.current, start, end, ("day",), None, edge.timezone)
    by_day = {line.key["day"]: line for line in found.lines}
    assert by_day[str(day)].gpu_us == int(edge.day_hours * US_PER_HOUR)
    assert by_day[str(day)].cost == Decimal("2.07") * Decimal(str(edge.day_hours))
    for each, begin, stop in days(start, end, tz):
        price = Decimal("1.07") if each < day else Decimal("2.07") if each == day else Decimal("3.07")
        assert by_day[str(each)].gpu_us == (stop - begin) * US_PER_MS
        assert by_day[str(each)].cost == price * Decimal(stop - begin) / MS_PER_HOUR
    assert sum(line.gpu_us for line in found.lines) == int(edge.hours * US_PER_HOUR)
    # Hours that come twice or never, as they are.
    begin, stop = midnight_ms(day, tz), midnight_ms(day + timedelta(days=1), tz)
    by_hour = {
        line.key["hour"]: line.accounts_gpu_us.total
        for line in present(ledger_of_edge).usage((begin, stop), ("hour",), None, edge.timezone).lines()
    }
    assert sum(by_hour.values()) == (stop - begin) * US_PER_MS
    changed = sorted(gpu_us for gpu_us in by_hour.values() if gpu_us != US_PER_HOUR)
    match edge.day_hours:
        case 25:
            assert (len(by_hour), changed) == (25, [])
        case 24.5:
            assert (len(by_hour), changed) == (25, [US_PER_HOUR // 2])
        case 23:
            assert (len(by_hour), changed) == (23, [])
        case _:
            assert (len(by_hour), changed) == (24, [])
