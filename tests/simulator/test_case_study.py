"""100 GPUs, an LLM team that bursts from 20 guaranteed to 60, two teams that fill the rest; and the burst of
30 + 30 beside a steady team."""

from __future__ import annotations

from random import Random

import pytest

from fairshare.simulator import scheduling_policies
from fairshare.simulator.scheduling_policies import Setup
from fairshare.simulator.simulation_model import Workload
from scripts.doc_figures import BURST, GUARANTEED, HALF_LIVES_S, SLOT_S, play

HOUR = 3600


@pytest.mark.parametrize("half_life_s", HALF_LIVES_S)
def test_every_burst_gets_in_and_no_guarantee_is_broken(half_life_s: int | None) -> None:
    study = play(half_life_s)
    assert len(study.waits_s) == 9
    assert max(study.waits_s) <= HOUR
    steady = study.record.held[6:-1]
    for held in steady:
        assert min(held) >= GUARANTEED
    assert max(held[0] for held in steady) == GUARANTEED + BURST
    bursts = [i for i, gpus in enumerate(study.record.workload.gpus) if gpus == BURST]
    assert all(study.record.evicted[i] == 0 for i in bursts)
    assert all(study.record.finished_s[i] - study.record.started_s[i] == SLOT_S for i in bursts)
    ours, fixed = study.utilisation
    assert ours > 0.97
    assert ours > fixed + 0.05


def _steady_and_burst() -> Workload:
    """A team that keeps 100 GPUs full with jittered 4-hour jobs; at hour 72 a gang of 60 of the other."""
    chance, length = Random(7), 4 * HOUR
    rows = [(0, 1, round(length * chance.uniform(0.5, 1.5)), 0) for _ in range(120)]
    rows += [(at, 1, round(length * chance.uniform(0.5, 1.5)), 0) for at in range(0, 100 * HOUR, length // 120)]
    rows.append((72 * HOUR + 61, 60, 8 * HOUR, 1))
    rows.sort()
    return Workload(("steady", "burst"), *([row[column] for row in rows] for column in range(4)))


def test_a_burst_beyond_any_share_is_admitted_within_the_hour_and_not_stopped() -> None:
    work = _steady_and_burst()
    setup = Setup(100, (0.5, 0.5), guaranteed=0.6)
    gang = work.gpus.index(60)
    ours = scheduling_policies.run("deficit", work, setup, 100 * HOUR)
    assert 0 <= ours.started_s[gang] - work.submit_s[gang] <= HOUR
    assert ours.evicted[gang] == 0
    assert ours.evictions <= 60
    assert scheduling_policies.run("static", work, setup, 100 * HOUR).started_s[gang] == -1
