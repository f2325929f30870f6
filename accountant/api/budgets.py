"""GET /v1/budgets: every budget of the policy in force, what is spent of it, and what the month will come to."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter

from accountant.api.access import Reading
from accountant.api.deps import Given
from accountant.api.openapi import refuses
from accountant.books.budgets import states
from accountant.periods import Month
from accountant.wire import BudgetState

router = APIRouter(tags=["figures"])


@router.get("/v1/budgets", summary="Budgets and what is spent of them", responses=refuses("ledger-unavailable"))
async def budgets(deps: Given, principal: Reading) -> list[BudgetState]:
    """Of the current month, in the policy's order; a caller of some teams sees those teams' budgets only."""
    now, settings = deps.clock.wall_ms(), deps.settings

    def read() -> list[BudgetState]:
        policies = deps.ledger.policies(now, now + 1)
        if not policies:
            return []
        month = Month.of(now, settings.zone)
        return states(deps.ledger, deps.book(), policies[-1].policy, month, now, settings.timezone)

    found = await asyncio.to_thread(read)
    return [state for state in found if principal.teams is None or state.team in principal.teams]
