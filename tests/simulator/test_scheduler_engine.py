"""The laws of the scheduler engine, on hand-computed cases, at every event of any case, and its line of waiting
jobs."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairshare.core.queues_and_weights import UNLIMITED, QueueClaim
from fairshare.simulator.engine_state import NEVER, SimulatedGang, WaitingLine
from fairshare.simulator.scheduler_engine import ClusterSimulation
from fairshare.simulator.simulation_model import (
    Event,
    GpuSpec,
    Outage,
    Rules,
    SimulatedJob,
    SimulatedNodeSpec,
    Started,
    Stopped,
)
from gputally.base.errors import DivisionError
from tests.hypothesis_examples import examples
from tests.simulator.conftest import MINUTE, Watcher, fleet, job, queue

HOUR = 60 * MINUTE


def starts(engine: ClusterSimulation, until_ms: int) -> dict[str, int]:
    return {e.job.id: e.at_ms for e in engine.events_until(until_ms) if isinstance(e, Started)}


HOGS = [job(f"hog{i}", minutes=600) for i in range(8)]
KEPT = [job(f"hog{i}", minutes=600, preemptible=False) for i in range(8)]
FULL = [job("running", gpus=6), job("big", gpus=4, at=1), *(job(f"small-{i}", at=2) for i in range(3))]
OUTAGES = [Outage("node", "n0", 0, 60 * MINUTE, "power"), Outage("gpu", "GPU-0-0", 30 * MINUTE, 90 * MINUTE, "Xid")]
TWO = [queue("a"), queue("b")]


@pytest.mark.parametrize(
    ("queues", "jobs", "options", "until", "started"),
    [
        (TWO, [job("first", gpus=5), job("second", gpus=4, at=1)], {}, 59, {"first": 0, "second": None}),
        (TWO, [job("first", gpus=5), job("second", gpus=4, at=1)], {}, 60, {"first": 0, "second": 60}),
        (TWO, FULL, {"rules": Rules(scan_depth=2)}, 3, {"running": 0, "big": None, "small-0": 2, "small-1": 2}),
        (TWO, [*HOGS, job("late", "b", at=60)], {"rules": Rules(reclaim=False)}, 540, {"late": None}),
        ([queue("a", deserved=6), queue("b")], [job("gang", gpus=8, minutes=600), job("late", "b", at=60)], {}, 180,
         {"late": None}),
        ([queue("a", deserved=8), queue("b")], [*KEPT, job("late", "b", at=60)], {}, 180, {"late": None}),
        ([queue("a", deserved=2)], [job(f"j{i}", preemptible=False) for i in range(4)], {}, 0,
         {"j0": 0, "j1": 0, "j2": None, "j3": None}),
        (TWO, [*HOGS, job("late", "b", at=1)], {}, 20, {"late": 10}),
        (TWO, [job("all", gpus=8, at=1), job("seven", gpus=7, at=1)], {"outages": OUTAGES}, 80,
         {"all": None, "seven": 60}),
        (TWO, [SimulatedJob("j", "a", 1_001, 1, 5_000)], {"rules": Rules(cycle_ms=60_000)}, 60, {"j": 1}),
    ],
    ids=["whole", "gang", "scan depth", "no reclaim", "below its quota", "not preemptible", "quota", "minimum run time",
         "overlapping outages", "cycle"],
)  # fmt: skip
def test_who_starts_when(
    queues: list[QueueClaim],
    jobs: list[SimulatedJob],
    options: dict[str, Any],
    until: int,
    started: dict[str, int | None],
) -> None:
    """In minutes, on one node of eight GPUs."""
    begun = starts(ClusterSimulation(fleet(1), queues, jobs, **options), until * MINUTE)
    minutes = {name: at / MINUTE for name, at in begun.items()}
    assert {name: minutes.get(name) for name in started} == started


def test_small_jobs_share_a_node_so_that_a_whole_node_stays_free() -> None:
    engine = ClusterSimulation(fleet(2), [queue("a")], [job("x"), job("y", gpus=2), job("z", gpus=8)])
    started = [e for e in engine.events_until(0) if isinstance(e, Started)]
    assert {e.job.id: {slot.node for slot in e.slots} for e in started} == {"x": {"n0"}, "y": {"n0"}, "z": {"n1"}}


def test_a_gang_larger_than_a_node_takes_as_few_nodes_as_it_can() -> None:
    engine = ClusterSimulation(fleet(3), [queue("a")], [job("a-one"), job("big", gpus=12)])
    big = next(e for e in engine.events_until(0) if isinstance(e, Started) and e.job.id == "big")
    assert Counter(slot.node for slot in big.slots) == {"n1": 8, "n0": 4}


def test_a_gang_never_mixes_gpu_models() -> None:
    nodes = [*fleet(1, 4, "H100"), SimulatedNodeSpec("m0", tuple(GpuSpec(f"GPU-m-{i}", "A100") for i in range(4)))]
    engine = ClusterSimulation(nodes, [queue("a")], [job("six", gpus=6), job("four", gpus=4, models=("A100",))])
    assert starts(engine, HOUR) == {"four": 0}
    assert engine.outcomes["six"].rejected


def test_what_can_never_run_is_rejected_and_not_in_anybodys_way() -> None:
    never = [job("huge", gpus=9), job("not-preemptible", gpus=2, preemptible=False), job("over-limit", "b", gpus=3)]
    engine = ClusterSimulation(fleet(1), [queue("a", deserved=1), queue("b", limit=2)], [*never, job("fits")])
    assert starts(engine, 0) == {"fits": 0}
    rejected = [name for name, outcome in engine.outcomes.items() if outcome.rejected]
    assert rejected == ["huge", "not-preemptible", "over-limit"]
    assert engine.queue_states()["a"].requested == 1


def test_a_limit_holds_even_on_an_empty_cluster_and_along_the_tree() -> None:
    queues = [queue("root", limit=5), queue("a", limit=4, parent="root"), queue("b", parent="root")]
    engine = ClusterSimulation(fleet(1), queues, [job(f"{q}{i}", queue=q) for q in "ab" for i in range(6)])
    engine.events_until(0)
    states = engine.queue_states()
    assert states["root"].allocated == 5
    assert states["a"].allocated <= 4
    assert states["root"].requested == 12


def test_a_queue_takes_back_its_share_from_one_above_its_own_newest_first() -> None:
    hogs = [job(f"hog{i}", minutes=600, at=i) for i in range(8)]
    engine = ClusterSimulation(fleet(1), TWO, [*hogs, job("late", queue="b", gpus=3, at=60)])
    stops = [e for e in engine.events_until(61 * MINUTE) if isinstance(e, Stopped)]
    assert [e.job.id for e in stops] == ["hog7", "hog6", "hog5"]
    assert {(e.reason, e.for_queue) for e in stops} == {("reclaimed", "b")}
    assert engine.queue_states()["b"].allocated == 3


def test_deserved_quota_is_never_reclaimed() -> None:
    """b is due most of the cluster by weight, but a's quota is seven of eight."""
    late = [job(f"late{i}", queue="b", at=60) for i in range(4)]
    engine = ClusterSimulation(fleet(1), [queue("a", deserved=7), queue("b", weight=3)], [*HOGS, *late])
    engine.events_until(3 * HOUR)
    assert (engine.queue_states()["a"].allocated, engine.queue_states()["b"].allocated) == (7, 1)


