"""The bill of idle time, start-up and borrowed time: every policy moves time between teams and neither creates nor
loses any."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from decimal import Decimal, localcontext
from fractions import Fraction
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.billing.charge import quantify, total_cost
from accountant.billing.cost_allocation import billed_tables, bills, weights
from accountant.billing.quota_usage import ModelSpans, quotas, reserve
from accountant.billing.time_reallocation import spread_shares
from accountant.billing.usage_pricing import charge_table, split_in_order
from accountant.core.borrowed_time import HolderTime, lend
from accountant.core.start_up import Launch, PhaseSpan, gang, phase_spans
from accountant.prices.price_book import PriceBook
from accountant.wire.policy_models import IDLE, Policy
from gputally.base.apportionment import apportion
from gputally.base.called_off import CalledOff, Work, make_current
from gputally.base.yaml_file import FileFault, parse
from gputally.server.config_loading import validate
from tests.billing.usage_rows import at, held, ledger_of, quota_policy, time_by, unheld
from tests.fakes.list_ledger import ListLedger

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
def pools():
    """Two pools: in `main` two teams at different prices and idle capacity, in `spare` no team at all."""
    rows = [
        held(*DAY, 3, team="vision"),
        held(*DAY, 4, team="nlp", queue="nlp", gpu_model="Tesla T4"),
        unheld(*DAY, gpus=2),
        unheld(*DAY, gpus=1, pool="spare"),
        unheld(*DAY, account="down"),
    ]
    return ListLedger(rows)


def by_team(found):
    return {
        (team, detail): total_cost(parts)
        for (team, detail), parts in quantify(((c.key[0], c.detail), c) for c in found).items()
        if any(part.billed for part in parts)
    }


def ask(ledger, billing=""):
    return bills(ledger, book(billing), at(DAY[0]), at(DAY[1]), ("team",))


@pytest.mark.parametrize("answered", [1, 2])
def test_a_bill_that_nobody_waits_for_ends_between_its_groupings(pools, answered):
    """The caller goes when the ledger has answered the first question, or the last one."""
    work, questions = Work(), []

    class Left(ListLedger):
        def usage(self, *asked):
            questions.append(asked)
            if len(questions) == answered:
                work.call_off()
            return super().usage(*asked)

    make_current(work)
    try:
        with pytest.raises(CalledOff):
            billed_tables(Left(pools.rows), book(), at(DAY[0]), at(DAY[1]), (("team",), ("team", "queue")))
    finally:
        make_current(None)
    assert len(questions) == answered


def test_idle_is_kept_unless_said_otherwise(pools):
    assert by_team(ask(pools)) == {("vision", ""): 288, ("nlp", ""): 96, (IDLE, ""): 288}


def test_idle_spread_by_cost_within_its_pool(pools):
    """12 : 4 dollars an hour held in `main`, so 3 : 1 of its idle time; no team can take that of `spare`."""
    assert by_team(ask(pools, SPREAD)) == {
        ("vision", ""): 288, ("nlp", ""): 96, ("vision", "spread"): 144, ("nlp", "spread"): 48, (IDLE, ""): 96,
    }  # fmt: skip


def test_idle_is_spread_within_its_own_cluster():
    """Pools of one name in two clusters are two pools: a team that fills its own pays for no idle GPU of the other."""
    ledger = ledger_of(
        held(*DAY, 1, team="vision", cluster="here"),
        unheld(*DAY, gpus=1, cluster="here"),
        held(*DAY, 1, team="nlp", cluster="there"),
    )
    for by in (("team",), ("team", "cluster"), ("team", "node")):
        found = bills(ledger, book(SPREAD), at(DAY[0]), at(DAY[1]), by)
        assert {len(charge.key) for charge in found} == {len(by)}
        assert by_team(found) == {("vision", ""): 96, ("vision", "spread"): 96, ("nlp", ""): 96}, by


def test_pools_may_differ(pools):
    billing = "billing: {idle: {unallocated: spread}, pools: {main: {unallocated: keep}}}\n"
    assert by_team(ask(pools, billing)) == by_team(ask(pools))


def test_a_pool_with_unpriced_time_spreads_by_time(pools):
    pools.add(held(*DAY, 1, team="nlp", gpu_model="L40S"))
    found = ask(pools, SPREAD)
    shares = {c.key[0]: c.gpu_us for c in found if c.detail == "spread"}
    assert shares == {"vision": 2 * 24 * HOUR * 3 // 8, "nlp": 2 * 24 * HOUR * 5 // 8}


def test_unused_guarantees_are_their_owners(pools):
    """vision uses 3 of 5 guaranteed GPUs, robotics 0 of 2. Their unused guarantees reserve all three free GPUs, 2 :
    2."""
    pools.put_policy(quota_policy(vision=5, robotics=2, nlp=1), at("2026-09-01"))
    billing = "billing: {idle: {guaranteed: owner}}\n"
    found = ask(pools, billing)
    reserved = [charge for charge in found if charge.detail == "reserved"]
    assert time_by(reserved, lambda charge: charge.key[0]) == {"vision": 36 * HOUR, "robotics": 36 * HOUR}
    assert not [c for c in found if c.key[0] == IDLE and c.account == "unallocated"]
    assert {charge.account for charge in reserved} == {"unallocated"}


def test_start_up_is_told_apart_and_may_be_the_clusters():
    place = {"gpu_model": "H100", "pool": "a", "region": "", "capacity_type": ""}
    row = held("2026-10-01", "2026-10-01T10:00", busy=0.5, **place)
    ledger = ledger_of(replace(row, starting=HOUR, gang_waiting=2 * HOUR))
    details = {c.detail: (c.key[0], c.gpu_us) for c in ask(ledger) if c.account == "allocated_idle"}
    assert details == {
        "starting": ("vision", HOUR), "gang_waiting": ("vision", 2 * HOUR), "running_idle": ("vision", 2 * HOUR),
    }  # fmt: skip
    moved = ask(ledger, "billing: {pools: {a: {starting: cluster}}}\n")
    assert {c.detail: c.key[0] for c in moved if c.detail} == {
        "starting": IDLE, "gang_waiting": "vision", "running_idle": "vision",
    }  # fmt: skip


def test_a_start_up_costs_what_its_own_hours_cost():
    """The price doubles at midnight; a job that started after it does not get the cheaper day's price."""
    place = {"gpu_model": "H100", "pool": "a", "region": "", "capacity_type": ""}
    began, changed, ended = (at(day) for day in ("2026-10-01", "2026-10-02", "2026-10-03"))
    dearer = replace(held(changed, ended, busy=0.5, **place), starting=3 * HOUR)
    ledger = ledger_of(held(began, changed, busy=0.5, **place), dearer)
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


