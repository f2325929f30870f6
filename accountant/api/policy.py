"""The policy in force: put by fairshare, dated by the accountant, read by everybody."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response
from pydantic import TypeAdapter

from accountant.api.access import Governing, Reading, of_everyone
from accountant.api.body import read_model
from accountant.api.deps import Deps, Given
from accountant.api.openapi import json_body, refuses
from accountant.api.problems import Refusal
from accountant.wire import Policy, PolicyVersion

router = APIRouter(tags=["policy"])
_POLICY = TypeAdapter(Policy)
_FAR_MS = 253_402_300_800_000
"""The year 10000: later than any policy."""


@router.put(
    "/v1/policy",
    summary="Put a policy into force",
    response_model=PolicyVersion,
    openapi_extra={"requestBody": json_body("Policy")},
    responses=refuses("malformed-body", "too-large", "invalid-body", "ledger-unavailable"),
)
async def put_policy(request: Request, deps: Given, principal: Governing) -> PolicyVersion:
    """In force from now on; what came before keeps its dates. The version in force is answered unchanged."""
    policy = await read_model(deps.intake, request, _POLICY)
    return await asyncio.to_thread(deps.ledger.put_policy, policy, deps.clock.wall_ms(), principal.name)


@router.get("/v1/policy", summary="The policy in force", responses=refuses("not-found"))
async def current_policy(response: Response, deps: Given, principal: Reading) -> PolicyVersion:
    of_everyone(principal)
    versions = await asyncio.to_thread(_versions, deps)
    now = deps.clock.wall_ms()
    in_force = [version for version in versions if version.effective_ms <= now] or versions[:1]
    if not in_force:
        raise Refusal("not-found", "no policy has been put into force yet")
    response.headers["ETag"] = f'"{in_force[-1].version}"'
    return in_force[-1]


@router.get("/v1/policy/versions", summary="Every policy that was in force", responses=refuses())
async def policy_versions(deps: Given, principal: Reading) -> list[PolicyVersion]:
    """Oldest first, each in force until the next one's `effective_ms`."""
    of_everyone(principal)
    return await asyncio.to_thread(_versions, deps)


def _versions(deps: Deps) -> list[PolicyVersion]:
    return deps.ledger.policies(0, _FAR_MS)
