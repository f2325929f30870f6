"""The same money on the real ledger: what DuckDB keeps costs what the plain rows cost."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accountant.billing.cost_allocation import statement
from accountant.billing.statements import canonical
from accountant.billing.usage_pricing import charges, cost
from accountant.core.gpu_time_accounts import split
from accountant.ledger.protocols import Down, Facts, NamespaceFacts, NodeFacts
from accountant.reports import html_and_pdf
from accountant.reports.report_builder import build
from accountant.storage.duckdb_ledger import open_ledger
from accountant.wire.policy_models import IDLE
from accountant.wire.usage_cost_and_job_models import Accounts
from agent.wire import Batch, Gap, Holder, PodFacts, UsageInterval
from gputally.base.clock import VirtualClock
from tests.fresh import fresh
from tests.usage_records import batch, deliver, interval

QUARTER_MS = 900_000
DAYS = 2
NODES = {"n1": ("NVIDIA H100 80GB HBM3", "on-demand"), "n2": ("NVIDIA A100-SXM4-40GB", "spot")}
TEAMS = ("vision", "language")
BOOK = (
    "id: h100, model: H100, capacity_type: on-demand, price: '6.88', valid_from: 2026-01-01, valid_to: 2026-10-02\n"
    "id: h100-new, model: H100, capacity_type: on-demand, price: '6.451', valid_from: 2026-10-02\n"
    "id: a100, model: A100, capacity_type: spot, price: '1.293355', valid_from: 2026-01-01"
)


def intervals(origin):
    """Two GPUs on each of two nodes in quarters: held by turns, sometimes free, lost, unread or not sent at all."""
    seq = dict.fromkeys(NODES, 0)
    for quarter in range(DAYS * 96):
        for node, (model, _) in NODES.items():
            for gpu in range(2):
                turn = (quarter // 13 + gpu) % 5
                if turn == 4 and quarter % 31 == 0:
                    continue  # nobody says what happened
                seq[node] += 1
                start, full = origin + quarter * QUARTER_MS, QUARTER_MS * 1000
                free = turn == 3
                team = TEAMS[turn % 2]
                busy = None if quarter % 41 == 7 else (full * (quarter % 7) // 7)
                yield node, UsageInterval(
                    seq=seq[node], start_ms=start, end_ms=start + QUARTER_MS, gpu_uuid=f"GPU-{node}-{gpu}",
                    gpu_model=model,
                    holder=None if free else Holder("pod", f"uid-{node}-{gpu}-{team}", team, f"train-{node}-{gpu}"),
                    health="lost" if turn == 2 and quarter % 29 == 0 else "ok",
                    capacity_us=full, allocated_us=0 if free else full, busy_us=0 if free else busy,
                    gaps=(Gap(start, start + 60_000, "nvml"),) if quarter % 17 == 3 and not free else (),
                    method="simulated",
                )  # fmt: skip


@pytest.fixture(scope="module")
def origin(books):
    return books.at("2026-10-01")


@pytest.fixture(scope="module")
def duck(books, origin, tmp_path_factory):
    clock = VirtualClock(origin + DAYS * 86_400_000)
    ledger = open_ledger(fresh(tmp_path_factory.mktemp("ledger") / "ledger.duckdb"), clock)
    nodes = tuple(
        NodeFacts(cluster="c", name=name, pool=f"pool-{name}", region="eu", capacity_type=capacity_type)
        for name, (_, capacity_type) in NODES.items()
    )
    ledger.observe(Facts(nodes=nodes, namespaces=tuple(NamespaceFacts("c", team, team) for team in TEAMS)), origin)
    rows = list(intervals(origin))
    for node in NODES:
        own = tuple(row for name, row in rows if name == node)
        facts = tuple(
            PodFacts(
                seq=len(own) + 1 + i, uid=f"uid-{node}-{gpu}-{team}", namespace=team, name=f"train-{node}-{gpu}",
                node=node, workload=f"Job/train-{gpu}", observed_ms=origin,
            )
            for i, (gpu, team) in enumerate((gpu, team) for gpu in range(2) for team in TEAMS)
        )  # fmt: skip
        batch = Batch(
            cluster="c",
            node=node,
            boot_id="b",
            epoch=f"e-{node}",
            first_seq=1,
            oldest_seq=1,
            intervals=own,
            facts=facts,
        )
        (receipt,) = ledger.append([batch], clock.wall_ms())
        assert (receipt.stored, receipt.quarantined) == (len(own), 0)
    yield ledger
    ledger.close()


@pytest.fixture(scope="module")
def plain(books, origin):
    """The same intervals as plain rows, split by the same pure rules; what is missing is unmetered."""
    found, seen = [], {}
    for node, row in intervals(origin):
        cells = split(row)
        place = {
            "gpu_model": row.gpu_model, "node": node, "pool": f"pool-{node}", "region": "eu",
            "capacity_type": NODES[node][1],
        }  # fmt: skip
        if row.holder is not None and row.health == "ok":
            place |= {"team": row.holder.namespace, "namespace": row.holder.namespace}
        accounts = Accounts(
            busy=cells.busy_us, allocated_idle=cells.idle_us, allocated_unknown=cells.unknown_us,
            unallocated=cells.unheld_us, down=cells.down_us,
        )  # fmt: skip
        found.append(books.row(row.start_ms, row.end_ms, accounts, place))
        seen.setdefault((node, row.gpu_uuid), set()).add(row.start_ms)
    for (node, _), starts in seen.items():
        for start in range(origin, origin + DAYS * 86_400_000, QUARTER_MS):
            if start not in starts:
                place = {"gpu_model": NODES[node][0], "node": node, "pool": f"pool-{node}", "region": "eu"}
                hole = Accounts(unmetered=QUARTER_MS * 1000)
                found.append(books.row(start, start + QUARTER_MS, hole, {**place, "capacity_type": NODES[node][1]}))
    return books.ledger(found)


@pytest.fixture(scope="module")
def book(books):
    return books.price_book(BOOK)


@pytest.mark.parametrize("by", [(), ("team",), ("gpu_model", "team"), ("day",), ("node",)])
def test_costs_are_equal(duck, plain, book, origin, by):
    span = origin, origin + DAYS * 86_400_000
    assert cost(duck, book, *span, by) == cost(plain, book, *span, by)


def test_statements_are_equal_to_the_byte(duck, plain, book, origin):
    span = origin, origin + DAYS * 86_400_000
    assert canonical(statement(duck, book, *span)) == canonical(statement(plain, book, *span))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(1, DAYS * 86_400_000 - 1), min_size=1, max_size=3, unique=True))
def test_priced_time_is_additive_over_any_split(duck, book, origin, cuts):
    def priced(start, end):
        sums: dict[tuple[str, str], int] = {}
        for charge in charges(duck, book, start, end, ("team",)):
            key = charge.key[0], charge.bucket
            sums[key] = sums.get(key, 0) + charge.gpu_us
        return sums

    edges = [origin, *sorted(origin + cut for cut in cuts), origin + DAYS * 86_400_000]
    pieces: dict[tuple[str, str], int] = {}
    for start, end in pairwise(edges):
        for key, gpu_us in priced(start, end).items():
            pieces[key] = pieces.get(key, 0) + gpu_us
    assert pieces == priced(edges[0], edges[-1])


def test_the_report_is_drawn_from_it(duck, book, origin):
    with duck.moment() as moment:
        report = build(moment, book, origin, origin + DAYS * 86_400_000)
    assert {row.team for row in report.teams} == set(TEAMS)
    assert report.headline.jobs == 4
    assert sum(row.gpu_us for row in report.accounts) == 4 * DAYS * 86_400_000_000
    assert report.statement.payable[IDLE] == report.headline.unallocated_cost
    text = html_and_pdf.render_html(report)
    assert "1–2 October 2026" in text
    assert "Job/train-1" in text


def test_a_node_in_maintenance_is_not_billed(books, book, origin, tmp_path):
    clock = VirtualClock(origin + 86_400_000)
    ledger = open_ledger(fresh(tmp_path / "ledger.duckdb"), clock)
    node = NodeFacts("c", "n1", capacity_type="on-demand", down=(Down(origin, origin + 2 * QUARTER_MS, "firmware"),))
    ledger.observe(Facts(nodes=(node,)), origin)
    rows = [interval(origin + i * QUARTER_MS, "GPU-1") for i in range(4)]
    deliver(ledger, clock.wall_ms(), batch(rows, node="n1"))
    answer = cost(ledger, book, origin, origin + 4 * QUARTER_MS, ("team",))
    ledger.close()
    assert [(line.key["team"], line.gpu_us) for line in answer.lines] == [(IDLE, 2 * QUARTER_MS * 1000)]