def test_phases_never_exceed_the_idle_time():
    place = {"gpu_model": "H100", "pool": "a", "region": "", "capacity_type": ""}
    row = held("2026-10-01", "2026-10-01T10:00", busy=1.0, **place)
    ledger = ledger_of(replace(row, starting=5, gang_waiting=7))
    assert {(c.account, c.detail, c.gpu_us) for c in ask(ledger)} == {("busy", "", 10 * HOUR)}


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(0, 12), st.integers(0, 12)),
        max_size=3,
    )
)
def test_the_first_time_of_a_group_is_its_start_up(groups):
    """To the microsecond: a group's rows begin with `starting`, then `gang_waiting`, then the rest."""
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


@settings(max_examples=25)
@given(
    rows=st.lists(
        st.tuples(TEAMS, st.integers(0, 20), st.integers(1, 10**7), st.sampled_from(["H100", "T4", "L4"]), TEAMS),
        min_size=1, max_size=6,
    ),
    free=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 10**7), TEAMS), max_size=4),
    chosen=st.tuples(POLICIES, POLICIES, st.sampled_from(["none", "owner"])),
    deserved=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)  # fmt: skip
def test_policies_move_time_and_keep_it(rows, free, chosen, deserved):
    """Under every policy the bills add up to the charges by account and price row, and so does the money."""
    origin = at("2026-10-01")
    ledger = ListLedger(
        [
            held(origin + s * 600_000, origin + s * 600_000 + n, team=t, gpu_model=m, pool=p, busy=0.3)
            for t, s, n, m, p in rows
        ]
        + [unheld(origin + s * 600_000, origin + s * 600_000 + n, pool=p) for s, n, p in free]
    )
    ledger.put_policy(quota_policy(a=deserved[0], b=deserved[1]), origin - 1)
    default, of_a, guaranteed = chosen
    everywhere = f"{{unallocated: {default}, guaranteed: {guaranteed}}}"
    billing = f"billing: {{idle: {everywhere}, pools: {{a: {{unallocated: {of_a}}}}}}}\n"
    span = origin, origin + 86_400_000
    found = bills(ledger, book(billing), *span, ("team",))
    plain = charge_table(ledger, book(billing), *span, ("team",)).charges()

    def sums(some):
        return time_by(some, lambda charge: (charge.account, charge.place, charge.bucket))

    assert sums(found) == sums(plain)
    assert all(charge.gpu_us > 0 for charge in found)
    costs = [
        total_cost([part for parts in quantify((c.key, c) for c in some if not c.unpriced).values() for part in parts])
        for some in (found, plain)
    ]
    assert costs[0] == costs[1]
    cuts = [("team",), ("team", "pod"), ("team", "day"), ("team", "cluster", "node")]
    several = [table.by_line() for table in billed_tables(ledger, book(billing), *span, cuts)]
    for by, lines in zip(cuts, several, strict=True):
        assert sums(bills(ledger, book(billing), *span, by)) == sums(plain)
        for charge in lines.charges:
            key = charge.key[0], charge.account, charge.detail, charge.place.gpu_model, charge.place.capacity_type
            numbers, gpu_us = lines.groups.by_line[*key, charge.row.id if charge.row else ""]
            assert sum(gpu_us.tolist()) == charge.gpu_us
            assert {lines.groups.keys[number][0] for number in numbers.tolist()} == {charge.key[0]}
        assert sum(c.gpu_us for c in lines.charges) == sum(c.gpu_us for c in plain)


