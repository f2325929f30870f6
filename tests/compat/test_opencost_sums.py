"""Whatever is asked for, allocations and idle are the cost of the capacity: nothing is made, lost or moved twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.billing.usage_pricing import ACCOUNTS, BILLED, Charge
from accountant.compat.opencost_api import Allocation, PodSeen, accumulated, aggregated, allocations, share_idle
from accountant.compat.opencost_query import KEYS
from accountant.ledger.usage_columns import Place
from accountant.prices.price_book import Price, PriceRow
from accountant.wire.policy_models import IDLE
from tests.effort import examples

HOUR_MS = 3_600_000
HOUR_US = HOUR_MS * 1_000
ROW = PriceRow.model_validate(
    {"id": "r", "model": "H100", "price": 1, "per": "gpu-hour", "valid_from": "2026-01-01", "source": "s",
     "as_of": "2026-01-01", "basis": "gpu-only"}
)  # fmt: skip
PRICES = [Price(f"p{i}", Decimal(text), Decimal(text), ROW, 0, 2**50) for i, text in enumerate(("2.5", "0.333", "0"))]


@st.composite
def books(draw: st.DrawFn) -> list[Charge]:
    """Charges of an hour, in the form and the order of accountant.billing.usage_pricing."""
    found = []
    for _ in range(draw(st.integers(0, 12))):
        account = draw(st.sampled_from(ACCOUNTS))
        where = (draw(st.sampled_from(["c1", "c2"])), draw(st.sampled_from(["n1", "n2", "n3"])))
        held = account in ("busy", "allocated_idle", "allocated_unknown")
        team, job = draw(st.sampled_from([("a", "Job/x"), ("b", "Deployment/y"), ("__unassigned__", "Pod/p0")]))
        names = ("ns", draw(st.sampled_from(["p0", "p1"])), "main", job, team) if held else ("", "", "", "", IDLE)
        model = draw(st.sampled_from(["H100", "A100"]))
        row = draw(st.sampled_from([*PRICES, None])) if account in BILLED else None
        key = (*where, *names, draw(st.sampled_from(["", "1g.10gb"])), draw(st.sampled_from(["GPU-1", "GPU-2"])))
        found.append(Charge(key, Place(model, "", "", ""), account, draw(st.integers(1, HOUR_US)), row))
    return sorted(found, key=lambda charge: (charge.key, charge.account))


def of(found: Sequence[Allocation]) -> tuple[int, Fraction, dict[str, int]]:
    """Time, cost and unpriced time of all together; shared idle time counts where it went."""
    unpriced: dict[str, int] = {}
    for one in found:
        for model, gpu_us in one.unpriced.items():
            unpriced[model] = unpriced.get(model, 0) + gpu_us
    return sum(sum(one.time.values()) for one in found), sum((one.cost for one in found), Fraction(0)), unpriced


def truth(charges: Sequence[Charge]) -> tuple[int, Fraction, dict[str, int]]:
    billed = [charge for charge in charges if charge.billed]
    unpriced: dict[str, int] = {}
    for charge in billed:
        if charge.row is None:
            unpriced[charge.place.gpu_model] = unpriced.get(charge.place.gpu_model, 0) + charge.gpu_us
    cost = sum((Fraction(charge.row.price) * charge.gpu_us for charge in billed if charge.row), Fraction(0))
    return sum(charge.gpu_us for charge in billed), cost / HOUR_US, unpriced


@settings(max_examples=examples(20, 120), deadline=None)
@given(
    charges=books(),
    keys=st.lists(st.sampled_from(sorted(KEYS)), min_size=1, max_size=3),
    split=st.sampled_from(["", "node", "cluster"]),
    shared=st.booleans(),
    by_node=st.booleans(),
)
def test_allocations_and_idle_are_the_capacitys_cost(
    charges: list[Charge], keys: list[str], split: str, shared: bool, by_node: bool
) -> None:
    found = allocations(charges, {}, 0, HOUR_MS)
    if shared:
        before = {at: one.gpu_us for at, one in enumerate(one for one in found if not one.idle)}
        found = share_idle(found, by_node=by_node)
        assert {at: one.gpu_us for at, one in enumerate(one for one in found if not one.idle)} == before
        # Idle is left only where nobody paid for anything.
        for idle in (one for one in found if one.idle):
            place = ("cluster", "node")[: 1 + by_node]
            there = [one for one in found if all(one.properties[n] == idle.properties[n] for n in place)]
            assert all(one.idle or one.cost == 0 for one in there)
    named = aggregated(found, keys, split_idle=split)
    assert of(list(named.values())) == truth(charges)
    assert list(named) == sorted(named)
    assert all(one.idle == name.endswith("__idle__") for name, one in named.items())


@settings(max_examples=examples(13, 80), deadline=None)
@given(steps=st.lists(books(), min_size=1, max_size=4), keys=st.sampled_from([("pod",), ("node", "team"), ("all",)]))
def test_steps_accumulate_to_the_whole_in_any_grouping(steps: list[list[Charge]], keys: tuple[str, ...]) -> None:
    sets = [
        aggregated(allocations(charges, {}, at * HOUR_MS, (at + 1) * HOUR_MS), keys) for at, charges in enumerate(steps)
    ]
    whole = accumulated(sets)
    assert of(list(whole.values())) == truth([charge for charges in steps for charge in charges])
    assert accumulated([accumulated(sets[:2]), accumulated(sets[2:])]) == whole
    for one in whole.values():
        assert one.efficiency is None or 0 <= one.efficiency <= 1


def held(gpu: str, account: str, gpu_us: int) -> Charge:
    key = ("c", "n", "ns", "p", "main", "Job/x", "t", "", gpu)
    return Charge(key, Place("H100", "", "", ""), account, gpu_us, PRICES[0])  # type: ignore[arg-type]


def test_efficiency_is_of_what_is_known() -> None:
    charges = [held("g", "busy", 30), held("g", "allocated_idle", 10), held("h", "allocated_unknown", 60)]
    (one,) = allocations(charges, {}, 0, 1)
    assert one.efficiency == Fraction(3, 4)
    assert replace(one, busy_us=0, known_us=0).efficiency is None


@pytest.mark.parametrize(
    ("bound", "ended", "span"),
    [
        (None, None, (0, 100)),
        (20, None, (20, 100)),
        (-50, 60, (0, 60)),
        (80, None, (0, 100)),  # it held a GPU for 30 ms of the window: cannot be true
        (60, 50, (0, 100)),
    ],
)
def test_a_pod_is_there_from_being_bound_to_its_end(
    bound: int | None, ended: int | None, span: tuple[int, int]
) -> None:
    seen = {("c", "ns", "p"): PodSeen(bound, ended, {})}
    (one,) = allocations([held("g", "busy", 30_000)], seen, 0, 100)
    assert (one.start_ms, one.end_ms) == span
