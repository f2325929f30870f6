"""Budgets that act: which queues get nothing over their quota, because what they may spend is spent. Pure.

Unknown is not exhausted: a budget whose spend has no price stays without effect. Only the over-quota weight
goes; the deserved quota is a guarantee and stays.
"""

from __future__ import annotations

from collections.abc import Iterable

from accountant.wire import BudgetState, Policy


def acts(policy: Policy) -> bool:
    """Whether any budget of the policy moves weights."""
    return any(budget.exhausted == "no-over-quota" for budget in policy.budgets)


def exhausted(policy: Policy, states: Iterable[BudgetState]) -> frozenset[str]:
    """Queues under a budget that acts and is used up: the budget's own queue, or every queue of its team."""
    acting = {budget.name: budget for budget in policy.budgets if budget.exhausted == "no-over-quota"}
    found: set[str] = set()
    for state in states:
        budget = acting.get(state.name)
        if budget is None or state.spent is None or state.spent < budget.limit:
            continue
        if budget.queue is not None:
            found.add(budget.queue)
        else:
            found |= {queue.name for queue in policy.queues if queue.team == budget.team}
    return frozenset(found)
