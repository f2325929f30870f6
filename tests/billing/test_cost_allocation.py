"""Who pays for idle time, start-up and borrowed time: every policy moves time and none makes or loses any."""

from __future__ import annotations

from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.billing.charge_columns import split_in_order
from accountant.billing.cost_allocation import bills, bills_by_grouping, weights
from accountant.billing.idle_time_causes import Launch, PhaseSpan, gang, phase_spans
from accountant.billing.quota_usage import reserve
from accountant.billing.time_reallocation import Share, lend, spread_shares
from accountant.billing.usage_pricing import charges, quantify, total_cost
from accountant.ledger.protocols import IdlePhases
from accountant.prices.price_book import PriceBook
from accountant.wire.policy_models import IDLE
from gputally.base.yaml_file import FileFault, parse
from gputally.server.config_loading import validate

HOUR = 3_600_000_000
ROW = "per: gpu-hour, source: s, as_of: 2026-01-01, basis: gpu-only, valid_from: 2026-01-01"


def book(billing=""):
    text = (
        f"schema: 1\ncurrency: USD\n{billing}rows:\n"
        f"  - {{id: h100, model: H100, price: 4, {ROW}}}\n  - {{id: t4, model: T4, price: 1, {ROW}}}\n"
    )
    return validate(parse(text, "book.yaml"), PriceBook)


SPREAD = "billing: {idle: {unallocated: spread}}\n"
DAY = "2026-10-01", "2026-10-02"


@pytest.fixture
def pools(books):
    """Two pools: in `main` two teams at different prices and idle capacity, in `spare` nobody ever."""
    rows = [
        books.held(*DAY, 3, team="vision"),
        books.held(*DAY, 4, team="nlp", queue="nlp", gpu_model="Tesla T4"),
        books.unheld(*DAY, gpus=2),
        books.unheld(*DAY, gpus=1, pool="spare"),
        books.unheld(*DAY, account="down"),
    ]
    return books.ledger(rows)


def by_team(found):
    return {
        (team, detail): total_cost(parts)
        for (team, detail), parts in quantify(((c.key[0], c.detail), c) for c in found).items()
        if any(part.billed for part in parts)
    }


def ask(books, ledger, billing=""):
    return bills(ledger, book(billing), books.at(DAY[0]), books.at(DAY[1]), ("team",))


def test_idle_is_kept_unless_said_otherwise(books, pools):
    assert by_team(ask(books, pools)) == {("vision", ""): 288, ("nlp", ""): 96, (IDLE, ""): 288}


def test_idle_spread_by_cost_within_its_pool(books, pools):
    """12 : 4 dollars an hour held in `main`, so 3 : 1 of its idle; in `spare` nobody can take it."""
    assert by_team(ask(books, pools, SPREAD)) == {
        ("vision", ""): 288, ("nlp", ""): 96, ("vision", "spread"): 144, ("nlp", "spread"): 48, (IDLE, ""): 96,
    }  # fmt: skip


def test_idle_is_spread_within_its_own_cluster(books):
    """Pools of one name in two clusters are two pools: whoever fills its own pays for nobody else's idle GPUs."""
    ledger = books.ledger(
        [
            books.held(*DAY, 1, team="vision", cluster="here"),
            books.unheld(*DAY, gpus=1, cluster="here"),
            books.held(*DAY, 1, team="nlp", cluster="there"),
        ]
    )
    for by in (("team",), ("team", "cluster"), ("team", "node")):
        found = bills(ledger, book(SPREAD), books.at(DAY[0]), books.at(DAY[1]), by)
        assert {len(charge.key) for charge in found} == {len(by)}
        assert by_team(found) == {("vision", ""): 96, ("vision", "spread"): 96, ("nlp", ""): 96}, by


def test_pools_may_differ(books, pools):
    billing = "billing: {idle: {unallocated: spread}, pools: {main: {unallocated: keep}}}\n"
    assert by_team(ask(books, pools, billing)) == by_team(ask(books, pools))


