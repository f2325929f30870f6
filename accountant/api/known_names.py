"""Refuses questions about a team or a job that the ledger has never heard of, and names the nearest that it has.

A mistyped name must not be answered with figures of zero. Reads the ledger: call it in a thread.
"""

from __future__ import annotations

from collections.abc import Iterable

from accountant.api.dependencies import Deps
from accountant.api.problems import Refusal
from accountant.core.near_names import nearest, shown
from accountant.ledger.protocols import JobKey
from accountant.wire.policy_models import IDLE, UNASSIGNED
from accountant.wire.usage_models import Dimension
from gputally.server.tokens_and_grants import Principal


def check_teams(deps: Deps, principal: Principal, teams: Iterable[str]) -> None:
    """Raises Refusal for a team that no policy, namespace, record or adjustment names. A team that the principal is
    bound to is known by that."""
    asked = set(teams) - {IDLE, UNASSIGNED} - (principal.teams or frozenset())
    if not asked or asked <= deps.ledger.teams():
        return
    known = _teams(deps)
    for team in sorted(asked - known):
        raise Refusal("not-found", f"no team {shown(team)} is known{nearest(team, known)}")


def nearest_jobs(deps: Deps, principal: Principal, key: JobKey) -> str:
    """The same of the jobs in the same namespace; nothing for a principal that may see only its own teams."""
    if principal.teams is not None:
        return ""
    start, end = deps.ledger.extent()
    where: dict[Dimension, tuple[str, ...]] = {"cluster": (key.cluster,), "namespace": (key.namespace,)}
    with deps.ledger.moment(start, end) as moment:
        siblings = set(moment.jobs_in(key.cluster, key.namespace))
        if start < end:
            siblings |= {line.key["job"] for line in moment.usage(start, end, ("job",), where)}
    return nearest(key.job, siblings)


def _teams(deps: Deps) -> frozenset[str]:
    """Every team that anything names, now or in the past."""
    start, end = deps.ledger.extent()
    held = {line.key["team"] for line in deps.ledger.usage(start, end, ("team",))} if start < end else set()
    at = deps.clock.wall_ms()
    ruled = {queue.team for dated in deps.ledger.policies(0, at + 1) for queue in dated.policy.queues if queue.team}
    adjusted = {one.team for one in deps.books.books().adjustments}
    return frozenset(held | ruled | adjusted | deps.ledger.teams()) - {IDLE, UNASSIGNED, ""}
