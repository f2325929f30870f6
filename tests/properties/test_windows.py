"""Windows and usage equal a plain computation over all rows, for any order of arrival: of a ledger, of one cluster of
several that share it, and where not every microsecond counts alike (cost, weights of models, shards, Slurm's decay)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from msgspec import structs

from accountant.billing.charge import ALLOCATED
from accountant.billing.usage_pricing import charge_table
from accountant.core.claim_overlap import intersect, subtract, union
from accountant.core.errors import UnsupportedQuestion
from accountant.core.gpu_time_accounts import ACCOUNT_CELLS, AccountVector, add, part, sum_by_key
from accountant.core.window_decay import (
    age_weight,
    age_weights,
    combine,
    factor,
    reference_ms,
    term,
    weights_by_period,
)
from accountant.ledger.protocols import Down, Facts, NodeFacts
from accountant.ledger.usage import coverage
from accountant.prices.price_book import PriceBook, load
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from accountant.storage.query.window_sums import figures
from accountant.wire.policy_models import UNASSIGNED, Measure, UsageWindow, WindowSpec
from agent.wire import Batch
from fairshare.usage.multi_cluster_windows import sum_of_windows
from gputally.base.clock import VirtualClock
from gputally.base.units import BUCKET_MS
from tests.empty_ledger import fresh
from tests.hypothesis_examples import examples
from tests.moments import present
from tests.properties.interval_streams import (
    POLICY,
    QUEUE_OF,
    SPAN_MS,
    START_MS,
    Stream,
    batches,
    book,
    inside,
    kept,
    streams,
    total,
)
from tests.shared_files import shared_cases
from tests.usage_records import batch, interval, pod_facts, pod_holder

Ledgers = Callable[..., DuckLedger]
TRUSTED = settings(max_examples=examples(4, 24), suppress_health_check=list(HealthCheck))


def few(quick: int, long: int) -> settings:
    """Return settings with few examples of hundreds of rows, without shrinking, which does not help with them."""
    phases = [Phase.explicit, Phase.reuse, Phase.generate]
    return settings(TRUSTED, max_examples=examples(quick, long), phases=phases)


HALF_LIVES = st.sampled_from([None, 60, 3600, 604_800])
INSTANTS = st.integers(1, SPAN_MS + BUCKET_MS)
SIZES = st.integers(1, 2 * SPAN_MS // 1000)
ORDERS = st.randoms(use_true_random=False)
MEASURES: tuple[Measure, ...] = ("allocated", "busy", "energy")
DOWN = Down(START_MS + 400_123, START_MS + 1_500_777, "cordoned")
NODE_DOWN = Facts(nodes=(NodeFacts("c", "n1", down=(DOWN,)),))


def piecemeal(found: list[Stream], size: int, order: Random) -> Iterator[Batch]:
    """The batches of all streams in a random order that keeps the order of each stream."""
    queues = [batches(stream, size) for stream in found]
    while any(queues):
        yield order.choice([queue for queue in queues if queue]).pop(0)


@pytest.mark.thorough
@TRUSTED
@given(
    found=streams(),
    low=st.integers(-1000, SPAN_MS),
    high=st.integers(0, SPAN_MS + 1000),
)
def test_usage_is_what_a_scan_of_all_rows_gives(ledgers: Ledgers, found: list[Stream], low: int, high: int) -> None:
    ledger = ledgers(policy=None)
    for stream in found:
        book(ledger, batches(stream, 3))
    start, end = START_MS + min(low, high), START_MS + max(low, high) + 1
    expected: dict[tuple[str, str], AccountVector] = {}
    for item in kept(found):
        for payer, cells in inside(item, start, end):
            key = (item.gpu, payer or "")
            expected[key] = add([expected.get(key, AccountVector()), cells])
    lines = {
        (line.key["gpu"], line.key["pod"]): line for line in present(ledger).usage((start, end), ("gpu", "pod")).lines()
    }
    for key, cells in expected.items():
        if any(cells):
            accounts = lines[key].accounts_gpu_us
            assert (accounts.busy, accounts.allocated_idle, accounts.allocated_unknown) == cells[:3]
            assert (accounts.unallocated, accounts.down) == cells[3:ACCOUNT_CELLS]
            assert (lines[key].borrowed_busy_us, lines[key].energy_uj) == (cells.borrowed_us, cells.energy_uj)
    lives = {gpu: min(i.start_ms for i in kept(found) if i.gpu == gpu) for gpu in {i.gpu for i in kept(found)}}
    for gpu, since in lives.items():
        mine = [line.accounts_gpu_us for (g, _), line in lines.items() if g == gpu]
        assert sum(accounts.total for accounts in mine) == max(0, end - max(start, since)) * 1000
        assert all(value >= 0 for accounts in mine for value in accounts.model_dump().values())


@pytest.mark.thorough
@TRUSTED
@given(
    found=streams(),
    half_life=HALF_LIVES,
    at=INSTANTS,
    size=SIZES,
    order=ORDERS,
)
def test_windows_are_bit_equal_whatever_the_order_and_equal_to_the_formula(
    ledgers: Ledgers,
    found: list[Stream],
    half_life: int | None,
    at: int,
    size: int,
    order: Random,
) -> None:
    spec = WindowSpec(size=size, half_life=half_life)
    at_ms = START_MS + at
    first, second = ledgers(), ledgers()
    book(first, [batch for stream in found for batch in batches(stream, 4)])
    # The second one hears the streams interleaved and piecemeal, and is asked in between.
    for one in piecemeal(found, 1, order):
        book(second, [one])
        present(second).window(spec, at_ms, "allocated", 0.98)
    for measure in MEASURES:
        assert present(first).window(spec, at_ms, measure, 0.98) == present(second).window(spec, at_ms, measure, 0.98)
    window = present(first).window(spec, at_ms, "allocated", 0.98)
    terms: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    start = at_ms - size * 1000
    for item in kept(found):
        low, high = max(start, item.start_ms), min(at_ms, item.end_ms)
        reference = item.start_ms - item.start_ms % BUCKET_MS + BUCKET_MS
        if half_life is not None and half_life < BUCKET_MS // 1000:
            reference = min(reference, at_ms)
        for payer, cells in inside(item, start, at_ms):
            if payer:
                weight = factor(low, high, reference, half_life)
                terms[QUEUE_OF.get(payer, UNASSIGNED)][reference] += term(sum(cells[:3]), weight)
    expected = {queue: total(sorted(own.items()), at_ms, half_life) for queue, own in terms.items()}
    assert window.unassigned == expected.get(UNASSIGNED, 0)
    assert window.usage["left"] == expected.get("left", 0)
    assert window.usage["right"] == expected.get("right", 0)
    assert window.usage["top"] == window.usage["left"] + window.usage["right"]
    if half_life is None:
        accounts = [line.accounts_gpu_us for line in present(first).usage((start, at_ms), ()).lines()]
        assert window.capacity == sum(a.total - a.down for a in accounts)
        booked = coverage(present(first).usage((start, at_ms), ()))
        assert window.coverage == (1.0 if booked is None else booked)


@pytest.mark.thorough
@TRUSTED
@given(
    found=streams(),
    half_life=st.sampled_from([None, 3600]),
    at=INSTANTS,
    order=ORDERS,
)
def test_checkpoints_and_restarts_change_no_answer(
    ledgers: Ledgers, found: list[Stream], half_life: int | None, at: int, order: Random
) -> None:
    """Sums are computed only at checkpoints, and tenures are written when they begin. The rest follows from the
    rows."""
    spec, at_ms = WindowSpec(size=2 * SPAN_MS // 1000, half_life=half_life), START_MS + at
    straight = ledgers()
    book(straight, [batch for stream in found for batch in batches(stream, 4)])
    clock = VirtualClock(START_MS + 2 * SPAN_MS)
    with TemporaryDirectory() as folder:
        path = fresh(Path(folder) / "ledger.duckdb")
        ledger = open_ledger(path, clock)
        try:
            ledger.put_policy(POLICY, START_MS)
            for one in piecemeal(found, 2, order):
                book(ledger, [one])
                event = order.randrange(4)
                if event == 0:
                    ledger.checkpoint()
                elif event == 1:
                    ledger.close()
                    ledger = open_ledger(path, clock)
                else:
                    present(ledger).window(spec, at_ms, "allocated", 0.98)
            assert present(ledger).window(spec, at_ms, "energy", 0.98) == present(straight).window(
                spec, at_ms, "energy", 0.98
            )
            assert present(ledger).window(spec, at_ms, "allocated", 0.98) == present(straight).window(
                spec, at_ms, "allocated", 0.98
            )
            assert (
                present(ledger).usage((START_MS, at_ms), ("gpu", "pod")).lines()
                == present(straight).usage((START_MS, at_ms), ("gpu", "pod")).lines()
            )
            assert (
                present(ledger).usage((START_MS, at_ms), ("queue",)).lines()
                == present(straight).usage((START_MS, at_ms), ("queue",)).lines()
            )
            examined = present(ledger).imbalance(START_MS, at_ms)
            assert examined.total_us == 0, examined.lines
        finally:
            ledger.close()


# --- one cluster of several that share a ledger -------------------------------------------------
# The clusters have nodes, GPUs, pods and queues of the same names.


CLUSTERS = ("prod", "staging")
THREEFOLD = {"H100": Decimal(3)}


def nodes(cluster: str) -> Facts:
    """The first node is down for a while in one cluster, and the shards of the nodes are swapped in the other
    cluster."""
    down = (DOWN,) if cluster == "prod" else ()
    one, other = ("a", "b") if cluster == "prod" else ("b", "a")
    return Facts(nodes=(NodeFacts(cluster, "n1", shard=one, down=down), NodeFacts(cluster, "n2", shard=other)))


def of_cluster(cluster: str, found: list[Stream], size: int) -> list[list[Batch]]:
    return [[structs.replace(batch, cluster=cluster) for batch in batches(stream, size)] for stream in found]


def plain(window: UsageWindow) -> UsageWindow:
    """The window without the fields that only a query for one cluster has."""
    return window.model_copy(update={"cluster": None, "policy_counting": None})


@pytest.mark.thorough
@few(2, 25)
@given(
    found=st.tuples(streams(), streams()),
    half_life=HALF_LIVES,
    at=INSTANTS,
    size=SIZES,
    order=ORDERS,
)
def test_a_cluster_is_as_if_it_were_alone_and_all_of_them_add_up(
    ledgers: Ledgers,
    found: tuple[list[Stream], list[Stream]],
    half_life: int | None,
    at: int,
    size: int,
    order: Random,
) -> None:
    spec, at_ms = WindowSpec(size=size, half_life=half_life), START_MS + at
    shared, alone = ledgers(*map(nodes, CLUSTERS)), {cluster: ledgers(nodes(cluster)) for cluster in CLUSTERS}
    queues = []
    for cluster, mine in zip(CLUSTERS, found, strict=True):
        book(alone[cluster], [batch for stream in of_cluster(cluster, mine, 4) for batch in stream])
        queues += of_cluster(cluster, mine, 2)
    # The shared one hears both interleaved and piecemeal, and is asked in between.
    while any(queues):
        chosen = order.sample([queue for queue in queues if queue], k=min(2, sum(map(bool, queues))))
        book(shared, [queue.pop(0) for queue in chosen])
        if order.random() < 0.4:
            for cluster in (*CLUSTERS, None, "nobody"):
                present(shared).window(spec, at_ms, "allocated", 0.98, cluster=cluster)
        if order.random() < 0.1:
            shared.checkpoint()
    for measure in MEASURES:
        parts = [present(shared).window(spec, at_ms, measure, 0.98, cluster=cluster) for cluster in CLUSTERS]
        for cluster, window in zip(CLUSTERS, parts, strict=True):
            assert (window.cluster, window.policy_counting) == (cluster, POLICY.counting())
            assert plain(window) == present(alone[cluster]).window(spec, at_ms, measure, 0.98)
        whole = present(shared).window(spec, at_ms, measure, 0.98)
        # Decayed sums are rounded to a whole unit each, once.
        most = 0 if half_life is None else len(CLUSTERS)
        for name, value in whole.usage.items():
            assert abs(value - sum(one.usage[name] for one in parts)) <= most * (3 if name == "top" else 1)
        assert abs(whole.unassigned - sum(one.unassigned for one in parts)) <= most
        assert abs(whole.capacity - sum(one.capacity for one in parts)) <= most
    for shard, weights, decay in (("a", {}, "exact"), (None, THREEFOLD, "exact"), ("b", THREEFOLD, "slurm")):
        if decay == "slurm" and half_life is None:
            continue
        other = spec.model_copy(update={"gpu_weights": weights, "decay": decay})
        for cluster in CLUSTERS:
            window = present(shared).window(other, at_ms, "allocated", 0.98, shard=shard, cluster=cluster)
            assert plain(window) == present(alone[cluster]).window(other, at_ms, "allocated", 0.98, shard=shard)
            mark = shared.status().watermark(at_ms, 0.98, shard, cluster)
            assert mark == window.watermark_ms == alone[cluster].status().watermark(at_ms, 0.98, shard)


@pytest.mark.thorough
@few(2, 25)
@given(found=st.tuples(streams(), streams(), streams()), half_life=HALF_LIVES, at=INSTANTS, size=SIZES)
def test_windows_of_several_ledgers_add_up_to_that_of_one_ledger_with_all_rows(
    ledgers: Ledgers,
    found: tuple[list[Stream], list[Stream], list[Stream]],
    half_life: int | None,
    at: int,
    size: int,
) -> None:
    names = (*CLUSTERS, "west")
    spec, at_ms = WindowSpec(size=size, half_life=half_life), START_MS + at
    together, apart = ledgers(*map(nodes, names)), {name: ledgers(nodes(name)) for name in names}
    for name, mine in zip(names, found, strict=True):
        rows = [batch for stream in of_cluster(name, mine, 4) for batch in stream]
        book(apart[name], rows)
        book(together, rows)
    for measure in MEASURES:
        first, *others = (present(apart[name]).window(spec, at_ms, measure, 0.98, cluster=name) for name in names)
        added = sum_of_windows(names[0], first, dict(zip(names[1:], others, strict=True)))
        whole = present(together).window(spec, at_ms, measure, 0.98)
        same = ("start_ms", "end_ms", "half_life_s", "measure", "unit", "by", "lost_ms", "since_ms")
        assert [getattr(added, what) for what in same] == [getattr(whole, what) for what in same]
        assert added.coverage <= whole.coverage + 1e-12, "the lowest of any"
        if half_life is None:
            assert (added.usage, added.unassigned, added.capacity) == (whole.usage, whole.unassigned, whole.capacity)
        most = (len(names) + 1) / 2  # each sum is rounded to a whole unit, once
        for queue, value in whole.usage.items():
            assert abs(value - added.usage[queue]) <= most * (3 if queue == "top" else 1)
        assert abs(whole.unassigned - added.unassigned) <= most
        assert abs(whole.capacity - added.capacity) <= most


def test_of_a_cluster_that_never_reported_there_is_neither_usage_nor_capacity(
    ledgers: Ledgers,
) -> None:
    ledger = ledgers(nodes("prod"))
    for number in range(40):
        window = present(ledger).window(WindowSpec(size=3600), START_MS, "allocated", 0.98, cluster=f"other-{number}")
        assert (window.capacity, window.watermark_ms, set(window.usage.values())) == (0, None, {0})
    assert not ledger._windows.sums._sums, "names are free to invent: nothing is cached of them"


# --- cost, weights of models, shards, and Slurm's decay -----------------------------------------


CHANGE_MS = START_MS + BUCKET_MS + 400_000
MODELS = {"g1": "NVIDIA H100 80GB HBM3", "g2": "NVIDIA A100-SXM4-40GB"}
PRICE_ROW = "  - {{id: {}, model: {}, price: '{}', {}, per: gpu-hour, source: s, as_of: 2026-01-01, basis: gpu-only}}\n"
WEIGHTS = {"H100": Decimal(4), "A100-40GB": Decimal("2.5")}
NODES = Facts(
    nodes=(
        NodeFacts("c", "n1", shard="a", pool="p", down=(DOWN,)),
        NodeFacts("c", "n2", shard="b", pool="p"),
    )
)


@pytest.fixture(scope="module")
def prices(tmp_path_factory: pytest.TempPathFactory) -> PriceBook:
    """A price book in which the price of an H100 rises in the second quarter-hour."""
    path = tmp_path_factory.mktemp("prices") / "prices.yaml"
    from_to = "valid_from: 2026-01-01, valid_to: '2026-10-01T00:21:40+00:00'"
    path.write_text(
        "schema: 1\ncurrency: EUR\nrows:\n"
        + PRICE_ROW.format("h", "H100", "4.123456", from_to)
        + PRICE_ROW.format("h2", "H100", "6.1", "valid_from: '2026-10-01T00:21:40+00:00'")
        + PRICE_ROW.format("a", "A100", "2.5", "valid_from: 2026-01-01")
    )
    return load(path)


def modelled(found: list[Stream]) -> list[Stream]:
    """Replaces the model of the second GPU."""
    return [
        Stream(
            stream.node,
            stream.epoch,
            tuple(tuple(structs.replace(row, gpu_model=MODELS[row.gpu_uuid]) for row in rows) for rows in stream.sets),
        )
        for stream in found
    ]


def expected(
    found: list[Stream],
    start: int,
    at: int,
    half_life: int | None,
    weigh: Callable[[str, int], Fraction],
    cuts: list[int],
) -> dict[str, int]:
    """Usage per leaf queue by the formula: microseconds of equal weight are added and multiplied once."""
    terms: dict[tuple[str, Fraction], dict[tuple[int, int], int]] = defaultdict(lambda: defaultdict(int))
    for low, high in pairwise([start, *cuts, at]):
        for item in kept(found):
            begin, end = max(low, item.start_ms), min(high, item.end_ms)
            bucket = item.start_ms - item.start_ms % BUCKET_MS
            reference = reference_ms(max(low, bucket), min(high, bucket + BUCKET_MS), half_life)
            for payer, cells in inside(item, low, high):
                if payer:
                    own = terms[QUEUE_OF.get(payer, UNASSIGNED), weigh(MODELS[item.gpu], low)]
                    own[low, reference] += term(sum(cells[:3]), factor(begin, end, reference, half_life))
    sums: dict[str, Fraction] = defaultdict(Fraction)
    for (queue, weight), own in terms.items():
        in_order = [(reference, value) for (_, reference), value in sorted(own.items())]
        sums[queue] += weight * total(in_order, at, half_life)
    return {queue: round(value) for queue, value in sums.items()}


def told(window: UsageWindow) -> dict[str, int]:
    assert window.usage["top"] == window.usage["left"] + window.usage["right"]
    return {"left": window.usage["left"], "right": window.usage["right"], UNASSIGNED: window.unassigned}


@pytest.mark.thorough
@few(3, 20)
@given(
    found=streams(),
    half_life=st.sampled_from([None, 60, 3600]),
    at=INSTANTS,
    size=SIZES,
    order=ORDERS,
)
def test_cost_and_weights_are_the_formula_whatever_the_order(
    ledgers: Ledgers,
    prices: PriceBook,
    found: list[Stream],
    half_life: int | None,
    at: int,
    size: int,
    order: Random,
) -> None:
    found, at_ms, start = modelled(found), START_MS + at, START_MS + at - size * 1000
    plain = WindowSpec(size=size, half_life=half_life)
    weighted = WindowSpec(size=size, half_life=half_life, gpu_weights=WEIGHTS)
    first, second = ledgers(NODES), ledgers(NODES)
    book(first, [one for stream in found for one in batches(stream, 4)])
    for one in piecemeal(found, 1, order):
        book(second, [one])
        if order.random() < 0.3:
            present(second).window(weighted, at_ms, "allocated", 0.98)
            present(second).window(plain, at_ms, "cost", 0.98, book=prices)
        if order.random() < 0.1:
            second.checkpoint()
    asked: tuple[tuple[WindowSpec, Measure], ...] = ((weighted, "allocated"), (weighted, "busy"), (plain, "cost"))
    for spec, of in asked:
        window = present(first).window(spec, at_ms, of, 0.98, book=prices)
        assert window == present(second).window(spec, at_ms, of, 0.98, book=prices), of
        assert window == present(first).window(spec, at_ms, of, 0.98, book=prices), "remembered or not"
    cuts = [CHANGE_MS] if start < CHANGE_MS < at_ms else []
    cost = present(first).window(plain, at_ms, "cost", 0.98, book=prices)
    unit = Fraction(10**9, 3_600_000_000)

    def price(model: str, at_ms: int) -> Fraction:
        later = Fraction("6.1") if at_ms >= CHANGE_MS else Fraction("4.123456")
        return unit * (later if "H100" in model else Fraction("2.5"))

    nothing = {"left": 0, "right": 0, UNASSIGNED: 0}
    assert told(cost) == nothing | expected(found, start, at_ms, half_life, price, cuts)
    assert (cost.unit, cost.price_book_version) == ("1e-9 EUR", prices.version)
    heavy = present(first).window(weighted, at_ms, "allocated", 0.98)
    weigh = lambda model, _: Fraction(4) if "H100" in model else Fraction("2.5")  # noqa: E731
    assert told(heavy) == nothing | expected(found, start, at_ms, half_life, weigh, [])
    assert (heavy.unit, heavy.gpu_weights) == ("weighted_gpu_us", WEIGHTS)
    straight = present(first).window(plain, at_ms, "allocated", 0.98)
    assert (heavy.watermark_ms, heavy.coverage) == (straight.watermark_ms, straight.coverage)
    assert (cost.watermark_ms, cost.coverage) == (straight.watermark_ms, straight.coverage)
    parts = [{"H100": Decimal(1), "*": Decimal(0)}, {"H100": Decimal(0)}]
    of_models = [
        present(first).window(WindowSpec(size=size, half_life=half_life, gpu_weights=part), at_ms, "allocated", 0.98)
        for part in parts
    ]
    slack = 0 if half_life is None else 1
    assert abs(sum(part.capacity for part in of_models) - straight.capacity) <= slack
    for queue, used in told(straight).items():
        assert abs(sum(told(part)[queue] for part in of_models) - used) <= slack, "no model is in two parts or in none"
    # A lens that changes nothing changes nothing, to the last bit.
    same = present(first).window(
        plain.model_copy(update={"gpu_weights": {"MI300X": Decimal(7)}}), at_ms, "allocated", 0.98
    )
    assert same.model_copy(update={"unit": "gpu_us", "gpu_weights": {}}) == straight
    if half_life is None:
        ones = [
            charge
            for charge in charge_table(present(first), prices, start, at_ms, ("queue",)).charges()
            if charge.account in ALLOCATED
        ]
        for queue in nothing:
            exact = sum(
                (unit * Fraction(c.row.price) * c.gpu_us for c in ones if c.row and c.key == (queue,)), Fraction(0)
            )
            assert told(cost)[queue] == round(exact)
        shards = [present(first).window(plain, at_ms, "allocated", 0.98, shard=shard) for shard in ("a", "b", "")]
        assert straight.capacity == sum(shard.capacity for shard in shards)
        assert straight.usage == {queue: sum(shard.usage[queue] for shard in shards) for queue in straight.usage}


def questions(prices: PriceBook) -> list[tuple[WindowSpec, Measure, dict[str, Any]]]:
    """Every way to weigh a window. The size begins the window inside a quarter-hour."""
    plain, decayed = ({"size": 2_300, "half_life": half_life} for half_life in (None, 3600))
    short, weighted = {**plain, "half_life": 60}, {**plain, "gpu_weights": WEIGHTS}
    asked: list[tuple[dict[str, Any], Measure, dict[str, Any]]] = [
        *((spec, measure, {}) for spec in (plain, decayed, short) for measure in MEASURES),
        *((spec, "cost", {"book": prices}) for spec in (plain, decayed)),
        (weighted, "allocated", {}), ({**weighted, "half_life": 3600}, "busy", {}),
        *((plain, "allocated", {"shard": shard}) for shard in ("a", "b", "")),
        (decayed, "allocated", {"shard": "a", "cluster": "c"}), (plain, "allocated", {"cluster": "c"}),
        (plain, "allocated", {"cluster": "other"}),
    ]  # fmt: skip
    return [(WindowSpec.model_validate(spec), measure, named) for spec, measure, named in asked]


def arriving() -> Iterator[list[Batch]]:
    """Batches of two nodes over forty minutes, as in life: ten minutes at a time in order, and two minutes late; a pod
    changes its queue."""
    sent = dict.fromkeys(("n1", "n2"), 1)
    late = {"n1": 12, "n2": 27}
    for step in range(5):
        group = []
        for node, gpu, pod, queue in (("n1", "g1", "a", "left"), ("n2", "g2", "d", "right")):
            minutes = [late[node]] if step == 4 else [m for m in range(10 * step, 10 * step + 10) if m != late[node]]
            rows = [
                interval(
                    START_MS + minute * 60_000, gpu, pod_holder(pod), span_ms=60_000, gpu_model=MODELS[gpu],
                    busy_us=minute * 1_000_000, energy_uj=minute * 1_000,
                )
                for minute in minutes
            ]  # fmt: skip
            placed = {0: queue, 3: "left"}  # the second pod moves to the queue of the first
            facts = [
                pod_facts(pod, START_MS + step, node=node, queue_ref=f"kai:{placed[at]}") for at in placed if at == step
            ]
            group.append(batch(rows, facts, cluster="c", node=node, first_seq=sent[node]))
            sent[node] += len(rows) + len(facts)
        yield group


def test_after_each_batch_a_window_is_that_of_a_reopened_ledger(
    ledgers: Ledgers, prices: PriceBook, tmp_path: Path
) -> None:
    living, asked = ledgers(NODES), questions(prices)
    path, clock = fresh(tmp_path / "reopened.duckdb"), VirtualClock(START_MS + 2 * SPAN_MS)
    reopened = open_ledger(path, clock)
    reopened.put_policy(POLICY, START_MS)
    reopened.observe(NODES, START_MS)
    earlier, known = living.status(), dict[int, UsageWindow]()
    for number, sent in enumerate(arriving()):
        for ledger in (living, reopened):
            book(ledger, sent)
        for index, window in known.items():  # what was known of a commit stays so, or is forgotten
            spec, measure, named = asked[index]
            assert earlier.window(spec, window.end_ms, measure, 0.98, **named) in (None, window)
        earlier = living.status()
        reopened.close()
        reopened = open_ledger(path, clock)
        at_ms = START_MS + 40 * 60_000 - number % 3 * 60_000
        for index, (spec, measure, named) in enumerate(asked):
            window = known[index] = present(living).window(spec, at_ms, measure, 0.98, **named)
            assert living.status().window(spec, at_ms, measure, 0.98, **named) in (None, window)
            assert window == present(reopened).window(spec, at_ms, measure, 0.98, **named), (spec, measure, named)
            if measure != "cost":  # a price book weighs costs only
                assert window == present(living).window(spec, at_ms, measure, 0.98, **{**named, "book": prices})
    assert window.usage.keys() >= {"left", "right"}
    quarters: tuple[WindowSpec, int, Measure, float] = (
        WindowSpec(size=1_800),
        START_MS + 2 * BUCKET_MS,
        "allocated",
        0.98,
    )
    assert reopened.status().window(*quarters) is None  # nothing has been read yet
    assert (
        present(reopened).window(*quarters) == reopened.status().window(*quarters) == present(living).window(*quarters)
    )
    reopened.close()


def test_time_without_a_price_is_neither_usage_nor_covered(ledgers: Ledgers, prices: PriceBook) -> None:
    ledger = ledgers(NODES)
    rows = [
        interval(START_MS, gpu, pod_holder("d"), span_ms=60_000, gpu_model=model, busy_us=1)
        for gpu, model in (("g1", "NVIDIA H100 80GB HBM3"), ("g2", "MI300X"))
    ]
    book(ledger, [batch(rows, node="n2")])
    window = present(ledger).window(WindowSpec(size=60), START_MS + 60_000, "cost", 0.98, book=prices)
    assert (window.unassigned, window.capacity) == (round(Fraction("4.123456") * 10**9 / 60),) * 2
    assert window.coverage == 0.5


def test_what_cannot_be_asked_is_refused(ledgers: Ledgers, prices: PriceBook) -> None:
    ledger = ledgers(NODES)
    with pytest.raises(UnsupportedQuestion, match="without a price book"):
        present(ledger).window(WindowSpec(), START_MS, "cost", 0.98)
    for of in ("cost", "energy"):
        with pytest.raises(UnsupportedQuestion, match=f"this window measures {of}"):
            present(ledger).window(WindowSpec(gpu_weights=WEIGHTS), START_MS, of, 0.98, book=prices)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs a half_life"):
        WindowSpec(decay="slurm")
    with pytest.raises(ValueError, match="must divide a quarter of an hour"):
        WindowSpec(calc_period=400)


SLURM = shared_cases("vectors/schedulers.json", lambda document: document["slurm_accrual"]["cases"])


@pytest.mark.parametrize(
    "case", SLURM, ids=lambda case: f"{case.get('half_life_s')}s over {case.get('observed_at_s')}s"
)
def test_slurms_decay_is_slurms(ledgers: Ledgers, case: dict[str, float]) -> None:
    """One GPU is held for the job's time. The billing factor of the vector multiplies its usage."""
    ledger = ledgers(NODES)
    until, at = START_MS + round(case["job_runs_s"]) * 1000, START_MS + round(case["observed_at_s"]) * 1000
    facts = [pod_facts("d", START_MS, node="n2", queue_ref="kai:left")]
    rows = [
        interval(start, "g2", pod_holder("d"), span_ms=min(start + BUCKET_MS, until) - start)
        for start in range(START_MS, until, BUCKET_MS)
    ]
    assert not isinstance(ledger.append([batch(rows, facts, node="n2")], at + 60_000)[0], Exception)
    span = round(case["observed_at_s"])
    half_life, period = round(case["half_life_s"]), round(case["calc_period_s"])
    spec = WindowSpec(size=span, half_life=half_life, decay="slurm", calc_period=period)
    usage = present(ledger).window(spec, at, "allocated", 0.98).usage["left"] * case["billing"]
    assert usage / 1e6 == pytest.approx(case["slurm_raw_usage"], rel=1e-9)
    exact = present(ledger).window(WindowSpec(size=span, half_life=half_life), at, "allocated", 0.98).usage["left"]
    assert exact * case["billing"] / 1e6 == pytest.approx(case["exact_decayed_integral"], rel=1e-9)