def test_work_since_the_last_checkpoint_is_lost_and_a_restart_costs_two_minutes() -> None:
    hog = job("hog", gpus=8, minutes=120)
    late = job("late", queue="b", gpus=4, minutes=10, at=70)
    engine = ClusterSimulation(fleet(1), [queue("a"), queue("b")], [hog, late])
    engine.events_until(10 * HOUR)
    outcome = engine.outcomes["hog"]
    # 70 min run, 60 saved; it comes back at minute 80, and has 60 min of work and 2 of restart to do.
    assert outcome.evictions == 1
    assert outcome.finish_ms == (80 + 62) * MINUTE
    assert outcome.lost_gpu_ms == 8 * (10 + 2) * MINUTE


def test_no_more_is_stopped_than_the_gang_needs() -> None:
    """Newest first would stop the single job and then the gang of four; the gang alone is enough."""
    hog = [job("old", gpus=3, minutes=600), job("gang", gpus=4, minutes=600, at=1), job("one", minutes=600, at=2)]
    engine = ClusterSimulation(fleet(1), [queue("a"), queue("b")], [*hog, job("late", queue="b", gpus=4, at=60)])
    assert [e.job.id for e in engine.events_until(HOUR) if isinstance(e, Stopped)] == ["gang"]


def test_heavier_weights_move_the_division_of_a_contended_cluster() -> None:
    jobs = [job(f"{q}{i:02}", queue=q, minutes=20, at=i) for q in "ab" for i in range(120)]

    def hours(weight: float) -> Counter[str]:
        engine = ClusterSimulation(fleet(1), [queue("a", weight=1), queue("b", weight=1)], jobs)
        engine.set_weights({"a": weight})
        watcher = Watcher(fleet(1)).see_all(engine.events_until(90 * MINUTE))
        return Counter(watcher.gpu_ms)

    shares = [hours(weight)["a"] / hours(weight).total() for weight in (0.25, 1.0, 4.0)]
    assert shares[0] < 0.35 < shares[1] < 0.65 < shares[2]


