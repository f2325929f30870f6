"""Bills and ranks from the relation of usage equal those from charges."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.billing.charge import ALLOCATED, Charge
from accountant.billing.cost_allocation import billed_tables, bills
from accountant.billing.statement_breakdown import DIMENSIONS
from accountant.billing.statements import build
from accountant.billing.usage_pricing import charge_table
from accountant.ledger.protocols import Facts
from accountant.ledger.usage import ACCOUNTS
from accountant.prices.price_book import Billing, IdlePolicy, PriceBook
from accountant.reports import report_breakdowns, savings_hints
from accountant.reports.job_ranking import BilledJobs
from accountant.reports.report_breakdowns import BY_JOB
from accountant.reports.savings_hints import by_name
from accountant.wire.policy_models import Policy, QueuePolicy
from agent.wire import Holder
from tests.hypothesis_examples import examples
from tests.ledger.busy_ledger import BOOK, HAND, ROWS, busy_ledger
from tests.ledger.conftest import MINUTE, NOW_MS, START_MS, Hand, booked
from tests.moments import present
from tests.usage_relation import figures_of

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
    cuts=st.sets(st.sampled_from(sorted(DIMENSIONS)), min_size=2, max_size=3),
    book=st.sampled_from(BOOKS),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=examples(2, 30))
def test_bills_add_up_to_the_charges(rows, cuts, book, order):
    several = [DIMENSIONS[cut] for cut in sorted(cuts)]
    span = (START_MS + order.randrange(3) * 7_001, START_MS + 200 * MINUTE)
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
            batch = HAND.batch(*idle, cluster=cluster, node=node, epoch=node)
            assert booked(ledger, HAND.now_ms, batch).quarantined == 0
        with ledger.moment(*span) as moment:
            expected_sums = by_account(charge_table(moment, book, *span, (), None, ZONE).charges())
            together = [table.by_line() for table in billed_tables(moment, book, *span, several, ZONE)]
            for by, lines in zip(several, together, strict=True):
                alone = bills(moment, book, *span, by, ZONE)
                assert by_account(alone) == by_account(lines.charges) == expected_sums
                assert build(alone, book, (), *span, ZONE) == build(lines.charges, book, (), *span, ZONE)
                assert alone == bills(present(ledger), book, *span, by, ZONE)


@pytest.mark.thorough
@given(rows=ROWS, cuts=st.sets(st.integers(1, 199), max_size=2), order=st.randoms(use_true_random=False))
@settings(max_examples=examples(4, 30))
def test_columns_and_charges_rank_alike(rows, cuts, order):
    with busy_ledger(rows, order) as ledger:
        span = (START_MS, START_MS + 200 * MINUTE)
        edges = sorted({*span, *(START_MS + cut * MINUTE for cut in cuts)})
        with ledger.moment(*span) as moment:
            low, high = edges[0], edges[-1] + order.randrange(60) * MINUTE
            hourly = moment.usage((low, high), (*savings_hints.BY_NAME, "hour"), None, ZONE)
            most: dict[tuple[str, ...], tuple[int, int]] = {}
            for line in hourly.lines():
                key, accounts = tuple(line.key.values())[:-1], line.accounts_gpu_us
                held, busy = most.get(key, (0, 0))
                if accounts.allocated:
                    most[key] = max(held, accounts.allocated), max(busy, accounts.busy)
            peaks = savings_hints.peaks_of(hourly)
            assert {key: (peak.held_us, peak.busy_us) for key, peak in peaks.items()} == most

            (billed,) = billed_tables(moment, BOOK, *span, (BY_JOB,))
            held = [
                charge for charge in charge_table(moment, BOOK, *span, BY_JOB).charges() if charge.account in ALLOCATED
            ]
        for team in (None, "red", "nobody"):
            found = BilledJobs.of(billed).ranked(team)
            mine = [charge for charge in held if team in (None, charge.key[0])]
            by_job: dict[tuple[str, ...], list[Charge]] = defaultdict(list)
            for charge in mine:
                by_job[*charge.key[:3], charge.key[4]].append(charge)
            # Each job's time is quantified by itself.
            rows = [row for _, several in sorted(by_job.items()) for row in report_breakdowns.jobs(several)]
            assert len(found) == len(rows)
            assert found.users() == (report_breakdowns.users(mine) if any(c.key[3] for c in mine) else [])
            dearest = sorted(rows, key=lambda job: (-job.figures.cost, -job.figures.accounts.allocated, by_name(job)))
            assert found.dearest(3) == dearest[:3]
            assert found.dearest(99) == dearest
            assert found.wasteful(99) == sorted(
                (job for job in rows if job.figures.accounts.allocated_idle),
                key=lambda job: (-job.figures.idle_cost, -job.figures.accounts.allocated_idle, by_name(job)),
            )
            assert {*map(by_name, found.hardly_used(99))} <= {*map(by_name, found.wasteful(99))}
            assert found.candidates(BOOK, span[1]) == savings_hints.candidates(mine, BOOK, span[1])
            assert found.named({("ns-1", "Job/j1")}) == [j for j in rows if (j.namespace, j.job) == ("ns-1", "Job/j1")]


@pytest.mark.parametrize(
    ("zone", "changes", "second"),
    [
        ("Australia/Lord_Howe", "2026-04-04T15:00", ["2026-04-05T01+10:30"]),
        ("America/Santiago", "2026-04-05T03:00", ["2026-04-04T23-04:00"]),
        ("Europe/Berlin", "2025-10-26T01:00", ["2025-10-26T02+01:00"]),
        ("Asia/Kathmandu", "2026-04-05T03:00", []),
    ],
)
def test_an_hour_that_the_clocks_repeat_holds_no_more_gpus_than_any_other(ledger, zone, changes, second):
    start = round(datetime.fromisoformat(f"{changes}+00:00").timestamp() * 1000) - 180 * MINUTE
    span = (start, start + 360 * MINUTE)
    hand = Hand(start)
    assert booked(ledger, NOW_MS, hand.batch(*(hand.row(n + 1, n * 15, n * 15 + 15) for n in range(24)))).stored == 24
    with ledger.moment(*span) as moment:
        by_hour = figures_of(moment.usage(span, ("hour",), None, zone, ()))
        peaks = savings_hints.peaks_of(moment.usage(span, (*savings_hints.BY_NAME, "hour"), None, zone, ()))
    assert [name for (name,) in by_hour if len(name) > len("2026-10-01T13")] == second, "a line of its own"
    assert max(sum(row) - row[ACCOUNTS.index("down")] for row in by_hour.values()) == 60 * MINUTE * 1000
    assert [(peak.held_us, peak.busy_us) for peak in peaks.values()] == [(60 * MINUTE * 1000, 30 * MINUTE * 1000)]