@pytest.mark.parametrize(
    "case",
    shared_cases("vectors/schedulers.json", lambda document: document["slurm_decay"]["cases"]),
)
def test_weights_by_age_are_exact_and_those_of_slurm(case: dict[str, float]) -> None:
    half_life, now_ms = round(case["half_life_s"]), START_MS + round(case["elapsed_s"]) * 1000
    assert weights_by_period([START_MS], now_ms, half_life) == [pytest.approx(case["slurm_multiplier"], rel=1e-9)]
    assert age_weight(START_MS, now_ms, half_life) == pytest.approx(case["exact_multiplier"], rel=1e-12)


# --- arithmetic: decay weights, spans that are cut and joined, divided sets, sums of rows -------


@given(
    start=st.integers(0, BUCKET_MS - 1),
    length=st.integers(1, BUCKET_MS),
    half_life=st.integers(1, 10**7),
    age=st.integers(0, BUCKET_MS),
)
def test_the_mean_weight_is_the_integral(start: int, length: int, half_life: int, age: int) -> None:
    end = start + length
    x = length / (half_life * 1000)
    exact = math.pow(2.0, -age / (half_life * 1000)) * -math.expm1(-math.log(2) * x) / (math.log(2) * x)
    assert math.isclose(factor(start, end, end + age, half_life), exact, rel_tol=4e-15)
    assert 0 <= factor(start, end, end + age, half_life) <= 1


