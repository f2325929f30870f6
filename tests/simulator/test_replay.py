"""Replays: conservation, guarantees, gangs, and backfilling."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairshare.laws.division import fair_shares, fill
from fairshare.simulator.scheduler_engine import replay, reserve
from fairshare.simulator.simulation_model import (
    CONTROL_S,
    ControllerView,
    ReplayPool,
    Rules,
    SimulatedJob,
    Workload,
    workload_of,
)
from tests.hypothesis_examples import examples
from tests.simulator.conftest import work_of

HOUR = 3600


def test_one_job_runs_from_the_tick_after_its_submission_for_as_long_as_it_takes() -> None:
    record = replay(work_of([(61, 4, 3000, 0)]), ReplayPool(8, [4.0, 4.0], [1.0, 1.0]), 2 * HOUR)
    assert (record.started_s, record.finished_s) == ([120], [3120])
    assert record.delivered_gpu_s == 4 * 3000


def test_a_gang_waits_whole_until_all_of_it_fits() -> None:
    work = work_of([(0, 6, HOUR, 0), (60, 4, HOUR, 1)])
    record = replay(work, ReplayPool(8, [8.0, 0.0], [1.0, 0.0]), 3 * HOUR)
    assert record.started_s == [0, HOUR]


def test_who_is_below_his_share_takes_it_back_and_the_victim_keeps_its_checkpoint() -> None:
    work = work_of([(0, 1, 10 * HOUR, 0)] * 8 + [(2 * HOUR, 4, HOUR, 1)])
    record = replay(work, ReplayPool(8, [0.0, 0.0], [1.0, 1.0]), 20 * HOUR)
    assert record.evictions == 4
    assert record.started_s[-1] == 2 * HOUR
    assert record.lost_gpu_s == 4 * 120  # stopped right at a checkpoint: only the restarts are lost
    assert all(at >= 0 for at in record.finished_s)
    lost = replay(replace(work, submit_s=[*work.submit_s[:8], 2 * HOUR + 600]), record.pool, 20 * HOUR)
    assert lost.lost_gpu_s == 4 * (600 + 120)


def test_a_first_start_stays_the_first_also_where_restarts_are_free() -> None:
    work = work_of([(0, 1, 10 * HOUR, 0)] * 8 + [(2 * HOUR, 4, HOUR, 1)])
    record = replay(work, ReplayPool(8, [0.0, 0.0], [1.0, 1.0], rules=Rules(restart_ms=0)), 20 * HOUR)
    assert (record.evictions, record.lost_gpu_s) == (4, 0)
    assert record.started_s[:8] == [0] * 8


def test_deserved_quotas_and_the_minimum_run_time_hold() -> None:
    work = work_of([(0, 1, 10 * HOUR, 0)] * 8 + [(300, 8, HOUR, 1), (300, 4, HOUR, 1)])
    record = replay(work, ReplayPool(8, [6.0, 0.0], [1.0, 1.0]), 5 * HOUR)
    assert record.started_s[-2:] == [-1, -1]  # 8 and 4 would both break the guarantee of 6
    single = work_of([(0, 1, 10 * HOUR, 0)] * 8 + [(300, 1, HOUR, 1)])
    assert replay(single, record.pool, 5 * HOUR).started_s[-1] == 600


def test_without_reclaim_nobody_is_stopped_and_a_limit_is_a_wall() -> None:
    work = work_of([(0, 1, 10 * HOUR, 0)] * 8 + [(HOUR, 4, HOUR, 1)])
    pool = ReplayPool(8, [0.0, 0.0], [1.0, 1.0], rules=Rules(reclaim=False))
    assert replay(work, pool, 20 * HOUR).evictions == 0
    fixed = replay(work, replace(pool, limits=[4, 4]), 30 * HOUR)
    assert max(held[0] for held in fixed.held) == 4
    assert fixed.started_s[-1] == HOUR


def test_one_line_serves_across_teams_as_they_came() -> None:
    work = work_of([(0, 8, HOUR, 0), (60, 8, HOUR, 0), (120, 8, HOUR, 1)])
    record = replay(work, ReplayPool(8, [0.0] * 2, [1.0] * 2, rules=Rules(reclaim=False, one_line=True)), 5 * HOUR)
    assert record.started_s == [0, HOUR, 2 * HOUR]


def test_weights_set_by_a_controller_act_from_the_next_tick() -> None:
    work = work_of([(0, 1, 20 * HOUR, q) for q in (0, 1) for _ in range(8)])
    seen: list[ControllerView] = []

    def steering(view: ControllerView) -> list[float] | None:
        seen.append(view)
        return [3.0, 1.0] if view.now_s >= 2 * HOUR else None

    record = replay(work, ReplayPool(8, [0.0, 0.0], [1.0, 1.0]), 4 * HOUR, steering=steering)
    assert len(seen) == 4 * HOUR // CONTROL_S + 1
    assert record.held[6] == [4, 4]
    assert record.held[-1] == [6, 2]
    assert record.weights[-1] == (3.0, 1.0)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    chance = Random(draw(st.integers(0, 10_000)))
    rows = [
        (chance.randrange(0, 10 * HOUR), chance.choice((1, 1, 2, 4, 8)), chance.randrange(60, 8 * HOUR), q)
        for q in (0, 1, 2)
        for _ in range(chance.randrange(1, 15))
    ]
    return work_of(rows, ("a", "b", "c"))


@given(workloads(), st.sampled_from([True, False]))
@pytest.mark.thorough
@settings(max_examples=examples(12, 100))
def test_gpus_and_work_are_conserved(work: Workload, reclaim: bool) -> None:
    pool = ReplayPool(16, [4.0, 2.0, 0.0], [1.0, 2.0, 3.0], rules=Rules(reclaim=reclaim))
    record = replay(work, pool, 400 * HOUR)
    assert all(sum(held) <= pool.capacity and min(held) >= 0 for held in record.held)
    assert all(at >= 0 for at in record.finished_s)
    assert record.delivered_gpu_s == round(work.gpu_hours * HOUR) + record.lost_gpu_s
    assert all(began >= came for began, came in zip(record.started_s, work.submit_s, strict=True))
    assert replay(work, pool, 400 * HOUR).used == record.used


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 20), st.floats(0.1, 9)), min_size=1, max_size=8))
def test_fluid_shares_conserve_the_pool_and_respect_requests_and_quotas(rows: list[tuple[float, float, float]]) -> None:
    asked, deserved, weights = (list(column) for column in zip(*rows, strict=True))
    shares = fair_shares(40.0, asked, deserved, weights)
    for share, ask, quota in zip(shares, asked, deserved, strict=True):
        assert min(ask, quota) - 1e-9 <= share <= ask + 1e-9
    if sum(min(a, d) for a, d in zip(asked, deserved, strict=True)) <= 40:
        assert sum(shares) == pytest.approx(min(40.0, sum(asked)))


def test_filling_gives_nothing_to_who_has_no_weight() -> None:
    assert fill(10.0, [20.0, 20.0, 2.0], [1.0, 0.0, 1.0]) == [8.0, 0.0, 2.0]


def test_a_workload_has_the_columns_of_its_queues_jobs() -> None:
    jobs = [
        SimulatedJob("2", "b", 61_500, 2, 1_500),
        SimulatedJob("1", "a", 0, 4, 3_600_000),
        SimulatedJob("3", "z", 0, 1, 1_000),
    ]
    work = workload_of(jobs, ("a", "b"))
    assert (work.submit_s, work.gpus, work.duration_s) == ([0, 61], [4, 2], [3600, 2])
    assert (work.queue, work.left_out) == ([0, 1], 1)
    assert work.fitting(3).gpus == [2]
    assert work.between(10, 100).submit_s == [51]


EVEN = (0.5, 0.5)


def test_backfilling_never_moves_the_first_in_line() -> None:
    """8 GPUs: 6 are busy for two hours, and a gang of 8 waits. A job of one hour may start before it, a longer one may
    not."""
    pool = ReplayPool(8, [0.0, 0.0], EVEN, rules=Rules(reclaim=False, one_line=True, backfill=True))
    rows = [(0, 6, 2 * HOUR, 0), (60, 8, HOUR, 0), (120, 2, HOUR, 1), (180, 2, 3 * HOUR, 1)]
    assert replay(work_of(rows), pool, 12 * HOUR).started_s == [0, 2 * HOUR, 120, 3 * HOUR]
    rows[1] = (60, 6, HOUR, 0)  # leaves two over: the long one may have them, once the short one has gone
    assert replay(work_of(rows), pool, 12 * HOUR).started_s == [0, 2 * HOUR, 120, HOUR + 120]


def test_a_reservation_is_used_up() -> None:
    reservation = reserve(5, 1, [(100, 3), (200, 4)])
    assert (reservation.at_ms, reservation.spare) == (200, 3)
    assert reservation.admits(9, 200)
    assert reservation.admits(2, 201)
    assert not reservation.admits(2, 201)
