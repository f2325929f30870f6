"""Baselines of the evaluation: published mechanisms on worked examples, digests of replays, and bursts."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from random import Random
from typing import Any

import pytest

from fairshare.laws.division import fill
from fairshare.simulator.simulation_model import CONTROL_S, ControllerView, ReplayRecord, Workload
from tests.evaluation import scheduling_policies
from tests.evaluation.case_study import BURST, GUARANTEED, HALF_LIVES_S, SLOT_S, play
from tests.evaluation.kai_scenarios import whole_gpus
from tests.evaluation.scheduling_policies import (
    NAMES,
    Karma,
    Oracle,
    Setup,
    StatefulDrf,
    fair_share_factor,
    fill_from,
    run,
)
from tests.shared_files import shared_cases
from tests.simulator.conftest import work_of

HOUR = 3600


def test_whole_gpus_are_divided_as_kai_does() -> None:
    dividing = whole_gpus(("a", "b", "c"), [0.0] * 3)
    view = ControllerView(0, 16, [0] * 3, [0] * 3, [48] * 3, [16] * 3, [0] * 3)
    assert dividing(view, [1.0, 2.0, 3.0]) == [3.0, 5.0, 8.0]
    assert dividing(view, [1.0, 1.0, 100.0]) == [0.0, 0.0, 16.0]


EVEN = (0.5, 0.5)


def _view(now_s: int, asked: list[int], used: list[int] | None = None) -> ControllerView:
    return ControllerView(now_s, 8, used or [0, 0], [0, 0], asked, [1, 1], [0, 0])


def test_filling_from_unequal_starts() -> None:
    assert fill_from(6.0, [10.0, 10.0], [1.0, 2.0], [3.0, 0.0]) == [0.0, 6.0]
    assert fill_from(9.0, [10.0, 10.0], [1.0, 2.0], [3.0, 0.0]) == [1.0, 8.0]
    assert fill_from(9.0, [10.0, 4.0], [1.0, 2.0], [3.0, 0.0]) == [5.0, 4.0]
    assert fill_from(99.0, [10.0, 4.0], [1.0, 0.0], [3.0, 0.0]) == [10.0, 0.0]
    caps, weights = [3.0, 9.0, 0.0, 5.0], [1.0, 2.0, 5.0, 1.5]
    assert fill_from(11.0, caps, weights, [0.0] * 4) == pytest.approx(fill(11.0, caps, weights))


def test_karma_lends_against_credits_and_serves_who_has_most() -> None:
    """8 GPUs, halves, half of each guaranteed: two free credits a quantum. a borrows 5, one of them b's; then both
    request everything, and b, six credits ahead, is served until they are level."""
    karma = Karma(8, EVEN)
    assert karma(_view(0, [8, 1]), EVEN) == [7.0, 1.0]
    assert karma.credits == [-3.0, 3.0]
    assert karma(_view(60, [8, 8]), EVEN) == [7.0, 1.0]  # the same quantum
    due = [karma(_view(CONTROL_S * (1 + i), [8, 8]), EVEN) for i in range(3)]
    assert due == [[2.0, 6.0], [3.0, 5.0], [4.0, 4.0]]
    assert karma.credits == [0.0, 0.0]


def test_stateful_drf_remembers_what_one_had_above_its_share_and_forgets_it() -> None:
    """a had all 8 GPUs for a half-life: half of its excess of 4 is its commitment, and b gets two more now."""
    drf = StatefulDrf(8, EVEN, [0.0, 0.0], half_life_s=HOUR)
    assert drf(_view(0, [8, 0]), EVEN) == [8.0, 0.0]
    assert drf(_view(HOUR, [8, 8], [8 * HOUR, 0]), EVEN) == [3.0, 5.0]
    assert drf.commitment == [2.0, 0.0]
    later = drf(_view(21 * HOUR, [8, 8], [88 * HOUR, 80 * HOUR]), EVEN)
    assert later == pytest.approx([4.0, 4.0], abs=1e-4)
    quota = StatefulDrf(8, EVEN, [4.0, 0.0], half_life_s=HOUR)
    assert quota(_view(HOUR, [8, 8], [16 * HOUR, 0]), EVEN) == [4.0, 4.0]  # whatever it had, its quota stays


def test_the_oracle_weighs_by_what_will_be_wanted() -> None:
    """84 hours ahead, 8 GPUs: b requests nothing now, but in 42 hours it has jobs for 8 GPUs or for 2."""
    work = [(0, 8, 200 * HOUR, 0), (42 * HOUR, 8, 84 * HOUR, 1)]
    assert Oracle(work_of(work), 8, EVEN, (84,))(_view(0, [8, 0])) == [4.0, 4.0]
    work[1] = (42 * HOUR, 2, 84 * HOUR, 1)
    assert Oracle(work_of(work), 8, EVEN, (84,))(_view(0, [8, 0])) == [7.0, 1.0]
    work[1] = (169 * HOUR, 8, HOUR, 1)
    assert Oracle(work_of(work), 8, EVEN, (84,))(_view(0, [8, 0])) == [8.0, 0.004]


GOLDEN = Path(__file__).parents[1] / "golden" / "replays.json"
DAY, GPUS = 86_400, 48


@pytest.fixture(scope="module")
def workload() -> Workload:
    """Two days of three queues, first with idle GPUs, then with twice the work that fits."""
    chance = Random(7)
    rows = []
    for _ in range(360):
        day = int(2 * chance.random())
        gang = (1, 1, 1, 2, 4, 8, 16)[int(7 * chance.random())]
        rows.append((int((day + chance.random() ** 2) * DAY), gang, int(60 + 9000 * (1 + 2 * day) * chance.random())))
    rows.sort()
    queue = [int(3 * chance.random() ** 2) for _ in rows]
    submit, gpus, duration = (list(column) for column in zip(*rows, strict=True))
    return Workload(("a", "b", "c"), submit, gpus, duration, queue)


def _digest(record: ReplayRecord) -> str:
    """Return a digest of every event; shares and weights to nine digits, because the last may depend on the libm."""
    weights, shares = ([[f"{x:.9g}" for x in row] for row in rows] for rows in (record.weights, record.shares))
    backlog = [(jobs.tolist(), left.tolist()) for jobs, left in record.backlog]
    whole = (
        record.used, record.held, backlog, record.started_s, record.finished_s, record.evicted, record.evictions,
        record.lost_gpu_s, record.delivered_gpu_s, weights, shares,
    )  # fmt: skip
    return hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", NAMES)
def test_a_replay_gives_what_it_always_gave(name: str, workload: Workload) -> None:
    """The tables of docs/evaluation.md rest on it. GPUTALLY_UPDATE=1 rewrites the digests."""
    record = run(name, workload, Setup(GPUS, (0.5, 0.3, 0.2)), 2 * DAY)
    kept = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("GPUTALLY_UPDATE"):
        kept[name] = _digest(record)
        GOLDEN.write_text(json.dumps(dict(sorted(kept.items())), indent=2) + "\n")
    assert _digest(record) == kept[name]


@pytest.mark.parametrize("half_life_s", HALF_LIVES_S)
def test_every_burst_gets_in_and_no_guarantee_is_broken(half_life_s: int | None) -> None:
    """Of 100 GPUs, a team bursts from 20 guaranteed to 60, and two teams fill the rest."""
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
    """A team keeps 100 GPUs full with jittered 4-hour jobs; at hour 72 the other submits a gang of 60."""
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
    ours = scheduling_policies.run("default", work, setup, 100 * HOUR)
    assert 0 <= ours.started_s[gang] - work.submit_s[gang] <= HOUR
    assert ours.evicted[gang] == 0
    assert ours.evictions <= 60
    assert scheduling_policies.run("static", work, setup, 100 * HOUR).started_s[gang] == -1


@pytest.mark.parametrize("case", shared_cases("vectors/schedulers.json", lambda it: it["slurm_classic"]))
def test_the_factor_of_the_baseline_is_slurms(case: dict[str, Any]) -> None:
    for line in case["expected_sshare_6dp"].values():
        used, shares = float(line["effectv_usage"]), float(line["norm_shares"])
        expected = float(line["fairshare"]) ** (case["dampening"] if shares else 1)
        assert fair_share_factor(used, shares) == pytest.approx(expected, abs=2e-5)
