"""Columns of a grouping equal `usage` and `idle_phases`, and bills from them add up to the charges."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.billing.cost_allocation import bills, bills_by_grouping
from accountant.billing.statement_breakdown import DIMENSIONS, Cut
from accountant.billing.statements import build
from accountant.billing.usage_pricing import Charge, charges
from accountant.ledger.protocols import Facts
from accountant.ledger.usage_columns import UsageColumns
from accountant.prices.price_book import Billing, IdlePolicy, PriceBook
from accountant.wire.policy_models import Policy, QueuePolicy
from agent.wire import Holder
from tests.effort import examples
from tests.fakes.holdings import usage_columns_of_lines
from tests.ledger.busy import BOOK, HAND, ROWS, busy_ledger
from tests.ledger.conftest import MINUTE, START_MS

ZONE = "Asia/Kathmandu"
"""A zone whose days begin at a quarter past an hour of UTC."""
POLICIES = (
    IdlePolicy(),
    IdlePolicy(starting="cluster", gang_waiting="cluster"),
    IdlePolicy(unallocated="spread"),
    IdlePolicy(unallocated="spread", guaranteed="owner", starting="cluster"),
)
BOOKS: tuple[PriceBook | None, ...] = (
    None,
    *(BOOK.model_copy(update={"billing": Billing(idle=policy)}) for policy in POLICIES),
    BOOK.model_copy(update={"billing": Billing(shared_gpus="busy", idle=POLICIES[1])}),
)


def told_by(found: UsageColumns) -> dict[tuple[object, ...], list[int]]:
    rows = zip(found.stretch.tolist(), found.key.tolist(), found.place.tolist(), found.gpu_us.tolist(), strict=True)
    return {(stretch, found.keys[key], found.places[place]): cells for stretch, key, place, cells in rows}


def by_account(found: Iterable[Charge]) -> dict[tuple[str, str, str], int]:
    """GPU-µs by account, model and price, which do not depend on the policy."""
    sums: dict[tuple[str, str, str], int] = {}
    for charge in found:
        key = charge.account, charge.place.gpu_model, charge.bucket
        sums[key] = sums.get(key, 0) + charge.gpu_us
    return sums


@pytest.mark.thorough
@given(
    rows=ROWS,
    inside=st.sets(st.integers(1, 199), max_size=2),
    cuts=st.sets(st.sampled_from(sorted(DIMENSIONS)), min_size=2, max_size=3),
    book=st.sampled_from(BOOKS),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=examples(2, 60), deadline=None)
def test_columns_are_the_lines_of_usage_and_bills_add_up_to_the_charges(
    rows: list[tuple[int, int, int, int, bool]],
    inside: set[int],
    cuts: set[Cut],
    book: PriceBook | None,
    order: random.Random,
) -> None:
    several = [DIMENSIONS[cut] for cut in sorted(cuts)]
    span = (START_MS + order.randrange(3) * 7_001, START_MS + 200 * MINUTE)
    edges = sorted({*span, *(START_MS + cut * MINUTE for cut in inside if START_MS + cut * MINUTE > span[0])})
    with busy_ledger(rows, order) as ledger:
        queues = (QueuePolicy(name="left", team="lab", deserved=2.0), QueuePolicy(name="r", team="red", deserved=0.5))
        ledger.put_policy(Policy(queues=queues), START_MS + 120 * MINUTE)
        facts = [
            ("prod", HAND.fact(
                1_000 + pod, f"p{pod}", node="n2" if pod == 4 else "n1", namespace=f"ns-{pod % 2}", name=f"p{pod}",
                workload=f"{'PyTorchJob' if pod % 3 else 'Job'}/j{pod % 2}", created_ms=START_MS,
                scheduled_ms=START_MS + pod * MINUTE, started_ms=START_MS + (40 + 31 * pod) * MINUTE,
            ))
            for pod in range(5)
        ]  # fmt: skip
        ledger.observe(Facts(pods=tuple(facts)), HAND.now_ms)
        for cluster, node in (("prod", "n2"), ("other", "n3")):
            idle = [
                HAND.row(
                    seq, 15 * seq, 15 * seq + order.randrange(5, 16), f"gpu-{node}-{seq % 2}", gpu_model="H100",
                    **({"holder": None, "allocated_us": 0, "busy_us": None} if seq % 3 else
                       {"holder": Holder("pod", "p4", "ns-1", "p4")}),
                )
                for seq in range(1, 10)
            ]  # fmt: skip
            (receipt,) = ledger.append([HAND.batch(*idle, cluster=cluster, node=node, epoch=node)], HAND.now_ms)
            assert not isinstance(receipt, Exception)
            assert receipt.quarantined == 0
        with ledger.moment(*span) as moment:
            expected = usage_columns_of_lines(moment.usage, moment.idle_phases, edges, several, ZONE)
            for found, other in zip(moment.usage_columns(edges, several, ZONE), expected, strict=True):
                assert told_by(found) == told_by(other)
                assert list(found.keys) == sorted(set(found.keys))
            expected_sums = by_account(charges(moment, book, *span, (), None, ZONE))
            together = bills_by_grouping(moment, book, *span, several, ZONE)
            for by, lines in zip(several, together, strict=True):
                alone = bills(moment, book, *span, by, ZONE)
                assert by_account(alone) == by_account(lines.charges) == expected_sums
                assert build(alone, book, (), *span, ZONE) == build(lines.charges, book, (), *span, ZONE)
                assert alone == bills(ledger, book, *span, by, ZONE)
