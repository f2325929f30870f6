"""Columns of what was held say what `usage` says, and jobs are ranked by them as by charges looked at one by one."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.books.costs import PRICED_BY, charges
from accountant.books.held import Hours
from accountant.ledger import Down, Facts, NamespaceFacts, NodeFacts
from accountant.prices.book import PriceBook
from accountant.reports import ranking
from accountant.reports.sections import BY_JOB
from accountant.store import DuckLedger, open_ledger
from accountant.wire import Dimension, Policy, QueuePolicy, UsageLine
from agent.clock import VirtualClock
from agent.wire import Holder
from tests.effort import examples
from tests.fakes.holdings import peaks_of_lines
from tests.fresh import fresh
from tests.ledger.conftest import MINUTE, START_MS, Hand

HAND = Hand(now_ms=START_MS + 300 * MINUTE)
BY: tuple[Dimension, ...] = ("team", "namespace", "job", "cluster", "user", *PRICED_BY)
MODELS = ("H100", "A100-80GB", "B200")


def book(*rows: tuple[str, str, str | None]) -> PriceBook:
    """(model, price, capacity type) of every row; the H100 has another price from the second hour on."""
    shared = {"per": "gpu-hour", "basis": "gpu-only", "source": "test", "as_of": "2026-01-01"}
    dated = [("H100", "9.999", None, "2026-10-01T01:00:00Z", None)]
    dated += [(*row, "2026-01-01", "2026-10-01T01:00:00Z" if row[0] == "H100" and not row[2] else None) for row in rows]
    listed = [
        {**shared, "id": f"r{n}", "model": model, "price": price, "capacity_type": capacity, "valid_from": since}
        | ({"valid_to": until} if until else {})
        for n, (model, price, capacity, since, until) in enumerate(dated)
    ]
    return PriceBook.model_validate({"schema": 1, "currency": "USD", "timezone": "UTC", "rows": listed})


BOOK = book(("H100", "6.45", None), ("A100-80GB", "2.7401", None), ("A100-80GB", "1.1", "spot"))


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


ROWS = st.lists(
    st.tuples(st.integers(0, 11), st.integers(0, 3), st.integers(0, 5), st.integers(0, 15), st.booleans()),
    min_size=1,
    max_size=25,
    unique_by=lambda row: row[:2],
)
"""Quarter-hour, GPU, pod, minutes busy, use unknown."""


@contextmanager
def busy_ledger(rows: list[tuple[int, int, int, int, bool]], order: random.Random) -> Iterator[DuckLedger]:
    """These ROWS, with pods of several teams, a node that was down, and policies and labels that changed meanwhile."""
    with (
        TemporaryDirectory() as folder,
        closing(open_ledger(fresh(Path(folder) / "ledger.duckdb"), VirtualClock(HAND.now_ms))) as ledger,
    ):
        sent = [
            HAND.row(
                seq, 15 * quarter, 15 * quarter + 15, f"gpu-{gpu}", gpu_model=MODELS[gpu % 3],
                busy_us=None if blind else busy * 60_000_000,
                holder=Holder("pod", f"p{pod}", f"ns-{pod % 2}", f"p{pod}"),
            )
            for seq, (quarter, gpu, pod, busy, blind) in enumerate(sorted(rows), 1)
        ]  # fmt: skip
        facts = [
            HAND.fact(
                len(sent) + 1 + pod, f"p{pod}", namespace=f"ns-{pod % 2}", name=f"p{pod}", workload=f"Job/j{pod % 4}",
                queue_ref="policy:left" if pod == 1 else "", created_ms=START_MS,
                labels={"team": "green", "gputally.dev/user": f"u{pod % 3}" if pod < 4 else ""},
            )
            for pod in range(6)
        ]  # fmt: skip
        (receipt,) = ledger.append([HAND.batch(*sent, *facts)], HAND.now_ms)
        assert not isinstance(receipt, Exception)
        assert receipt.quarantined == 0
        down = Down(START_MS + 20 * MINUTE, START_MS + 95 * MINUTE, "NotReady")
        nodes = (NodeFacts("prod", "n1", pool="a", capacity_type="on-demand", down=(down,)),)
        spaces = (NamespaceFacts("prod", "ns-0", "blue", "team", ("green",)),)
        ledger.observe(Facts(nodes=nodes, namespaces=spaces), START_MS + order.randrange(200) * MINUTE)
        spaces = (NamespaceFacts("prod", "ns-0", "red"), NamespaceFacts("prod", "ns-1", "blue"))
        ledger.observe(Facts(namespaces=spaces), START_MS + 200 * MINUTE)
        ledger.put_policy(Policy(queues=(QueuePolicy(name="left", team="red"),)), START_MS)
        ledger.put_policy(Policy(queues=(QueuePolicy(name="left", team="lab"),)), START_MS + 100 * MINUTE)
        if order.random() < 0.5:
            ledger.checkpoint()
        yield ledger


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
            fast, slow = ranking.ranking(held, prices, team), ranking.of_charges(slow_of, team)
            assert len(fast) == len(slow)
            assert fast.users() == slow.users()
            assert fast.dearest(3) == slow.dearest(3) == slow.dearest(99)[:3]
            assert fast.wasteful(3) == slow.wasteful(3)
            assert fast.hardly_used(3) == slow.hardly_used(3)
            assert fast.candidates(BOOK, span[1]) == slow.candidates(BOOK, span[1])
            assert fast.named({("ns-1", "Job/j1")}) == slow.named({("ns-1", "Job/j1")})
