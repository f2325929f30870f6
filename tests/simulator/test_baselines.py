"""Baselines from papers, each on a case worked out by hand."""

from __future__ import annotations

import pytest

from fairshare.laws.division import fill, fill_from
from fairshare.simulator.scheduler_engine import replay, reserve
from fairshare.simulator.scheduling_policies import Karma, Oracle, StatefulDrf
from fairshare.simulator.simulation_model import CONTROL_S, ControllerView, Pool, Rules, Workload

HOUR = 3600
EVEN = (0.5, 0.5)


def _view(now_s: int, asked: list[int], used: list[int] | None = None) -> ControllerView:
    return ControllerView(now_s, 8, used or [0, 0], [0, 0], asked, [1, 1], [0, 0])


def _work(rows: list[tuple[int, int, int, int]]) -> Workload:
    """(submit_s, gpus, duration_s, queue), by submission."""
    return Workload(("a", "b"), *([row[i] for row in rows] for i in range(4)))


def test_filling_from_unequal_starts() -> None:
    assert fill_from(6.0, [10.0, 10.0], [1.0, 2.0], [3.0, 0.0]) == [0.0, 6.0]
    assert fill_from(9.0, [10.0, 10.0], [1.0, 2.0], [3.0, 0.0]) == [1.0, 8.0]
    assert fill_from(9.0, [10.0, 4.0], [1.0, 2.0], [3.0, 0.0]) == [5.0, 4.0]
    assert fill_from(99.0, [10.0, 4.0], [1.0, 0.0], [3.0, 0.0]) == [10.0, 0.0]
    caps, weights = [3.0, 9.0, 0.0, 5.0], [1.0, 2.0, 5.0, 1.5]
    assert fill_from(11.0, caps, weights, [0.0] * 4) == pytest.approx(fill(11.0, caps, weights))


def test_karma_lends_against_credits_and_serves_who_has_most() -> None:
    """8 GPUs, halves, half of each guaranteed: two free credits a quantum. a borrows 5, one of them b's; then both ask
    for all, and b, six credits ahead, is served until they are level."""
    karma = Karma(8, EVEN)
    assert karma(_view(0, [8, 1]), EVEN) == [7.0, 1.0]
    assert karma.credits == [-3.0, 3.0]
    assert karma(_view(60, [8, 8]), EVEN) == [7.0, 1.0]  # the same quantum
    due = [karma(_view(CONTROL_S * (1 + i), [8, 8]), EVEN) for i in range(3)]
    assert due == [[2.0, 6.0], [3.0, 5.0], [4.0, 4.0]]
    assert karma.credits == [0.0, 0.0]


def test_stateful_drf_remembers_what_one_had_above_its_share_and_forgets_it() -> None:
    """a had all 8 GPUs for a half-life: half of the 4 too many is its commitment, and b gets two more now."""
    drf = StatefulDrf(8, EVEN, [0.0, 0.0], half_life_s=HOUR)
    assert drf(_view(0, [8, 0]), EVEN) == [8.0, 0.0]
    assert drf(_view(HOUR, [8, 8], [8 * HOUR, 0]), EVEN) == [3.0, 5.0]
    assert drf.commitment == [2.0, 0.0]
    later = drf(_view(21 * HOUR, [8, 8], [88 * HOUR, 80 * HOUR]), EVEN)
    assert later == pytest.approx([4.0, 4.0], abs=1e-4)
    quota = StatefulDrf(8, EVEN, [4.0, 0.0], half_life_s=HOUR)
    assert quota(_view(HOUR, [8, 8], [16 * HOUR, 0]), EVEN) == [4.0, 4.0]  # whatever it had, its quota stays


def test_backfilling_never_moves_the_first_in_line() -> None:
    """8 GPUs: 6 are busy for two hours, a gang of 8 waits for them. An hour's job goes ahead of it, a long one not."""
    pool = Pool(8, [0.0, 0.0], EVEN, rules=Rules(reclaim=False, one_line=True, backfill=True))
    rows = [(0, 6, 2 * HOUR, 0), (60, 8, HOUR, 0), (120, 2, HOUR, 1), (180, 2, 3 * HOUR, 1)]
    assert replay(_work(rows), pool, 12 * HOUR).started_s == [0, 2 * HOUR, 120, 3 * HOUR]
    rows[1] = (60, 6, HOUR, 0)  # leaves two over: the long one may have them, once the short one has gone
    assert replay(_work(rows), pool, 12 * HOUR).started_s == [0, 2 * HOUR, 120, HOUR + 120]


def test_a_reservation_is_used_up() -> None:
    reservation = reserve(5, 1, [(100, 3), (200, 4)])
    assert (reservation.at_ms, reservation.spare) == (200, 3)
    assert reservation.admits(9, 200)
    assert reservation.admits(2, 201)
    assert not reservation.admits(2, 201)


def test_the_oracle_weighs_by_what_will_be_wanted() -> None:
    """84 hours ahead, 8 GPUs: b has nothing now, but in 42 hours jobs for 8 GPUs or for 2."""
    work = [(0, 8, 200 * HOUR, 0), (42 * HOUR, 8, 84 * HOUR, 1)]
    assert Oracle(_work(work), 8, EVEN, (84,))(_view(0, [8, 0])) == [4.0, 4.0]
    work[1] = (42 * HOUR, 2, 84 * HOUR, 1)
    assert Oracle(_work(work), 8, EVEN, (84,))(_view(0, [8, 0])) == [7.0, 1.0]
    work[1] = (169 * HOUR, 8, HOUR, 1)
    assert Oracle(_work(work), 8, EVEN, (84,))(_view(0, [8, 0])) == [8.0, 0.004]