def test_a_pool_with_unpriced_time_spreads_by_time(books, pools):
    pools.add(books.held(*DAY, 1, team="nlp", gpu_model="L40S"))
    found = ask(books, pools, SPREAD)
    shares = {c.key[0]: c.gpu_us for c in found if c.detail == "spread"}
    assert shares == {"vision": 2 * 24 * HOUR * 3 // 8, "nlp": 2 * 24 * HOUR * 5 // 8}


def test_unused_guarantees_are_their_owners(books, pools):
    """vision has 3 of 5, robotics none of 2: of three free GPUs they reserved all, 2 : 2."""
    pools.put_policy(books.quota_policy(vision=5, robotics=2, nlp=1), books.at("2026-09-01"))
    billing = "billing: {idle: {guaranteed: owner}}\n"
    found = ask(books, pools, billing)
    reserved = {}
    for charge in found:
        if charge.detail == "reserved":
            reserved[charge.key[0]] = reserved.get(charge.key[0], 0) + charge.gpu_us
    assert reserved == {"vision": 36 * HOUR, "robotics": 36 * HOUR}
    assert not [c for c in found if c.key[0] == IDLE and c.account == "unallocated"]
    assert {c.account for c in found if c.detail == "reserved"} == {"unallocated"}


def test_start_up_is_told_apart_and_may_be_the_clusters(books):
    place = {"gpu_model": "H100", "pool": "a", "region": "", "capacity_type": ""}
    ledger = books.ledger([books.held("2026-10-01", "2026-10-01T10:00", busy=0.5, **place)])
    ledger.idle_phases = lambda *_: [IdlePhases({"team": "vision", **place}, HOUR, 2 * HOUR)]
    details = {c.detail: (c.key[0], c.gpu_us) for c in ask(books, ledger) if c.account == "allocated_idle"}
    assert details == {
        "starting": ("vision", HOUR), "gang_waiting": ("vision", 2 * HOUR), "running_idle": ("vision", 2 * HOUR),
    }  # fmt: skip
    moved = ask(books, ledger, "billing: {pools: {a: {starting: cluster}}}\n")
    assert {c.detail: c.key[0] for c in moved if c.detail} == {
        "starting": IDLE, "gang_waiting": "vision", "running_idle": "vision",
    }  # fmt: skip


def test_a_start_up_costs_what_its_own_hours_cost(books):
    """The price doubles at midnight; what started after it is not taken from the cheaper day."""
    place = {"gpu_model": "H100", "pool": "a", "region": "", "capacity_type": ""}
    began, changed, ended = (books.at(day) for day in ("2026-10-01", "2026-10-02", "2026-10-03"))
    ledger = books.ledger([books.held(began, ended, busy=0.5, **place)])
    ledger.idle_phases = lambda start, end, *_: (
        [IdlePhases({"team": "vision", **place}, 3 * HOUR, 0)] if start <= changed < end else []
    )
    dated = "per: gpu-hour, source: s, as_of: 2026-01-01, basis: gpu-only"
    text = (
        "schema: 1\ncurrency: USD\nbilling: {pools: {a: {starting: cluster}}}\nrows:\n"
        f"  - {{id: before, model: H100, price: 4, {dated}, valid_from: 2026-01-01, valid_to: 2026-10-02}}\n"
        f"  - {{id: since, model: H100, price: 8, {dated}, valid_from: 2026-10-02}}\n"
    )
    priced = validate(parse(text, "book.yaml"), PriceBook)
    idle = {
        (charge.key[0], charge.detail, charge.row.id): charge.gpu_us
        for charge in bills(ledger, priced, began, ended, ("team",))
        if charge.account == "allocated_idle"
    }
    assert idle == {
        ("vision", "running_idle", "before"): 12 * HOUR, ("vision", "running_idle", "since"): 9 * HOUR,
        (IDLE, "starting", "since"): 3 * HOUR,
    }  # fmt: skip


def test_phases_never_exceed_the_idle_time(books):
    place = {"gpu_model": "H100", "pool": "a", "region": "", "capacity_type": ""}
    ledger = books.ledger([books.held("2026-10-01", "2026-10-01T10:00", busy=1.0, **place)])
    ledger.idle_phases = lambda *_: [IdlePhases({"team": "vision", **place}, 5, 7)]
    assert {(c.account, c.detail, c.gpu_us) for c in ask(books, ledger)} == {("busy", "", 10 * HOUR)}


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(0, 12), st.integers(0, 12)),
        max_size=3,
    )
)
def test_the_first_time_of_a_group_is_its_start_up(groups):
    """Microsecond by microsecond: a group's rows begin with `starting`, then `gang_waiting`, and the rest follows."""
    expected = []
    for rows, starting, gang_waiting in groups:
        microseconds = (["s"] * starting + ["g"] * gang_waiting + ["r"] * sum(rows))[: sum(rows)]
        for row in rows:
            taken, microseconds = microseconds[:row], microseconds[row:]
            expected.append([taken.count(part) for part in "sgr"])
    table = [(at, row, *limits) for at, (rows, *limits) in enumerate(groups) for row in rows]
    group, gpu_us, *limits = np.array(table, dtype=np.int64).reshape(-1, 4).T
    assert split_in_order(group, gpu_us, np.stack(limits, axis=1)).tolist() == expected


