"""The policies that are compared: feedback laws on a reclaiming scheduler, and schedulers of other kinds.

Feedback laws (`static`, `kai-K[-HALFLIFE]`, `fairtree`, `multifactor`, `deficit`) publish weights through
the controller's own code. The others are sketches of a way of scheduling, not of a product: `fifo` one
line for all, `easy` the same with EASY backfilling; `partition` everybody his fixed part; `order-multifactor`,
`order-fairtree` (with EASY backfilling, as on Slurm) and `order-kueue` serve queues by past usage and never preempt;
`karma`, `sdrf` and the all-knowing `oracle` are those of `baselines`. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from accountant.wire import Bounds, DeficitPolicy, Policy, QueuePolicy, WindowSpec, parse_duration
from agent.units import apportion
from fairshare.multifactor import fair_share_factor
from fairshare.simulator.baselines import Karma, Oracle, StatefulDrf
from fairshare.simulator.feedback import Feedback, Usage
from fairshare.simulator.replay import Dividing, Pool, Ranking, Record, View, replay
from fairshare.simulator.workload import Workload

NAMES = (
    "fifo", "easy", "partition", "order-multifactor", "order-fairtree", "order-kueue", "static", "kai-0.5", "kai-1",
    "kai-2", "kai-5", "kai-1-24h", "multifactor", "fairtree", "karma", "sdrf", "deficit", "oracle",
)  # fmt: skip
LAWS = ("static", "kai-1", "kai-5", "kai-1-24h", "multifactor", "fairtree", "deficit")
"""The ones that publish weights, as far as a quick comparison goes."""
FREE = Bounds(min_multiplier=1e-4, max_multiplier=1e4, max_step=1e9, deadband=0.0)
"""Baselines move as far and as fast as their formula says."""
DEFAULT = Bounds(min_multiplier=0.1, max_multiplier=8.0, max_step=0.5, deadband=0.0)
"""What the default law runs under: the controller's usual step, its own quiet zone as deadband."""
_KAI = re.compile(r"kai-(\d+(?:\.\d+)?)(?:-(\d+[a-z]+))?")
_ORDER_HALF_LIFE_S = 7 * 86_400
_LINE_DEPTH = 256
"""How far one line for all is looked through for backfilling; Slurm's default is of this order."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A cluster for a workload. share: of each queue, > 0, in the workload's order, adding up to 1.
    guaranteed: part of its share that is a deserved quota."""

    capacity: int
    share: Sequence[float]
    guaranteed: float = 0.5

    def pool(self) -> Pool:
        deserved = [self.guaranteed * part * self.capacity for part in self.share]
        return Pool(self.capacity, deserved, list(self.share))


def unknown(name: str) -> bool:
    """Whether nothing goes by this name."""
    return name not in NAMES and not _KAI.fullmatch(name)


def run(
    name: str,
    workload: Workload,
    setup: Setup,
    end_s: int,
    *,
    settings: DeficitPolicy | None = None,
    progress: Callable[[float], None] | None = None,
) -> Record:
    """Replay a workload under a policy of `NAMES` (any k and half-life after `kai-`). Raises ValueError."""
    if unknown(name):
        raise ValueError(f"no policy {name!r}; one of {', '.join(NAMES)}")
    pool = setup.pool()
    if name == "fifo":
        pool = replace(pool, reclaim=False, one_line=True)
        return replay(workload, pool, end_s, progress=progress)
    if name == "easy":
        pool = replace(pool, reclaim=False, one_line=True, backfill=True, scan_depth=_LINE_DEPTH)
        return replay(workload, pool, end_s, progress=progress)
    if name == "partition":
        parts = apportion(setup.capacity, [round(part * 1_000_000) for part in setup.share])
        return replay(workload, replace(pool, reclaim=False, limits=parts), end_s, progress=progress)
    if name == "static":
        return replay(workload, pool, end_s, progress=progress)
    if name.startswith("order-"):
        ranking, backfill = _ranking(name, setup), name != "order-kueue"
        pool = replace(pool, reclaim=False, backfill=backfill)
        return replay(workload, pool, end_s, ranking=ranking, progress=progress)
    if name == "oracle":
        oracle = Oracle(workload, setup.capacity, setup.share)
        return replay(workload, pool, end_s, steering=oracle, progress=progress)
    if name in ("karma", "sdrf"):
        dividing: Dividing = Karma(setup.capacity, setup.share, setup.guaranteed)
        if name == "sdrf":
            dividing = StatefulDrf(setup.capacity, setup.share, pool.deserved)
        return replay(workload, pool, end_s, dividing=dividing, progress=progress)
    policy = law_policy(name, workload.queues, setup, settings)
    targets = dict(zip(workload.queues, setup.share, strict=True))
    return replay(workload, pool, end_s, steering=Feedback(policy, targets), progress=progress)


def law_policy(name: str, queues: Sequence[str], setup: Setup, settings: DeficitPolicy | None = None) -> Policy:
    """The policy file that a feedback law of this name stands for."""
    members = tuple(
        QueuePolicy(name=queue, weight=part, deserved=setup.guaranteed * part * setup.capacity)
        for queue, part in zip(queues, setup.share, strict=True)
    )
    if found := _KAI.fullmatch(name):
        half_life = parse_duration(found[2]) if found[2] else None
        window = WindowSpec.model_validate({"half_life": half_life})
        return Policy(law="kai", k=float(found[1]), window=window, bounds=FREE, queues=members)
    if name == "deficit":
        window = WindowSpec(half_life=30 * 3600)
        chosen = settings or DeficitPolicy()
        return Policy(law="deficit", window=window, bounds=DEFAULT, deficit=chosen, queues=members)
    law: Mapping[str, object] = {"law": name, "bounds": FREE, "queues": members}
    return Policy.model_validate(law)


def _ranking(name: str, setup: Setup) -> Ranking:
    """Queues by what they used, decayed with a week's half-life, against their share."""
    queues = len(setup.share)
    usage = Usage(queues, 3 * _ORDER_HALF_LIFE_S, _ORDER_HALF_LIFE_S)
    waited: list[int] = [0] * queues

    def rank(view: View) -> list[float]:
        used, possible = usage.at(view)
        parts = [mine / possible if possible > 0 else 0.0 for mine in used]
        if name == "order-fairtree":
            return [part / share for part, share in zip(parts, setup.share, strict=True)]
        if name == "order-kueue":
            # The entry penalty: what stands admitted counts as if it had been used for a sampling interval.
            return [
                part / share + held / view.capacity / share / 1e3
                for part, share, held in zip(parts, setup.share, view.held, strict=True)
            ]
        for q in range(queues):
            waited[q] = waited[q] + 600 if view.asked[q] > view.held[q] else 0
        return [
            -fair_share_factor(part, share) - min(1.0, since / _ORDER_HALF_LIFE_S)
            for part, share, since in zip(parts, setup.share, waited, strict=True)
        ]

    return rank
