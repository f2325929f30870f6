"""KAI's questions of reclaim: its filter of victims, and whether bundles may all be taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fairshare.core.queues_and_weights import UNLIMITED
from fairshare.preemption.reclaim_rules_and_limits import (
    EPSILON,
    Account,
    Amounts,
    Claimant,
    TakenBundles,
    queues_to_compare,
    within_quota,
)


def may_lose(asker: Claimant, victim: str, accounts: Mapping[str, Account]) -> bool:
    """Whether KAI's filter passes the jobs of a leaf queue."""
    mine, theirs = queues_to_compare(asker.queue, victim, accounts)
    stocks = accounts[theirs].stocks
    if not within_quota(asker, accounts[mine]):
        return any(stock.allocated > stock.allocatable + EPSILON for stock in stocks.values())
    asked = [
        stock for name, stock in stocks.items() if asker.required.get(name, 0.0) > 0 and stock.deserved != UNLIMITED
    ]
    over = any(stock.allocated > stock.deserved + EPSILON for stock in asked)
    return over or not any(stock.allocated < stock.deserved - EPSILON for stock in asked)


def reclaimable(
    asker: Claimant,
    victims: Sequence[tuple[str, Sequence[Amounts]]],
    accounts: Mapping[str, Account],
    saturation: float = 1.0,
) -> bool:
    """Whether these bundles, in this order, may all be taken for the asker. victims: by leaf queue."""
    taking = TakenBundles(asker, accounts)
    for queue, bundles in victims:
        for bundle in bundles:
            if taking.right(queue) is None:
                return False
            taking.take(queue, bundle)
    return taking.fair(saturation)
