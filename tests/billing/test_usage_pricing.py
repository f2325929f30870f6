"""Cost: split at price changes, additive, with unknown apart from zero, and billed to the right team."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.billing.charge import quantify
from accountant.billing.usage_pricing import charge_table, cost
from accountant.wire.policy_models import IDLE
from tests.billing.usage_rows import at, held, ledger_of, price_book, time_by, unheld
from tests.fakes.list_ledger import ListLedger, Row
from tests.hypothesis_examples import examples

HOUR = 3_600_000_000


def test_month_boundary_vector(vectors):
    case = vectors["derived-month-boundary"]
    start, end = case["input"]["interval"]
    ledger = ledger_of(held(start, end, gpus=case["input"]["gpus"]))
    book = price_book(f"id: a, model: H100, price: '{case['input']['price']}', valid_from: 2026-01-01")
    for month, edges in {"2026-10": ("2026-10-01", "2026-11-01"), "2026-11": ("2026-11-01", "2026-12-01")}.items():
        answer = cost(ledger, book, *map(at, edges), by=("team",))
        expected = case["expect"][month]
        assert answer.total == Decimal(expected["cost"])
        assert answer.lines[0].gpu_us == int(expected["gpu_hours"]) * HOUR


def test_price_change_mid_interval_vector(vectors):
    case = vectors["derived-price-change-mid-interval"]
    start, end = case["input"]["interval"]
    old, new = case["input"]["prices"]
    change = new["valid_from"]
    book = price_book(
        f"id: old, model: H100, price: '{old['price']}', valid_from: {old['valid_from']}, valid_to: {change}\n"
        f"id: new, model: H100, price: '{new['price']}', valid_from: {change}"
    )
    ledger = ledger_of(held(start, end, gpus=case["input"]["gpus"]))
    answer = cost(ledger, book, at(start), at(end), by=("team",))
    assert answer.total == Decimal(case["expect"]["cost"])
    assert answer.lines[0].gpu_us == int(case["expect"]["gpu_hours"]) * HOUR
    # A pod that ran only before the change pays the old price, not the average of the window.
    before = ledger_of(held(start, change, gpus=2))
    assert cost(before, book, at(start), at(end), by=("team",)).total == Decimal("12.00")


def test_usage_and_allocation_basis_vector(vectors):
    case = vectors["opencost-issue-3900"]
    ledger = ledger_of(held("2026-10-01", "2026-10-01T01:00", busy=case["input"]["utilisation"]))
    book = price_book(f"id: a, model: H100, price: {case['input']['price']}, valid_from: 2026-01-01")
    found = charge_table(ledger, book, at("2026-10-01"), at("2026-10-02"), by=()).charges()
    parts = quantify(((charge.account,), charge) for charge in found)
    used = sum(part.cost for part in parts["busy",])
    idle = sum(part.cost for part in parts["allocated_idle",])
    assert used == Decimal(str(case["expect"]["usage_cost"]))
    assert used + idle == Decimal(str(case["expect"]["allocation_cost"]))


def test_mig_slices_never_cost_more_than_the_gpu(vectors):
    case = vectors["mig-naive-overbilling"]
    hour = at("2026-10-01"), at("2026-10-01T01:00")
    shares = [HOUR * (i + 1) // 7 - HOUR * i // 7 for i in range(case["input"]["pods"])]
    whole = held(*hour)
    ledger = ListLedger(
        Row(*hour, whole.accounts.model_copy(update={"busy": share}), {**whole.names, "pod": f"p{i}"})
        for i, share in enumerate(shares)
    )
    book = price_book(f"id: a, model: H100, price: {case['input']['card_price_per_hour']}, valid_from: 2026-01-01")
    answer = cost(ledger, book, *hour, by=("pod",))
    assert answer.total == Decimal(str(case["expect"]["correct_total"]))
    assert {line.cost.quantize(Decimal("0.0001")) for line in answer.lines} == {
        Decimal(str(case["expect"]["per_pod_by_compute_slice"])).quantize(Decimal("0.0001"))
    }


FIRST_HOUR = "2026-10-01T00:00", "2026-10-01T01:00"


def cost_of(price, *rows):
    """Return the cost by team of an hour. price: of an H100; None without a price book."""
    book = None if price is None else price_book(f"id: a, model: H100, price: {price}, valid_from: 2026-01-01")
    return cost(ledger_of(*rows), book, *map(at, FIRST_HOUR), by=("team",))


def test_who_pays():
    answer = cost_of(
        2,
        held(*FIRST_HOUR, busy=0.25),
        held(*FIRST_HOUR, busy=None, team="nlp"),
        *(unheld(*FIRST_HOUR, account=account) for account in ("unallocated", "unmetered", "down")),
    )
    assert {line.key["team"]: line.cost for line in answer.lines} == {"vision": 2, "nlp": 2, IDLE: 2}
    assert (answer.total, answer.currency) == (6, "USD")


def test_unpriced_is_not_zero():
    answer = cost_of(2, held(*FIRST_HOUR), held(*FIRST_HOUR, gpu_model="Tesla T4"), held(*FIRST_HOUR, team="nlp"))
    by_team = {line.key["team"]: (line.cost, line.unpriced_gpu_us) for line in answer.lines}
    assert by_team == {"nlp": (2, 0), "vision": (None, HOUR)}
    assert (answer.total, answer.unpriced_gpu_us) == (None, HOUR)


def test_without_a_price_book_everything_is_unpriced():
    answer = cost_of(None, held(*FIRST_HOUR))
    assert (answer.total, answer.currency, answer.price_book_version) == (None, None, "")
    assert answer.unpriced_gpu_us == HOUR


def test_an_explicit_price_of_zero_is_a_price():
    answer = cost_of(0, held(*FIRST_HOUR))
    assert (answer.total, answer.unpriced_gpu_us) == (0, 0)


def test_price_change_at_local_midnight():
    book = price_book(
        "id: a, model: H100, price: 1, valid_from: 2026-01-01, valid_to: 2026-11-01\n"
        "id: b, model: H100, price: 10, valid_from: 2026-11-01",
        timezone="Europe/Berlin",
    )
    # Local midnight is 23:00 UTC: one hour of the last UTC day of October is at the new price already.
    ledger = ledger_of(held("2026-10-31T22:00", "2026-11-01T00:00"))
    assert cost(ledger, book, at("2026-10-31"), at("2026-11-02"), by=()).total == 11
    assert book.cuts(at("2026-10-31"), at("2026-11-02")) == (at("2026-10-31T23:00"),)


MINUTES = st.integers(min_value=0, max_value=600)
MODELS = ("H100", "T4", "L4")


@settings(max_examples=examples(20, 120))
@given(
    spans=st.lists(
        st.tuples(MINUTES, st.integers(1, 300), st.sampled_from("abc"), st.integers(0, 100), st.sampled_from(MODELS)),
        max_size=8,
    ),
    change=MINUTES,
    cuts=st.lists(st.integers(min_value=0, max_value=600 * 60_000), max_size=4),
    order=st.randoms(use_true_random=False),
)
def test_additive_over_any_split_and_blind_to_order(spans, change, cuts, order):
    origin = at("2026-10-01")
    rows = [
        held(origin + s * 60_000, origin + (s + n) * 60_000, team=team, busy=busy / 100, gpu_model=model)
        for s, n, team, busy, model in spans
    ]
    moment = f"2026-10-01T{change // 60:02d}:{change % 60:02d}:00Z"
    book = price_book(
        f"id: a, model: H100, price: '1.37', valid_from: 2026-01-01, valid_to: {moment}\n"
        f"id: b, model: H100, price: '2.41', valid_from: {moment}\n"
        "id: c, model: L4, price: '0.8048', valid_from: 2026-01-01"
    )
    start, end = origin, origin + 600 * 60_000

    def priced(start, end):
        found = charge_table(ListLedger(rows), book, start, end, by=("team",)).charges()
        return time_by(found, lambda charge: (charge.key[0], charge.bucket))

    edges = [start, *sorted({start + cut for cut in cuts if 0 < cut < end - start}), end]
    assert sum((priced(*piece) for piece in pairwise(edges)), Counter()) == priced(start, end)

    answer = cost(ListLedger(rows), book, start, end, by=("team",))
    shuffled = rows.copy()
    order.shuffle(shuffled)
    assert cost(ListLedger(shuffled), book, start, end, by=("team",)) == answer
    if answer.total is not None:
        assert sum(line.cost for line in answer.lines) == answer.total
        assert cost(ListLedger(rows), book, start, end, by=("gpu_model", "day")).total == answer.total
