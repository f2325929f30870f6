"""A replay gives what it always gave: the tables of docs/evaluation.md rest on it.

Whoever makes the scheduler quicker changes no digest; whoever changes what it decides, or a law, writes them anew
(GPUTALLY_UPDATE=1) and makes the tables again."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from random import Random

import pytest

from fairshare.simulator.scheduling_policies import NAMES, Setup, run
from fairshare.simulator.simulation_model import Record, Workload

GOLDEN = Path(__file__).parents[1] / "golden" / "replays.json"
DAY, GPUS = 86_400, 48


def _workload() -> Workload:
    """Two days of three queues, at first with idle GPUs, then with twice the work that can be done."""
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


def _digest(record: Record) -> str:
    """Of everything that happened; shares and weights to nine digits, since a libm may differ in the last."""
    weights, shares = ([[f"{x:.9g}" for x in row] for row in rows] for rows in (record.weights, record.shares))
    backlog = [(jobs.tolist(), left.tolist()) for jobs, left in record.backlog]
    whole = (
        record.used, record.held, backlog, record.started_s, record.finished_s, record.evicted, record.evictions,
        record.lost_gpu_s, record.delivered_gpu_s, weights, shares,
    )  # fmt: skip
    return hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:16]


@pytest.fixture(scope="module")
def workload() -> Workload:
    return _workload()


@pytest.mark.parametrize("name", NAMES)
def test_a_replay_gives_what_it_always_gave(name: str, workload: Workload) -> None:
    record = run(name, workload, Setup(GPUS, (0.5, 0.3, 0.2)), 2 * DAY)
    kept = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("GPUTALLY_UPDATE"):
        kept[name] = _digest(record)
        GOLDEN.write_text(json.dumps(dict(sorted(kept.items())), indent=2) + "\n")
    assert _digest(record) == kept[name]