@given(cut=st.integers(1, 86_399_999), times=st.integers(1, 50))
def test_bills_of_parts_add_up_and_grow_with_the_capacity(cut, times):
    """A span's bills are the sum of those of its two parts; twice the GPUs in every row cost twice as much."""
    origin = at("2026-10-01")

    def ledger(gpus):
        return ledger_of(
            held(origin, origin + 50_000_001, gpus, team="a", busy=0.3),
            held(origin + 7_000_003, origin + 80_000_000, 2 * gpus, team="b", busy=None, pod="b-0"),
            unheld(origin, origin + 86_400_000, gpus=3 * gpus),
        )

    def billed(ledger, start, end):
        found = bills(ledger, book(), start, end, ("team", "pod"))
        return time_by(found, lambda charge: (charge.key, charge.account, charge.place, charge.bucket))

    start, end = origin, origin + 86_400_000
    whole = billed(ledger(1), start, end)
    assert billed(ledger(1), start, start + cut) + billed(ledger(1), start + cut, end) == whole
    assert billed(ledger(times), start, end) == {key: times * gpu_us for key, gpu_us in whole.items()}


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


SHARES = st.lists(st.builds(HolderTime, st.integers(0, 10**9), st.integers(0, 10**9)), max_size=5)


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
    assert lend(10, [HolderTime(0, 12), HolderTime(5, 0)]) == ([10, 0], [[0, 2], [0, 0]])


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


def test_what_idle_is_spread_by_is_summed_without_rounding():
    """Independent of the caller's decimal context: five digits cannot hold a cost."""
    ledger = ledger_of(
        held(*DAY, 3, team="vision"),
        held(*DAY, 1, team="vision", gpu_model="Tesla T4"),
        held(*DAY, 1, team="nlp", gpu_model="Tesla T4"),
    )
    odd = validate(parse(book().model_dump_json(by_alias=True).replace('"4"', '"4.000001"'), "book.json"), PriceBook)
    found = charge_table(ledger, odd, *(at(day) for day in DAY), ("team",)).charges()
    with localcontext() as context:
        exact = weights(found, ("team",))
        context.prec = 5
        assert weights(found, ("team",)) == exact
    of_main = exact["", "main"]
    assert Fraction(of_main["vision"], of_main["nlp"]) == 3 * Fraction("4.000001") + 1


UNIT = 10**8
"""Units of one currency unit: the cases divide into thirds and forty-eighths."""
RESOURCES = ("cpu", "ram", "gpu", "pv", "net", "lb")


def units(value):
    return round(Fraction(str(value)) * UNIT)


class Topology:
    """OpenCost's fixture: twelve containers in two clusters, and each cluster's idle cost by resource."""

    def __init__(self, fixture):
        self.rows = fixture["input"]["rows"]
        self.hours = fixture["input"]["window_hours"]
        self.idle = {
            (cluster, resource): units(value)
            for cluster, resources in fixture["input"]["idle"].items()
            for resource, value in resources.items()
        }

    def direct(self, by, rows=None):
        return plus(*({row[by]: sum(units(row[name]) for name in RESOURCES)} for row in rows or self.rows))

    def spread_idle(self, by):
        weights = defaultdict(dict)
        for row in self.rows:
            for resource in ("cpu", "ram", "gpu"):
                pool = row["cluster"], resource
                weights[pool] = plus(weights[pool], {row[by]: units(row[resource])})
        shares, left = spread_shares(self.idle, weights)
        assert not left or not sum(left.values())
        return plus(*shares.values())