def test_weights_changed_while_it_runs_take_effect() -> None:
    jobs = [job(f"{q}{i}", queue=q, minutes=6000) for q in "ab" for i in range(8)]
    engine = ClusterSimulation(fleet(1), [queue("a"), queue("b")], jobs)
    engine.events_until(HOUR)
    assert engine.queue_states()["a"].allocated == 4
    engine.set_weights({"a": 3.0})
    engine.events_until(2 * HOUR)
    assert engine.queue_states()["a"].allocated == 6


def test_priority_comes_before_weight_over_the_quota() -> None:
    jobs = [job(f"{q}{i}", queue=q) for q in "ab" for i in range(8)]
    engine = ClusterSimulation(fleet(1), [queue("a", priority=200), queue("b", deserved=1, weight=100)], jobs)
    engine.events_until(0)
    assert engine.queue_states()["a"].allocated == 7


@pytest.mark.parametrize("target", ["node", "gpu"])
def test_an_outage_stops_its_jobs_and_takes_the_capacity_away(target: str) -> None:
    nodes = fleet(2)
    outage = Outage(target, "n0" if target == "node" else "GPU-0-3", 45 * MINUTE, 90 * MINUTE, "broken")  # type: ignore[arg-type]
    engine = ClusterSimulation(nodes, [queue("a")], [job("gang", gpus=16, minutes=60)], outages=[outage])
    watcher = Watcher(nodes)
    watcher.see_all(engine.events_until(80 * MINUTE))
    assert not watcher.holders
    watcher.see_all(engine.events_until(3 * HOUR))
    outcome = engine.outcomes["gang"]
    assert (outcome.crashes, outcome.finish_ms) == (1, (90 + 30 + 2) * MINUTE)


def test_parts_of_a_gpu_are_pools_of_their_own() -> None:
    parts = GpuSpec("GPU-mig", "A100", ("3g.40gb", "2g.20gb", "1g.10gb", "1g.10gb"))
    nodes = [SimulatedNodeSpec("n0", (parts, GpuSpec("GPU-ts", "A100", ("shared",) * 2), GpuSpec("GPU-1", "A100")))]
    jobs = [job(f"mig{i}", shape="1g.10gb") for i in range(3)]
    jobs += [job(f"ts{i}", shape="shared", queue="b") for i in range(3)]
    engine = ClusterSimulation(nodes, TWO, [*jobs, job("whole"), job("two", gpus=2)])
    assert set(starts(engine, 0)) == {"mig0", "mig1", "ts0", "ts1", "whole"}
    assert engine.queue_states()["a"].allocated == 1
    assert engine.outcomes["two"].rejected