def test_a_window_forgets_by_halves() -> None:
    assert age_weight(0, 3_600_000, 3600) == 0.5
    assert combine([1000, 1000], age_weights([0, 3_600_000], 3_600_000, 3600)) == 1500
    assert combine([10**30, 1], age_weights([0, 1], 5, None)) == 10**30 + 1


SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda s: (min(s), max(s))), max_size=8)


@given(left=SPANS, right=SPANS)
def test_span_arithmetic_is_arithmetic_of_instants(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    def instants(spans: list[tuple[int, int]]) -> set[int]:
        return {at for start, end in spans for at in range(start, end)}

    a, b = union(left), union(right)
    assert instants(a) == instants(left)
    assert instants(intersect(a, b)) == instants(left) & instants(right)
    assert instants([s for span in a for s in subtract(span, b)]) == instants(left) - instants(right)
    assert all(x[1] < y[0] for x, y in pairwise(a))


WIDTH = len(AccountVector._fields)
ROW = st.lists(st.integers(0, 10**6), min_size=WIDTH, max_size=WIDTH)


@given(rows=st.lists(ROW, min_size=1, max_size=5), span=st.integers(1, 5000), cuts=st.sets(st.integers(0, 5000)))
def test_parts_of_a_set_are_never_negative_and_add_up(rows: list[list[int]], span: int, cuts: set[int]) -> None:
    whole = [AccountVector(*row) for row in rows]
    # Fill the last row up, so that the set is full.
    missing = -sum(sum(cells[:ACCOUNT_CELLS]) for cells in whole) % (span * 1000)
    whole.append(AccountVector(unheld_us=missing))
    capacity = sum(sum(cells[:ACCOUNT_CELLS]) for cells in whole)
    edges = [0, *sorted(cut for cut in cuts if 0 < cut < span), span]
    pieces = [part(whole, span, a, b) for a, b in pairwise(edges)]
    for (a, b), piece in zip(pairwise(edges), pieces, strict=True):
        assert all(value >= 0 for cells in piece for value in cells)
        assert sum(sum(cells[:ACCOUNT_CELLS]) for cells in piece) == capacity // span * (b - a)
    assert [add(row) for row in zip(*pieces, strict=True)] == whole


FIGURE = st.one_of(st.just(0), st.integers(0, BUCKET_MS * 200))


@given(st.lists(st.lists(FIGURE, min_size=WIDTH, max_size=WIDTH), min_size=1, max_size=20), st.floats(0, 2))
def test_figures_of_many_rows_are_those_of_each(rows: list[list[int]], weight: float) -> None:
    found = figures(np.array(rows, dtype=np.int64), [weight] * len(rows))
    for row, values in zip(rows, found.tolist(), strict=True):
        cells = AccountVector(*row)
        decaying = (sum(cells[:3]), cells.busy_us, cells.energy_uj, cells.down_us)
        plain = (sum(cells[:3]), cells.unheld_us, cells.down_us, cells.unknown_us, cells.energy_blind_us)
        assert values == [*(term(value, weight) for value in decaying), *plain]


def test_sums_go_by_equal_keys() -> None:
    keys = np.array([[1, 7], [2, 7], [1, 7]], dtype=np.int64)
    distinct, sums = sum_by_key(keys, np.array([[1, 10], [2, 20], [3, 30]], dtype=np.int64))
    assert (distinct.tolist(), sums.tolist()) == ([[1, 7], [2, 7]], [[4, 40], [2, 20]])