@pytest.fixture
def topology(vectors):
    return Topology(vectors["opencost-topology"])


def agree(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        places = len(str(value).partition(".")[2])
        assert round(found[key] / UNIT, places) == value, key


def plus(*sums):
    keys = dict.fromkeys(key for part in sums for key in part)
    return {key: sum(part.get(key, 0) for part in sums) for key in keys}


def test_the_fixture_adds_up(vectors, topology):
    expected = vectors["opencost-topology"]["expect"]
    agree(topology.direct("namespace"), expected["by_namespace"])
    agree(topology.direct("cluster"), expected["by_cluster"])
    active, idle = sum(topology.direct("pod").values()), sum(topology.idle.values())
    assert (active, idle, active + idle) == tuple(
        units(expected[name]) for name in ("active_total", "idle_total", "total")
    )


def test_idle_kept(vectors, topology):
    agree(topology.direct("namespace") | {"__idle__": sum(topology.idle.values())}, vectors["opencost-1b"]["expect"])


def test_idle_split_by_cluster(vectors, topology):
    idle = {}
    for (cluster, _), value in topology.idle.items():
        idle[f"{cluster}/__idle__"] = idle.get(f"{cluster}/__idle__", 0) + value
    agree(topology.direct("namespace") | idle, vectors["opencost-6a"]["expect"])


def test_idle_spread_by_cost(vectors, topology):
    found = plus(topology.direct("namespace"), topology.spread_idle("namespace"))
    agree(found, vectors["opencost-3a"]["expect"])
    assert sum(found.values()) == units(112)


def share_out(cost, weights, *, even=False):
    """Divide a common cost over keys, by weight or evenly."""
    return dict(zip(weights, apportion(cost, [1] * len(weights) if even else list(weights.values())), strict=True))


@pytest.mark.parametrize(("case", "even"), [("opencost-4a", True), ("opencost-4b", False)])
def test_a_shared_namespace(vectors, topology, case, even):
    direct = topology.direct("namespace")
    shared = direct.pop(vectors[case]["input"]["share"]["namespace"])
    found = plus(direct, share_out(shared, direct, even=even))
    agree(found | {"__idle__": sum(topology.idle.values())}, vectors[case]["expect"])


def test_a_shared_label(vectors, topology):
    case = vectors["opencost-4c"]
    common = [row for row in topology.rows if row["labels"].get("app") == case["input"]["share"]["label:app"]]
    direct = topology.direct("namespace", [row for row in topology.rows if row not in common])
    shared = sum(topology.direct("namespace", common).values())
    found = plus(direct, share_out(shared, direct, even=True))
    agree(found | {"__idle__": sum(topology.idle.values())}, case["expect"])


def test_overhead(vectors, topology):
    case = vectors["opencost-4d"]
    direct = topology.direct("namespace")
    overhead = units(case["input"]["overhead_per_hour"]) * topology.hours
    agree(plus(direct, share_out(overhead, direct)) | {"__idle__": sum(topology.idle.values())}, case["expect"])


def test_filters_take_the_idle_that_would_go_there(vectors, topology):
    one = [row for row in topology.rows if row["cluster"] == "cluster1"]
    idle = {cluster: 0 for cluster, _ in topology.idle}
    for (cluster, _), value in topology.idle.items():
        idle[cluster] += value
    direct = topology.direct("cluster", one)
    agree(direct | {"__idle__": idle["cluster1"]}, vectors["opencost-5a"]["expect"])
    agree(plus(direct, {"cluster1": topology.spread_idle("cluster")["cluster1"]}), vectors["opencost-5b"]["expect"])
    two = [row for row in topology.rows if row["namespace"] == "namespace2"]
    passing = topology.spread_idle("namespace")["namespace2"]
    agree(topology.direct("cluster", two) | {"__idle__": passing}, vectors["opencost-5d"]["expect"])


def test_idle_first_then_the_shared_namespace_by_weights_before_idle(vectors, topology):
    case = vectors["opencost-6g"]
    before = topology.direct("namespace")
    found = plus(before, topology.spread_idle("namespace"))
    name = case["input"]["share"]["namespace"]
    shared = found.pop(name)
    before.pop(name)
    agree(plus(found, share_out(shared, before)), case["expect"])


def test_filtered_idle_with_a_shared_namespace_is_not_what_upstream_asserts(vectors, topology):
    case = vectors["opencost-6e-known-wrong"]
    before = topology.direct("namespace")
    idle = topology.spread_idle("namespace")
    name = case["input"]["share"]["namespace"]
    shared, shared_idle = before.pop(name), idle.pop(name)
    found = plus(before, share_out(shared, before))["namespace2"]
    passing = idle["namespace2"] + share_out(shared_idle, before)["namespace2"]
    agree({"namespace2": found, "__idle__": passing}, case["expect"])
    assert passing != units(25)  # the figure upstream's own test asserts, and says is wrong


def test_idle_that_nobody_can_take_stays(vectors):
    case = vectors["opencost-undistributable-idle"]
    active = case["input"]["active"]
    shares, left = spread_shares(
        {name: units(value) for name, value in case["input"]["idle"].items()},
        {name: {team: units(used[name]) for team, used in active.items()} for name in case["input"]["idle"]},
    )
    for team, expected in case["expect"].items():
        for resource, value in expected.items():
            own = units(active[team][resource]) if team in active else left.get(resource, 0)
            assert own + shares.get(resource, {}).get(team, 0) == units(value)


OWNER = "billing: {idle: {guaranteed: owner}}\n"


def of_models(**quotas: dict[str, float]) -> Policy:
    """Build a policy with one queue per team, with these quotas by GPU model."""
    queues = [
        {"name": team, "team": team, "gpu_models": {model: {"deserved": gpus} for model, gpus in own.items()}}
        for team, own in quotas.items()
    ]
    return Policy.model_validate({"schema": 1, "queues": queues})


def reserved(ledger):
    found = [charge for charge in ask(ledger, OWNER) if charge.detail == "reserved"]
    return time_by(found, lambda charge: (charge.key[0], charge.place.gpu_model))


def test_an_unused_guarantee_of_one_model_reserves_no_gpu_of_another():
    """vision has 4 H100 and uses none; 6 A10 and 1 H100 are free. Its guarantee reserves the free H100 alone, also if
    it holds 3 A10, of which it was guaranteed none."""
    ledger = ledger_of(
        unheld(*DAY, gpus=1, gpu_model="NVIDIA H100 80GB HBM3"),
        unheld(*DAY, gpus=6, gpu_model="NVIDIA A10"),
        held(*DAY, 3, team="vision", queue="vision", gpu_model="NVIDIA A10"),
        held(*DAY, 2, team="nlp", queue="nlp", gpu_model="NVIDIA A10"),
    )
    ledger.put_policy(of_models(vision={"H100": 4}, nlp={"H100": 0, "A10": 3}), at("2026-09-01"))
    assert reserved(ledger) == {
        ("vision", "NVIDIA H100 80GB HBM3"): 24 * HOUR, ("nlp", "NVIDIA A10"): 24 * HOUR,
    }  # fmt: skip


def test_a_policy_that_changes_to_quotas_by_model_counts_by_model_from_then_on():
    """Until noon 4 GPUs of any model, of which 3 are free, afterwards 4 H100, of which none is."""
    ledger = ledger_of(unheld(*DAY, gpus=3, gpu_model="NVIDIA A10"), held(*DAY, 4, team="nlp", queue="nlp"))
    ledger.put_policy(quota_policy(vision=4), at("2026-09-01"))
    ledger.put_policy(of_models(vision={"H100": 4}), at(DAY[0]) + 12 * 3_600_000)
    assert reserved(ledger) == {("vision", "NVIDIA A10"): 36 * HOUR}


def test_quotas_by_model_are_used_and_borrowed_for_each_model():
    """vision holds 3 A10 of 0 guaranteed, and none of its 4 H100; a change of the policy at noon alters nothing."""
    ledger = ledger_of(held(*DAY, 3, gpu_model="NVIDIA A10"), held(*DAY, 2, team="nlp", queue="nlp"))
    first = of_models(vision={"H100": 4}, nlp={"H100": 1, "A10": -1})
    for policy, since in ((first, "2026-09-01"), (first.model_copy(update={"k": 2.0}), "2026-10-01T12:00")):
        ledger.put_policy(policy, at(since))
    span = at(DAY[0]), at(DAY[1])
    policies = ledger.status().policies(*span)
    spans = ModelSpans.of(policies, *span)
    usage = ledger.usage(spans.edges, ("queue", *spans.dimensions))
    found = {row.queue: row for row in quotas(policies, usage, *span, ZoneInfo("UTC"))}
    of_day = 24 * HOUR
    vision, nlp = found["vision"], found["nlp"]
    assert (vision.guaranteed_us, vision.within_us, vision.borrowed_us) == (4 * of_day, 0, 3 * of_day)
    assert (nlp.guaranteed_us, nlp.within_us, nlp.borrowed_us) == (None, of_day, of_day)
