"""The case study as a figure: `python -m scripts.case_study docs/img/case-study.svg` (needs gputally[plots]).

100 GPUs, three teams with 20 guaranteed each. Two keep the cluster full with small jobs; every two hours
the LLM team asks for 40 GPUs on top of its 20, all at once, for a slot of an hour. Weights 3 : 1 : 1 entitle
it to 44 in the mean, a little more than the 40 that its slots come to.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from accountant.wire import Bounds, DeficitPolicy, Policy, QueuePolicy, TurnPolicy, WindowSpec
from fairshare.simulator.dividing import whole_gpus
from fairshare.simulator.feedback import Feedback
from fairshare.simulator.replay import Pool, Record, replay
from fairshare.simulator.workload import Workload

HOUR, GPUS, GUARANTEED, BURST = 3600, 100, 20, 40
TEAMS = ("llm", "vision", "speech")
HOURS = 24
FIRST_BURST_H = 4
WINDOW_S, SLOT_S = 2 * HOUR, HOUR
HALF_LIVES_S = (None, HOUR // 2, HOUR, 4 * HOUR)


@dataclass(frozen=True, slots=True)
class Study:
    """One variant. waits_s: of every burst until all of it runs. record, partition: ours, and fixed quotas."""

    record: Record
    partition: Record
    waits_s: tuple[int, ...]

    @property
    def utilisation(self) -> tuple[float, float]:
        """(ours, fixed quotas), parts of the cluster."""
        whole = GPUS * HOURS * HOUR
        return self.record.delivered_gpu_s / whole, self.partition.delivered_gpu_s / whole


def workload() -> Workload:
    """Jobs of about 20 minutes, more than 100 GPUs can do, the LLM team's standing 20, and its bursts."""
    rows = [(0, 10, HOURS * HOUR, 0)] * (GUARANTEED // 10)
    rows += [(at, BURST, SLOT_S, 0) for at in range(FIRST_BURST_H * HOUR, (HOURS - 2) * HOUR, 2 * HOUR)]
    rows += [(0, 1, 60 * i, q) for i in range(1, 60) for q in (1, 2)]
    rows += [(at, 1, 900 + at * 7 % 600, q) for at in range(0, HOURS * HOUR, 24) for q in (1, 2)]
    rows.sort()
    return Workload(TEAMS, *([row[column] for row in rows] for column in range(4)))


def play(half_life_s: int | None) -> Study:
    """A day under our law, its window two hours long, a turn as long as a slot."""
    work, deserved, weights = workload(), [float(GUARANTEED)] * 3, [3.0, 1.0, 1.0]
    policy = Policy(
        law="deficit",
        window=WindowSpec(size=WINDOW_S, half_life=half_life_s),
        bounds=Bounds(max_step=0.5, deadband=0.0),
        deficit=DeficitPolicy(repay=HOUR, smoothing=HOUR, horizon=2 * HOUR),
        turns=TurnPolicy(min_turn=SLOT_S),
        queues=tuple(
            QueuePolicy(name=team, deserved=GUARANTEED, weight=w) for team, w in zip(TEAMS, weights, strict=True)
        ),
    )
    pool = Pool(GPUS, deserved, weights, checkpoint_s=600, restart_s=60, min_runtime_s=0)
    feedback = Feedback(policy, dict(zip(TEAMS, (0.44, 0.28, 0.28), strict=True)))
    record = replay(work, pool, HOURS * HOUR, steering=feedback, dividing=whole_gpus(TEAMS, deserved))
    fixed = Pool(GPUS, deserved, weights, limits=[44, 28, 28], reclaim=False)
    bursts = [i for i, gpus in enumerate(work.gpus) if gpus == BURST]
    waits = tuple(
        (record.started_s[i] if record.started_s[i] >= 0 else record.end_s) - work.submit_s[i] for i in bursts
    )
    return Study(record, replay(work, fixed, HOURS * HOUR), waits)


def draw(path: Path) -> None:
    """GPUs held by every team over the day, one panel per half-life."""
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
    draw(Path(sys.argv[1]))
