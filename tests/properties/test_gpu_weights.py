"""Windows that do not count every microsecond alike: cost, weights of models, shards, and Slurm's way to decay.

The laws of tests/properties/test_windows.py hold for them too: equal to the formula over a plain scan, bit-equal
whatever the order of arrival; and they meet the other answers of the ledger exactly."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from msgspec import structs

from accountant.billing.usage_pricing import ALLOCATED, charges
from accountant.core.errors import UnsupportedQuestion
from accountant.core.window_decay import factor, reference_ms, term
from accountant.ledger.protocols import Down, Facts, NodeFacts
from accountant.prices.price_book import PriceBook, load
from accountant.storage.duckdb_ledger import DuckLedger
from accountant.wire.policy_models import UNASSIGNED, Measure, UsageWindow, WindowSpec
from gputally.base.units import BUCKET_MS
from tests.effort import examples
from tests.properties.streams import QUEUE_OF, SPAN_MS, START_MS, Stream, batches, book, inside, kept, streams, total
from tests.shelf import shared_cases
from tests.usage_records import batch, interval, pod_facts, pod_holder

FEW = settings(
    max_examples=examples(3, 20),
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking a few hundred rows helps nobody
    suppress_health_check=list(HealthCheck),
)
CHANGE_MS = START_MS + BUCKET_MS + 400_000
MODELS = {"g1": "NVIDIA H100 80GB HBM3", "g2": "NVIDIA A100-SXM4-40GB"}
ROW = "  - {{id: {}, model: {}, price: '{}', {}, per: gpu-hour, source: s, as_of: 2026-01-01, basis: gpu-only}}\n"
WEIGHTS = {"H100": Decimal(4), "A100-40GB": Decimal("2.5")}
NODES = Facts(
    nodes=(
        NodeFacts("c", "n1", shard="a", pool="p", down=(Down(START_MS + 400_123, START_MS + 1_500_777, "cordoned"),)),
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
        + ROW.format("h", "H100", "4.123456", from_to)
        + ROW.format("h2", "H100", "6.1", "valid_from: '2026-10-01T00:21:40+00:00'")
        + ROW.format("a", "A100", "2.5", "valid_from: 2026-01-01")
    )
    return load(path)


def modelled(found: list[Stream]) -> list[Stream]:
    """Gives the second GPU another model."""
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
                    own[low, reference] += term(cells.allocated_us, factor(begin, end, reference, half_life))
    sums: dict[str, Fraction] = defaultdict(Fraction)
    for (queue, weight), own in terms.items():
        in_order = [(reference, value) for (_, reference), value in sorted(own.items())]
        sums[queue] += weight * total(in_order, at, half_life)
    return {queue: round(value) for queue, value in sums.items()}


def told(window: UsageWindow) -> dict[str, int]:
    assert window.usage["top"] == window.usage["left"] + window.usage["right"]
    return {"left": window.usage["left"], "right": window.usage["right"], UNASSIGNED: window.unassigned}


@pytest.mark.thorough
@FEW
@given(
    found=streams(),
    half_life=st.sampled_from([None, 60, 3600]),
    at=st.integers(1, SPAN_MS + BUCKET_MS),
    size=st.integers(1, 2 * SPAN_MS // 1000),
    order=st.randoms(use_true_random=False),
)
def test_cost_and_weights_are_the_formula_whatever_the_order(
    ledgers: Callable[..., DuckLedger],
    prices: PriceBook,
    found: list[Stream],
    half_life: int | None,
    at: int,
    size: int,
    order: random.Random,
) -> None:
    found, at_ms, start = modelled(found), START_MS + at, START_MS + at - size * 1000
    plain = WindowSpec(size=size, half_life=half_life)
    weighted = WindowSpec(size=size, half_life=half_life, gpu_weights=WEIGHTS)
    first, second = ledgers(NODES), ledgers(NODES)
    book(first, [one for stream in found for one in batches(stream, 4)])
    queues = [batches(stream, 1) for stream in found]
    while any(queues):
        book(second, [order.choice([queue for queue in queues if queue]).pop(0)])
        if order.random() < 0.3:
            second.window(weighted, at_ms, "allocated", 0.98)
            second.window(plain, at_ms, "cost", 0.98, book=prices)
        if order.random() < 0.1:
            second.checkpoint()
    asked: tuple[tuple[WindowSpec, Measure], ...] = ((weighted, "allocated"), (weighted, "busy"), (plain, "cost"))
    for spec, of in asked:
        one = first.window(spec, at_ms, of, 0.98, book=prices)
        assert one == second.window(spec, at_ms, of, 0.98, book=prices), of
        assert one == first.window(spec, at_ms, of, 0.98, book=prices), "remembered or not"
    cuts = [CHANGE_MS] if start < CHANGE_MS < at_ms else []
    cost = first.window(plain, at_ms, "cost", 0.98, book=prices)
    unit = Fraction(10**9, 3_600_000_000)

    def price(model: str, at_ms: int) -> Fraction:
        later = Fraction("6.1") if at_ms >= CHANGE_MS else Fraction("4.123456")
        return unit * (later if "H100" in model else Fraction("2.5"))

    nothing = {"left": 0, "right": 0, UNASSIGNED: 0}
    assert told(cost) == nothing | expected(found, start, at_ms, half_life, price, cuts)
    assert (cost.unit, cost.price_book_version) == ("1e-9 EUR", prices.version)
    heavy = first.window(weighted, at_ms, "allocated", 0.98)
    weigh = lambda model, _: Fraction(4) if "H100" in model else Fraction("2.5")  # noqa: E731
    assert told(heavy) == nothing | expected(found, start, at_ms, half_life, weigh, [])
    assert (heavy.unit, heavy.gpu_weights) == ("weighted_gpu_us", WEIGHTS)
    straight = first.window(plain, at_ms, "allocated", 0.98)
    assert (heavy.watermark_ms, heavy.coverage) == (straight.watermark_ms, straight.coverage)
    assert (cost.watermark_ms, cost.coverage) == (straight.watermark_ms, straight.coverage)
    # A lens that changes nothing changes nothing, to the last bit.
    same = first.window(plain.model_copy(update={"gpu_weights": {"MI300X": Decimal(7)}}), at_ms, "allocated", 0.98)
    assert same.model_copy(update={"unit": "gpu_us", "gpu_weights": {}}) == straight
    if half_life is None:
        ones = [charge for charge in charges(first, prices, start, at_ms, ("queue",)) if charge.account in ALLOCATED]
        for queue in nothing:
            exact = sum(
                (unit * Fraction(c.row.price) * c.gpu_us for c in ones if c.row and c.key == (queue,)), Fraction(0)
            )
            assert told(cost)[queue] == round(exact)
        parts = [first.window(plain, at_ms, "allocated", 0.98, shard=shard) for shard in ("a", "b", "")]
        assert straight.capacity == sum(part.capacity for part in parts)
        assert straight.usage == {queue: sum(part.usage[queue] for part in parts) for queue in straight.usage}


def test_time_without_a_price_is_neither_usage_nor_covered(
    ledgers: Callable[..., DuckLedger], prices: PriceBook
) -> None:
    ledger = ledgers(NODES)
    rows = [
        interval(START_MS, gpu, pod_holder("d"), span_ms=60_000, gpu_model=model, busy_us=1)
        for gpu, model in (("g1", "NVIDIA H100 80GB HBM3"), ("g2", "MI300X"))
    ]
    book(ledger, [batch(rows, node="n2")])
    window = ledger.window(WindowSpec(size=60), START_MS + 60_000, "cost", 0.98, book=prices)
    assert (window.unassigned, window.capacity) == (round(Fraction("4.123456") * 10**9 / 60),) * 2
    assert window.coverage == 0.5


def test_what_cannot_be_asked_is_refused(ledgers: Callable[..., DuckLedger], prices: PriceBook) -> None:
    ledger = ledgers(NODES)
    with pytest.raises(UnsupportedQuestion, match="without a price book"):
        ledger.window(WindowSpec(), START_MS, "cost", 0.98)
    for of in ("cost", "energy"):
        with pytest.raises(UnsupportedQuestion, match=f"this window measures {of}"):
            ledger.window(WindowSpec(gpu_weights=WEIGHTS), START_MS, of, 0.98, book=prices)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs a half_life"):
        WindowSpec(decay="slurm")
    with pytest.raises(ValueError, match="divides a quarter of an hour"):
        WindowSpec(calc_period=400)


SLURM = shared_cases("vectors/schedulers.json", lambda document: document["slurm_accrual"]["cases"])


@pytest.mark.parametrize(
    "case", SLURM, ids=lambda case: f"{case.get('half_life_s')}s over {case.get('observed_at_s')}s"
)
def test_slurms_decay_is_slurms(ledgers: Callable[..., DuckLedger], case: dict[str, float]) -> None:
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
    usage = ledger.window(spec, at, "allocated", 0.98).usage["left"] * case["billing"]
    assert usage / 1e6 == pytest.approx(case["slurm_raw_usage"], rel=1e-9)
    exact = ledger.window(WindowSpec(size=span, half_life=half_life), at, "allocated", 0.98).usage["left"]
    assert exact * case["billing"] / 1e6 == pytest.approx(case["exact_decayed_integral"], rel=1e-9)