def test_jobs_of_another_scheduler_shrink_what_is_divided() -> None:
    jobs = [job("foreign", queue="elsewhere", gpus=2), *(job(f"{q}{i}", queue=q) for q in "ab" for i in range(8))]
    engine = ClusterSimulation(fleet(1), [queue("a"), queue("b")], jobs)
    engine.events_until(0)
    assert [engine.queue_states()[q].share for q in "ab"] == [3, 3]


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: ClusterSimulation(fleet(1), TWO, [job("same"), job("same")]), ValueError, "job ids"),
        (lambda: ClusterSimulation([*fleet(1), *fleet(1)], TWO, []), ValueError, "unique"),
        (
            lambda: ClusterSimulation(fleet(1), TWO, [], outages=[Outage("node", "n9", 0, None, "")]),
            ValueError,
            "unknown node",
        ),
        (lambda: ClusterSimulation(fleet(1), [queue("a", parent="nobody")], []), DivisionError, "nobody"),
        (lambda: job("none", gpus=0), ValueError, "gpus >= 1"),
        (lambda: ClusterSimulation(fleet(1), TWO, []).set_weights({"a": -1.0}), ValueError, "weight"),
        (lambda: ClusterSimulation(fleet(1), TWO, []).set_weights({"c": 1.0}), KeyError, "c"),
    ],
)
def test_impossible_inputs_are_refused(make: Callable[[], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


RULES = Rules(scan_depth=4, cycle_ms=1_000)
NODES = fleet(2, 4)
END = 600 * MINUTE

queues_st = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.5, 1.0, 3.0]), st.sampled_from([-1, 3, 6])),
    min_size=1, max_size=4,
).map(lambda rows: [QueueClaim(f"q{i}", 0.0, d, limit, w) for i, (d, w, limit) in enumerate(rows)])  # fmt: skip
jobs_st = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 300), st.integers(1, 9), st.integers(1, 200), st.booleans()),
    max_size=30,
).map(
    lambda rows: [
        SimulatedJob(f"j{i:02}", f"q{q}", at * MINUTE + 17 * i, gpus, minutes * MINUTE + i, preemptible=preemptible)
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
@settings(max_examples=examples(50, 400))
@given(queues_st, jobs_st, outages_st)
def test_capacity_limits_and_quotas_always_hold(
    queues: list[QueueClaim], jobs: list[SimulatedJob], outages: list[Outage]
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
@settings(max_examples=examples(20, 150))
@given(queues_st, jobs_st, outages_st, st.integers(0, 2**32), st.lists(st.integers(1, 599), max_size=4))
def test_the_outcome_depends_on_the_inputs_alone(
    queues: list[QueueClaim], jobs: list[SimulatedJob], outages: list[Outage], seed: int, stops: list[int]
) -> None:
    """Neither the order of jobs and queues nor the division of the run matters."""
    one = ClusterSimulation(NODES, queues, jobs, outages=outages, rules=RULES).events_until(END)
    shuffled_jobs, shuffled_queues = list(jobs), list(queues)
    Random(seed).shuffle(shuffled_jobs)
    Random(seed).shuffle(shuffled_queues)
    other = ClusterSimulation(NODES, shuffled_queues, shuffled_jobs, outages=outages, rules=RULES)
    pieces = [event for at in [*sorted(stops), 600] for event in other.events_until(at * MINUTE)]
    assert [key(e) for e in one] == [key(e) for e in pieces]


@settings(max_examples=examples(13, 80))
@given(jobs_st)
def test_nothing_idles_that_a_waiting_job_could_use(jobs: list[SimulatedJob]) -> None:
    """Work conserving: with one queue, no limit and a search of the whole queue, no waiting job would fit."""
    plain = [replace(job, queue="q0", preemptible=True) for job in jobs]
    engine = ClusterSimulation(NODES, [QueueClaim("q0", 0.0)], plain, rules=replace(RULES, scan_depth=1_000))
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


@settings(max_examples=examples(40, 400))
@given(st.integers(1, 4), st.lists(st.tuples(st.sampled_from(["join", "leave", "rejoin"]), st.integers(0, 9))))
def test_a_line_is_a_sorted_list_whose_front_is_at_hand(depth: int, steps: list[tuple[str, int]]) -> None:
    gangs = [SimulatedGang(number, 0, 1 + number * 7 % 5, 1, 0) for number in range(len(steps))]
    line, plain, gone, submitted = WaitingLine(depth), list[int](), list[int](), 0
    for step, which in steps:
        if step == "join":
            line.join(gangs[submitted])
            plain.append(submitted)
            submitted += 1
        elif step == "leave" and plain:
            place = which % min(depth, len(plain))
            line.leave(place)
            gone.append(plain.pop(place))
        elif step == "rejoin" and gone:
            number = gone.pop(which % len(gone))
            line.join(gangs[number])
            insort(plain, number)
        assert [gang.number for gang in line.front()] == plain[:depth]
        assert line.depth() == len(plain[:depth])
        assert line.smallest == min((gang.gpus for gang in line.front()), default=NEVER)
    for number in plain:
        assert line.gangs[0].number == number, "and none behind is lost"
        line.leave(0)
    assert not line.gangs


def test_a_gang_that_was_stopped_waits_anew_from_its_stop_on() -> None:
    engine = ClusterSimulation(fleet(1), TWO, [*HOGS, job("late", "b", gpus=4, minutes=30, at=60)])
    stopped: dict[str, int] = {}
    again = 0
    for event in engine.events_until(10 * HOUR):
        if isinstance(event, Stopped):
            stopped[event.job.id] = event.at_ms
        elif isinstance(event, Started):
            again += event.attempt > 1
            assert event.queued_ms == stopped.get(event.job.id, event.job.submit_ms)
    assert again == 4
