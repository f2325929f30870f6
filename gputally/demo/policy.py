"""The demo's fair-share policy: one queue per team, a week of history, weights written to KAI.

Deserved quotas are about a quarter of each team's part, so that most of the cluster moves with history.
"""

from __future__ import annotations

from collections.abc import Sequence

from accountant.wire import Bounds, KaiTarget, Policy, QueuePolicy, Targets, WindowSpec
from agent.units import MS_PER_DAY
from fairshare.model import Claim
from gputally.demo.workload import TEAMS

WINDOW_S = 7 * MS_PER_DAY // 1000
K = 5.0


def teams_policy() -> Policy:
    """The five teams of the generated workload."""
    return _policy([(team.name, float(team.deserved), team.weight) for team in TEAMS])


def equal_policy(teams: Sequence[str], gpus: int) -> Policy:
    """Teams of a trace: equal weights, deserved quota a quarter of an equal part of the GPUs."""
    return _policy([(team, float(gpus // (4 * len(teams))), 1.0) for team in sorted(teams)])


def claims(policy: Policy) -> tuple[Claim, ...]:
    """The queues as the scheduler has them before anybody touches a weight."""
    return tuple(
        Claim(q.name, 0.0, q.deserved, q.limit, q.weight, priority=q.priority, parent=q.parent) for q in policy.queues
    )


def _policy(rows: Sequence[tuple[str, float, float]]) -> Policy:
    return Policy(
        schema=1,
        window=WindowSpec(kind="sliding", size=WINDOW_S),
        measure="allocated",
        k=K,
        min_coverage=0.98,
        bounds=Bounds(min_multiplier=0.2, max_multiplier=4.0, max_step=0.5, deadband=0.02),
        targets=Targets(kai=KaiTarget(mode="weight", apply="enforce")),
        queues=tuple(
            QueuePolicy(name=name, deserved=deserved, weight=weight, team=name, refs=(f"kai:{name}",))
            for name, deserved, weight in rows
        ),
    )
