"""Columns of what was held say what `usage` says, and jobs are ranked by them as by charges looked at one by one."""

from __future__ import annotations

import random
from collections import defaultdict
from datetime import datetime
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.billing.costs import charges
from accountant.ledger.usage_columns import PRICED_BY, Hours
from accountant.reports import job_ranking
from accountant.reports.report_sections import BY_JOB
from accountant.storage.duckdb_ledger import DuckLedger
from accountant.wire.usage_models import Dimension, UsageLine
from tests.effort import examples
from tests.fakes.holdings import peaks_of_lines
from tests.ledger.busy import BOOK, ROWS, busy_ledger
from tests.ledger.conftest import MINUTE, NOW_MS, START_MS, Hand

BY: tuple[Dimension, ...] = ("team", "namespace", "job", "cluster", "user", *PRICED_BY)


def told_by(found: Hours) -> dict[tuple[str, ...], tuple[int, ...]]:
    """By team, queue and hour: busy, idle, unknown."""
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
            held = moment.held(edges)
            found: dict[tuple[object, ...], list[int]] = defaultdict(lambda: [0, 0, 0])
            names = zip(held.stretch, held.team, held.job, held.cluster, held.user, held.place, strict=True)
            times = zip(held.busy_us, held.idle_us, held.unknown_us, strict=True)
            for (stretch, team, job, cluster, user, place), time in zip(names, times, strict=True):
                key = (
                    int(stretch), held.teams[team], *held.jobs[job], held.clusters[cluster], held.users[user],
                    *held.places[place],
                )  # fmt: skip
                found[key] = [a + int(b) for a, b in zip(found[key], time, strict=True)]
            expected = {
                (number, *line.key.values()): [a.busy, a.allocated_idle, a.allocated_unknown]
                for number, stretch_ms in enumerate(pairwise(edges))
                for line in moment.usage(*stretch_ms, BY)
                if (a := line.accounts_gpu_us).allocated
            }
            assert {key: time for key, time in found.items() if any(time)} == expected

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

            edges = [span[0], *BOOK.cuts(*span), span[1]]
            held = moment.held(edges)
            prices = [[BOOK.unit_price(p.gpu_model, at, *p[1:]) for p in held.places] for at in edges[:-1]]
            slow_of = charges(moment, BOOK, *span, BY_JOB)
        for team in (None, "red", "nobody"):
            fast, slow = job_ranking.ranking(held, prices, team), job_ranking.of_charges(slow_of, team)
            assert len(fast) == len(slow)
            assert fast.users() == slow.users()
            assert fast.dearest(3) == slow.dearest(3) == slow.dearest(99)[:3]
            assert fast.wasteful(3) == slow.wasteful(3)
            assert fast.hardly_used(3) == slow.hardly_used(3)
            assert fast.candidates(BOOK, span[1]) == slow.candidates(BOOK, span[1])
            assert fast.named({("ns-1", "Job/j1")}) == slow.named({("ns-1", "Job/j1")})


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