TEAMS = st.sampled_from(["a", "b", "c"])
POLICIES = st.sampled_from(["keep", "spread"])


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(
        st.tuples(TEAMS, st.integers(0, 20), st.integers(1, 10**7), st.sampled_from(["H100", "T4", "L4"]), TEAMS),
        min_size=1, max_size=6,
    ),
    free=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 10**7), TEAMS), max_size=4),
    chosen=st.tuples(POLICIES, POLICIES, st.sampled_from(["none", "owner"])),
    deserved=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)  # fmt: skip
def test_policies_move_time_and_keep_it(books, rows, free, chosen, deserved):
    """Whatever is chosen: per account and price row the bills add up to the charges, and so does the money."""
    origin = books.at("2026-10-01")
    ledger = books.ledger(
        [
            books.held(origin + s * 600_000, origin + s * 600_000 + n, team=t, gpu_model=m, pool=p, busy=0.3)
            for t, s, n, m, p in rows
        ]
        + [books.unheld(origin + s * 600_000, origin + s * 600_000 + n, pool=p) for s, n, p in free]
    )
    ledger.put_policy(books.quota_policy(a=deserved[0], b=deserved[1]), origin - 1)
    default, of_a, guaranteed = chosen
    everywhere = f"{{unallocated: {default}, guaranteed: {guaranteed}}}"
    billing = f"billing: {{idle: {everywhere}, pools: {{a: {{unallocated: {of_a}}}}}}}\n"
    span = origin, origin + 86_400_000
    found = bills(ledger, book(billing), *span, ("team",))
    plain = charges(ledger, book(billing), *span, ("team",))

    def sums(some):
        time = {}
        for charge in some:
            key = charge.account, charge.place, charge.bucket
            time[key] = time.get(key, 0) + charge.gpu_us
        return time

    assert sums(found) == sums(plain)
    assert all(charge.gpu_us > 0 for charge in found)
    costs = [
        total_cost([part for parts in quantify((c.key, c) for c in some if not c.unpriced).values() for part in parts])
        for some in (found, plain)
    ]
    assert costs[0] == costs[1]
    cuts = [("team",), ("team", "pod"), ("team", "day"), ("team", "cluster", "node")]
    several = bills_by_grouping(ledger, book(billing), *span, cuts)
    for by, lines in zip(cuts, several, strict=True):
        assert sums(bills(ledger, book(billing), *span, by)) == sums(plain)
        for charge in lines.charges:
            key = charge.key[0], charge.account, charge.detail, charge.place.gpu_model, charge.place.capacity_type
            numbers, gpu_us = lines.groups.by_line[*key, charge.row.id if charge.row else None]
            assert sum(gpu_us.tolist()) == charge.gpu_us
            assert {lines.groups.keys[number][0] for number in numbers.tolist()} == {charge.key[0]}
        assert sum(c.gpu_us for c in lines.charges) == sum(c.gpu_us for c in plain)


@given(cut=st.integers(1, 86_399_999), times=st.integers(1, 50))
def test_bills_of_parts_add_up_and_grow_with_the_capacity(books, cut, times):
    """A span's bills are those of its two parts together; as many GPUs again in every row are as much again."""
    origin = books.at("2026-10-01")

    def ledger(gpus):
        return books.ledger(
            [
                books.held(origin, origin + 50_000_001, gpus, team="a", busy=0.3),
                books.held(origin + 7_000_003, origin + 80_000_000, 2 * gpus, team="b", busy=None, pod="b-0"),
                books.unheld(origin, origin + 86_400_000, gpus=3 * gpus),
            ]
        )

    def time(some, factor=1):
        found = {}
        for charge in some:
            key = charge.key, charge.account, charge.place, charge.bucket
            found[key] = found.get(key, 0) + factor * charge.gpu_us
        return found

    def billed(ledger, start, end):
        return bills(ledger, book(), start, end, ("team", "pod"))

    start, end = origin, origin + 86_400_000
    whole = billed(ledger(1), start, end)
    parts = [*billed(ledger(1), start, start + cut), *billed(ledger(1), start + cut, end)]
    assert time(parts) == time(whole)
    assert time(billed(ledger(times), start, end)) == time(whole, times)


