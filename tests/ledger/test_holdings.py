"""Columns of held time equal `usage`, and jobs are ranked by them as by single charges."""

from __future__ import annotations

import random
from collections import defaultdict
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.billing.cost_allocation import billed_columns
from accountant.billing.usage_pricing import ALLOCATED, Charge, charges
from accountant.ledger.usage_columns import Hours
from accountant.reports import report_breakdowns, savings_hints
from accountant.reports.job_ranking import BilledJobs
from accountant.reports.report_breakdowns import BY_JOB
from accountant.reports.savings_hints import by_name
from accountant.storage.duckdb_ledger import DuckLedger
from accountant.wire.usage_cost_and_job_models import UsageLine
from tests.effort import examples
from tests.fakes.holdings import peaks_of_lines
from tests.ledger.busy import BOOK, ROWS, busy_ledger
from tests.ledger.conftest import MINUTE, NOW_MS, START_MS, Hand


def told_by(found: Hours) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Busy, idle and unknown time by team, queue and hour."""
    times = zip(found.busy_us.tolist(), found.idle_us.tolist(), found.unknown_us.tolist(), strict=True)
    sums: dict[tuple[str, ...], tuple[int, ...]] = {}
    for owner, hour, time in zip(found.owner.tolist(), found.hour.tolist(), times, strict=True):
        key = (*found.owners[owner], found.hours[hour])
        sums[key] = tuple(a + b for a, b in zip(sums.get(key, (0, 0, 0)), time, strict=True))
    return dict(sorted(sums.items()))


def told_of(lines: list[UsageLine]) -> dict[tuple[str, ...], tuple[int, ...]]:
    return {
        tuple(line.key.values()): (a.busy, a.allocated_idle, a.allocated_unknown)
        for line in lines
        if (a := line.accounts_gpu_us).allocated
    }


def capacity_of(lines: list[UsageLine]) -> dict[str, int]:
    found: dict[str, int] = {}
    for line in lines:
        accounts = line.accounts_gpu_us
        found[line.key["hour"]] = found.get(line.key["hour"], 0) + accounts.total - accounts.down
    return found


@pytest.mark.thorough
@given(rows=ROWS, cuts=st.sets(st.integers(1, 199), max_size=2), order=st.randoms(use_true_random=False))
@settings(max_examples=examples(4, 30), deadline=None)
def test_columns_and_charges_rank_alike(
    rows: list[tuple[int, int, int, int, bool]], cuts: set[int], order: random.Random
) -> None:
    with busy_ledger(rows, order) as ledger:
        span = (START_MS, START_MS + 200 * MINUTE)
        edges = sorted({*span, *(START_MS + cut * MINUTE for cut in cuts)})
        with ledger.moment(*span) as moment:
            low, high = edges[0], edges[-1] + order.randrange(60) * MINUTE
            by_hour = moment.hours(low, high, "Asia/Kathmandu")
            lines = moment.usage(low, high, ("team", "queue", "hour"), None, "Asia/Kathmandu")
            assert list(told_by(by_hour).items()) == sorted(told_of(lines).items())
            capacity = dict(zip(by_hour.hours, by_hour.capacity_us, strict=True))
            assert capacity | capacity_of(lines) == capacity
            assert sum(capacity.values()) == sum(capacity_of(lines).values())

            jobs = frozenset({("ns-0", "Job/j0"), ("ns-1", "Job/j1"), ("ns-1", "Job/j2")})
            expected_peaks = peaks_of_lines(moment.usage, low, high, jobs, "Asia/Kathmandu")
            assert moment.peaks(low, high, jobs, "Asia/Kathmandu") == expected_peaks

            (billed,) = billed_columns(moment, BOOK, *span, (BY_JOB,))
            held = [charge for charge in charges(moment, BOOK, *span, BY_JOB) if charge.account in ALLOCATED]
        for team in (None, "red", "nobody"):
            found = BilledJobs.of(billed).ranked(team)
            mine = [charge for charge in held if team in (None, charge.key[0])]
            by_job: dict[tuple[str, ...], list[Charge]] = defaultdict(list)
            for charge in mine:
                by_job[*charge.key[:3], charge.key[4]].append(charge)
            # Each job's time is quantified by itself.
            rows = [row for _, several in sorted(by_job.items()) for row in report_breakdowns.jobs(several, None)]
            assert len(found) == len(rows)
            assert found.users() == (report_breakdowns.users(mine, None) if any(c.key[3] for c in mine) else [])
            dearest = sorted(rows, key=lambda job: (-job.figures.cost, -job.figures.accounts.allocated, by_name(job)))
            assert found.dearest(3) == dearest[:3]
            assert found.dearest(99) == dearest
            assert found.wasteful(99) == sorted(
                (job for job in rows if job.figures.accounts.allocated_idle),
                key=lambda job: (-job.figures.idle_cost, -job.figures.accounts.allocated_idle, by_name(job)),
            )
            assert {*map(by_name, found.hardly_used(99))} <= {*map(by_name, found.wasteful(99))}
            assert found.candidates(BOOK, span[1]) == savings_hints.candidates(mine, BOOK, None, span[1])
            assert found.named({("ns-1", "Job/j1")}) == [j for j in rows if (j.namespace, j.job) == ("ns-1", "Job/j1")]


@pytest.mark.parametrize(
    ("zone", "changes", "length_min"),
    [
        ("Australia/Lord_Howe", "2026-04-04T15:00", 90),
        ("America/Santiago", "2026-04-05T03:00", 120),
        ("Europe/Berlin", "2025-10-26T01:00", 120),
        ("Asia/Kathmandu", "2026-04-05T03:00", 60),
    ],
)
def test_an_hour_that_the_clocks_repeat_holds_no_more_gpus_than_any_other(
    ledger: DuckLedger, zone: str, changes: str, length_min: int
) -> None:
    start = round(datetime.fromisoformat(f"{changes}+00:00").timestamp() * 1000) - 180 * MINUTE
    span = (start, start + 360 * MINUTE)
    hand = Hand(start)
    receipts = ledger.append([hand.batch(*(hand.row(n + 1, n * 15, n * 15 + 15) for n in range(24)))], NOW_MS)
    assert getattr(receipts[0], "stored", None) == 24
    with ledger.moment(*span) as moment:
        hours = moment.hours(*span, zone)
        assert max(hours.capacity_us) == length_min * MINUTE * 1000
        peaks = moment.peaks(*span, frozenset({("vision", "Pod/train-0")}), zone)
        expected = peaks_of_lines(moment.usage, *span, frozenset({("vision", "Pod/train-0")}), zone)
    assert peaks == expected
    assert [(peak.held_us, peak.busy_us) for peak in peaks.values()] == [(60 * MINUTE * 1000, 30 * MINUTE * 1000)]
