"""The case study of docs/evaluation.md: bursts of one team in a cluster that two others keep full.

The cluster has 100 GPUs and three teams, each with 20 GPUs guaranteed. Two teams keep the cluster full with small jobs.
Every two hours the LLM team requests 40 GPUs on top of its 20, all at once, for an hour. With weights 3 : 1 : 1 its
average entitlement is 44 GPUs, a little more than the 40 that it uses on average.

    python -m tests.evaluation.case_study FILE.svg"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from accountant.wire.policy_models import Bounds, Policy, QueuePolicy, TurnPolicy, WindowSpec
from fairshare.simulator.scheduler_engine import replay
from fairshare.simulator.simulated_controller import Feedback
from fairshare.simulator.simulation_model import ReplayPool, ReplayRecord, Rules, Workload
from tests.evaluation.kai_scenarios import whole_gpus

HOUR, GPUS, GUARANTEED, BURST = 3600, 100, 20, 40
TEAMS = ("llm", "vision", "speech")
HOURS = 24
FIRST_BURST_H = 4
WINDOW_S, SLOT_S = 2 * HOUR, HOUR
HALF_LIVES_S = (None, HOUR // 2, HOUR, 4 * HOUR)


@dataclass(frozen=True, slots=True)
class Study:
    """The result of one variant of the case study.

    record: the simulation with gputally's weights.
    partition: the simulation with fixed quotas.
    waits_s: how long each burst waited until all of it ran, in seconds."""

    record: ReplayRecord
    partition: ReplayRecord
    waits_s: tuple[int, ...]

    @property
    def utilisation(self) -> tuple[float, float]:
        """The used fraction of the cluster: (with gputally's weights, with fixed quotas)."""
        whole = GPUS * HOURS * HOUR
        return self.record.delivered_gpu_s / whole, self.partition.delivered_gpu_s / whole


def workload() -> Workload:
    """Return the jobs of a day: more jobs of about 20 minutes than 100 GPUs can run, the jobs on the LLM team's 20
    GPUs, and its bursts."""
    rows = [(0, 10, HOURS * HOUR, 0)] * (GUARANTEED // 10)
    rows += [(at, BURST, SLOT_S, 0) for at in range(FIRST_BURST_H * HOUR, (HOURS - 2) * HOUR, 2 * HOUR)]
    rows += [(0, 1, 60 * i, q) for i in range(1, 60) for q in (1, 2)]
    rows += [(at, 1, 900 + at * 7 % 600, q) for at in range(0, HOURS * HOUR, 24) for q in (1, 2)]
    rows.sort()
    return Workload(TEAMS, *([row[column] for row in rows] for column in range(4)))


def play(half_life_s: int | None) -> Study:
    """Simulate a day with a window of two hours and turns of an hour. The LLM team's queue has `turn: burst`.
    half_life_s: None for no decay."""
    work, deserved, weights = workload(), [float(GUARANTEED)] * 3, [3.0, 1.0, 1.0]
    policy = Policy(
        window=WindowSpec(size=WINDOW_S, half_life=half_life_s),
        bounds=Bounds(interval=SLOT_S // 2),
        turns=TurnPolicy(min_turn=SLOT_S),
        queues=tuple(
            QueuePolicy(name=team, deserved=GUARANTEED, weight=w, turn="burst" if team == "llm" else "gang")
            for team, w in zip(TEAMS, weights, strict=True)
        ),
    )
    pool = ReplayPool(GPUS, deserved, weights, rules=Rules(checkpoint_ms=600_000, restart_ms=60_000, min_runtime_ms=0))
    record = replay(work, pool, HOURS * HOUR, steering=Feedback(policy), dividing=whole_gpus(TEAMS, deserved))
    fixed = ReplayPool(GPUS, deserved, weights, limits=[44, 28, 28], rules=Rules(reclaim=False))
    bursts = [i for i, gpus in enumerate(work.gpus) if gpus == BURST]
    waits = tuple(
        (record.started_s[i] if record.started_s[i] >= 0 else record.end_s) - work.submit_s[i] for i in bursts
    )
    return Study(record, replay(work, fixed, HOURS * HOUR), waits)


def draw_case_study(path: Path) -> None:
    """Draw the GPUs that each team holds over the day, with one panel per half-life, to an SVG file."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "gputally"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(HALF_LIVES_S), 1, figsize=(10, 8), sharex=True, layout="constrained")
    for axis, half_life in zip(axes, HALF_LIVES_S, strict=True):
        study = play(half_life)
        hours = [at / 6 for at in range(len(study.record.held))]
        held = [[row[q] for row in study.record.held] for q in range(3)]
        axis.stackplot(hours, held, labels=TEAMS, colors=("#D55E00", "#0072B2", "#56B4E9"), step="post")
        ours, fixed = study.utilisation
        kind = "no half-life" if half_life is None else f"half-life {half_life / HOUR:g} h"
        axis.set_title(
            f"window 2 h, {kind}: bursts wait {max(study.waits_s) / 60:.0f} min at most; "
            f"utilisation {ours:.1%}, fixed quotas {fixed:.1%}",
            fontsize=9, loc="left",
        )  # fmt: skip
        axis.set_ylabel("GPUs")
        axis.set_ylim(0, GPUS)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(ncols=3, fontsize=8, loc="lower right")
    axes[-1].set_xlabel("hour")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw_case_study(Path(sys.argv[1]))
