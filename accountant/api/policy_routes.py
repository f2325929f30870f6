"""Serves the policy and the controller's decisions."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response
from pydantic import Field, TypeAdapter

from accountant.api.access_control import PolicyPrincipal, Reading, body, of_everyone
from accountant.api.dependencies import Deps, Given
from accountant.api.problems import Refusal, json_body, refuses
from accountant.api.query_parameters import SpanParams
from accountant.wire.policy_models import Decision, Policy, PolicyVersion
from gputally.server.config_loading import Model

policy_router = APIRouter(tags=["policy"])
_FAR_MS = 253_402_300_800_000
"""The year 10000: later than any policy."""


@policy_router.put(
    "/v1/policy",
    summary="Put a policy into force",
    response_model=PolicyVersion,
    openapi_extra={"requestBody": json_body("Policy")},
    responses=refuses("malformed-body", "too-large", "invalid-body", "ledger-unavailable"),
)
def put_policy(
    policy: Annotated[Policy, body(Policy, "policy")], deps: Given, principal: PolicyPrincipal
) -> PolicyVersion:
    """Puts the policy in force from now on; earlier versions keep their dates. If it is already in force, its version
    is returned unchanged."""
    return deps.ledger.put_policy(policy, deps.clock.wall_ms(), principal.name)


@policy_router.get("/v1/policy", summary="The policy in force", responses=refuses("not-found"))
def current_policy(response: Response, deps: Given, principal: Reading) -> PolicyVersion:
    of_everyone(principal)
    versions = _versions(deps)
    now = deps.clock.wall_ms()
    in_force = [version for version in versions if version.effective_ms <= now] or versions[:1]
    if not in_force:
        raise Refusal("not-found", "no policy has been put into force yet")
    response.headers["ETag"] = f'"{in_force[-1].version}"'
    return in_force[-1]


@policy_router.get("/v1/policy/versions", summary="Every policy that was in force", responses=refuses())
def policy_versions(deps: Given, principal: Reading) -> list[PolicyVersion]:
    """Lists the policies, oldest first; each was in force until the next one's `effective_ms`."""
    of_everyone(principal)
    return _versions(deps)


def _versions(deps: Deps) -> list[PolicyVersion]:
    return deps.ledger.policies(0, _FAR_MS)


decision_router = APIRouter(tags=["decisions"])
MOST_DECISIONS = 10_000
_DECISIONS = TypeAdapter(Annotated[tuple[Decision, ...], Field(max_length=MOST_DECISIONS)])


class Recorded(Model):
    """The number of new decisions; known ones are not changed."""

    recorded: int
    known: int


class DecisionParams(SpanParams):
    kind: Literal["weight", "hold", "preemption"] | None = Field(default=None, description="Only these.")
    subject: str | None = Field(default=None, max_length=500, description="Only about it, by its whole name.")
    cluster: str | None = Field(
        default=None,
        min_length=1,
        max_length=253,
        description="Of the controller of this cluster, or of none that names one.",
    )
    limit: int = Field(default=1_000, ge=1, le=MOST_DECISIONS, description="Decisions, newest first.")


@decision_router.post(
    "/v1/decisions",
    summary="Record decisions",
    openapi_extra={"requestBody": json_body("Decision", many=True)},
    responses=refuses("malformed-body", "too-large", "invalid-body", "ledger-unavailable"),
)
def record(decisions: Annotated[tuple[Decision, ...], body(_DECISIONS, "policy")], deps: Given) -> Recorded:
    """Stores a list of decisions, idempotent by cluster, id and instant."""
    new = deps.ledger.record_decisions(decisions, deps.clock.wall_ms())
    return Recorded(recorded=new, known=len(decisions) - new)


@decision_router.get("/v1/decisions", summary="Decisions, newest first", responses=refuses("invalid-parameter"))
def decisions(asked: Annotated[DecisionParams, Query()], deps: Given, principal: Reading) -> list[Decision]:
    of_everyone(principal)
    # "Until now" includes decisions of the current millisecond.
    start, end, _ = asked.span(deps.clock.wall_ms() + 1, deps.settings.timezone, deps.settings.limits)
    return deps.ledger.decisions(start, end, asked.limit, kind=asked.kind, subject=asked.subject, cluster=asked.cluster)
