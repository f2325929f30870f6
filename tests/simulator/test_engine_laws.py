"""Whatever the jobs, queues and outages: capacity, limits, quotas and determinism hold at every event."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairshare.core.queues_and_weights import UNLIMITED, Claim
from fairshare.simulator.scheduler_engine import ClusterSimulation
from fairshare.simulator.simulation_model import Event, Job, Outage, Rules, Started, Stopped
from tests.effort import examples
from tests.simulator.conftest import MINUTE, Watcher, fleet

RULES = Rules(scan_depth=4, cycle_ms=1_000)
NODES = fleet(2, 4)
END = 600 * MINUTE

queues_st = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.5, 1.0, 3.0]), st.sampled_from([-1, 3, 6])),
    min_size=1, max_size=4,
).map(lambda rows: [Claim(f"q{i}", 0.0, d, limit, w) for i, (d, w, limit) in enumerate(rows)])  # fmt: skip
jobs_st = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 300), st.integers(1, 9), st.integers(1, 200), st.booleans()),
    max_size=30,
).map(
    lambda rows: [
        Job(f"j{i:02}", f"q{q}", at * MINUTE + 17 * i, gpus, minutes * MINUTE + i, preemptible=preemptible)
        for i, (q, at, gpus, minutes, preemptible) in enumerate(rows)
    ]
)
outages_st = st.lists(
    st.tuples(st.sampled_from(["n0", "n1", "GPU-0-0", "GPU-1-2"]), st.integers(0, 400), st.integers(1, 100)), max_size=3
).map(
    lambda rows: [
        Outage("node" if name.startswith("n") else "gpu", name, at * MINUTE + 5, (at + long) * MINUTE, "")
        for name, at, long in rows
    ]
)


def key(event: Event) -> tuple[object, ...]:
    return (type(event).__name__, event.at_ms, getattr(event, "job", None), getattr(event, "slots", None))


@pytest.mark.thorough
@settings(max_examples=examples(50, 400), deadline=None)
@given(queues_st, jobs_st, outages_st)
def test_capacity_limits_and_quotas_hold_at_every_event(
    queues: list[Claim], jobs: list[Job], outages: list[Outage]
) -> None:
    engine = ClusterSimulation(NODES, queues, jobs, outages=outages, rules=RULES)
    claims = {claim.name: claim for claim in queues}
    watcher = Watcher(NODES)
    held: dict[str, int] = dict.fromkeys(claims, 0)
    work: dict[str, int] = {}
    since: dict[str, int] = {}
    for event in engine.events_until(END):
        watcher.see(event)
        if isinstance(event, Started):
            since[event.job.id] = event.at_ms
            if event.job.queue in claims:
                claim = claims[event.job.queue]
                held[claim.name] += event.job.gpus
                assert claim.limit == UNLIMITED or held[claim.name] <= claim.limit
        elif isinstance(event, Stopped):
            ran = event.at_ms - since.pop(event.job.id)
            work[event.job.id] = work.get(event.job.id, 0) + ran
            if event.job.queue in claims:
                claim = claims[event.job.queue]
                held[claim.name] -= event.job.gpus
                if event.reason == "reclaimed":
                    assert event.job.preemptible
                    assert ran >= RULES.min_runtime_ms
                    assert event.for_queue not in ("", claim.name)
                    assert held[claim.name] >= claim.deserved
    for name, state in engine.queue_states().items():
        assert state.allocated == held[name] <= state.requested
    for name, outcome in engine.outcomes.items():
        if outcome.finish_ms is not None:
            assert work[name] * outcome.job.gpus == outcome.job.duration_ms * outcome.job.gpus + outcome.lost_gpu_ms


@pytest.mark.thorough
@settings(max_examples=examples(20, 150), deadline=None)
@given(queues_st, jobs_st, outages_st, st.integers(0, 2**32), st.lists(st.integers(1, 599), max_size=4))
def test_the_outcome_depends_on_the_inputs_alone(
    queues: list[Claim], jobs: list[Job], outages: list[Outage], seed: int, stops: list[int]
) -> None:
    """Neither the order in which jobs and queues are given nor how the run is cut matters."""
    one = ClusterSimulation(NODES, queues, jobs, outages=outages, rules=RULES).events_until(END)
    shuffled_jobs, shuffled_queues = list(jobs), list(queues)
    Random(seed).shuffle(shuffled_jobs)
    Random(seed).shuffle(shuffled_queues)
    other = ClusterSimulation(NODES, shuffled_queues, shuffled_jobs, outages=outages, rules=RULES)
    pieces = [event for at in [*sorted(stops), 600] for event in other.events_until(at * MINUTE)]
    assert [key(e) for e in one] == [key(e) for e in pieces]


@settings(max_examples=examples(13, 80), deadline=None)
@given(jobs_st)
def test_nothing_idles_that_a_waiting_job_could_use(jobs: list[Job]) -> None:
    """Work conserving: with one queue, no limit and the whole queue looked at, what waits does not fit."""
    plain = [replace(job, queue="q0", preemptible=True) for job in jobs]
    engine = ClusterSimulation(NODES, [Claim("q0", 0.0)], plain, rules=replace(RULES, scan_depth=1_000))
    watcher = Watcher(NODES)
    waiting: set[str] = set()
    for at in range(0, 600, 7):
        watcher.see_all(engine.events_until(at * MINUTE + 60_000))
        now = engine.now_ms
        waiting = {
            o.job.id
            for o in engine.outcomes.values()
            if not o.rejected and o.first_start_ms is None and o.job.submit_ms <= now - RULES.cycle_ms
        }
        free = 8 - len(watcher.holders)
        assert all(engine.outcomes[name].job.gpus > free for name in waiting)