@given(
    st.dictionaries(st.integers(0, 3), st.integers(0, 10**12)),
    st.dictionaries(st.sampled_from("ab"), st.integers(0, 10**9)),
)
def test_spreading_keeps_units(idle, weights):
    shares, left = spread_shares(idle, dict.fromkeys(idle, weights))
    for pool, units in idle.items():
        assert sum(shares.get(pool, {}).values()) + left.get(pool, 0) == units


@given(
    st.dictionaries(st.integers(0, 4), st.integers(0, 10**10)),
    st.dictionaries(st.sampled_from("abc"), st.integers(1, 10**10)),
)
def test_no_more_is_reserved_than_was_free(free, unused):
    found = reserve(free, unused)
    for kind, gpu_us in free.items():
        assert sum(us for (of, _), us in found.items() if of == kind) <= gpu_us
    assert sum(found.values()) == min(sum(free.values()), sum(unused.values()))


SHARES = st.lists(st.builds(Share, st.integers(0, 10**9), st.integers(0, 10**9)), max_size=5)


@given(st.integers(0, 10**9), SHARES)
def test_lending(unallocated, shares):
    free, parts = lend(unallocated, shares)
    assert 0 <= sum(free) <= unallocated
    for borrower, share in enumerate(shares):
        assert free[borrower] + sum(parts[borrower]) <= share.borrowed_us
        assert parts[borrower][borrower] == 0
        assert sum(row[borrower] for row in parts) <= share.idle_us
    # As much as can be: what is still wanted, nobody else has.
    for borrower, share in enumerate(shares):
        missing = share.borrowed_us - free[borrower] - sum(parts[borrower])
        others = sum(
            other.idle_us - sum(row[lender] for row in parts)
            for lender, other in enumerate(shares)
            if lender != borrower
        )
        assert not missing or (sum(free) == unallocated and not others)


def test_unallocated_time_is_lent_first():
    assert lend(10, [Share(0, 12), Share(5, 0)]) == ([10, 0], [[0, 2], [0, 0]])


def test_phases():
    def launch(holder, started, created=0, gang="g", scheduled=1, observed=99):
        return Launch(holder, gang, created, scheduled, started, observed)

    assert phase_spans([launch(2, 30), launch(1, 10), launch(3, 20, gang="")]) == [
        PhaseSpan(1, "starting", 0, 10), PhaseSpan(1, "gang_waiting", 10, 30),
        PhaseSpan(2, "starting", 0, 30), PhaseSpan(3, "starting", 0, 20),
    ]  # fmt: skip
    # A member that came later makes nobody wait; one that never ran makes them wait as long as it was seen.
    assert phase_spans([launch(1, 10), launch(2, 500, created=400)])[0:2] == [
        PhaseSpan(1, "starting", 0, 10), PhaseSpan(2, "starting", 0, 500),
    ]  # fmt: skip
    assert phase_spans([launch(1, 10), launch(2, None)]) == [
        PhaseSpan(1, "starting", 0, 10), PhaseSpan(1, "gang_waiting", 10, 99), PhaseSpan(2, "starting", 0, 99),
    ]  # fmt: skip
    assert phase_spans([launch(1, None, scheduled=None)]) == []
    assert (gang("PyTorchJob/x", "c/n"), gang("Deployment/x", "c/n"), gang("", "c/n")) == ("c/n/PyTorchJob/x", "", "")


def test_two_ways_of_dividing_a_gpu_are_refused():
    with pytest.raises(FileFault, match="cannot be combined"):
        book("mig_basis: memory\nbilling: {shared_gpus: busy}\n")
    assert Decimal(book().prices[0].price) == 4


def test_what_idle_is_spread_by_is_summed_without_rounding(books):
    """Whatever the caller's decimal context says: five digits cannot hold a cost."""
    ledger = books.ledger(
        [
            books.held(*DAY, 3, team="vision"),
            books.held(*DAY, 1, team="vision", gpu_model="Tesla T4"),
            books.held(*DAY, 1, team="nlp", gpu_model="Tesla T4"),
        ]
    )
    odd = validate(parse(book().model_dump_json(by_alias=True).replace('"4"', '"4.000001"'), "book.json"), PriceBook)
    held = charges(ledger, odd, *(books.at(day) for day in DAY), ("team",))
    with localcontext() as context:
        exact = weights(held, ("team",))
        context.prec = 5
        assert weights(held, ("team",)) == exact
    of_main = exact["", "main"]
    assert Fraction(of_main["vision"], of_main["nlp"]) == 3 * Fraction("4.000001") + 1
