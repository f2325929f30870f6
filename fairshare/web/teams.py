"""What of a cycle belongs to some teams: their queues and their own numbers, and no word of another's. Pure.

A queue belongs to a team that it or the nearest queue above it names, as the accountant's books have it. It is shown
to who sees some teams only where all below it is theirs too, because its figures contain those. Sentences of the cycle
speak of siblings, parents and whoever waits; they are left out rather than read.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from accountant.wire import Policy
from fairshare.explain.explaining import QueueAccount, below
from fairshare.web.views import TargetView


def owned(policy: Policy, teams: Collection[str]) -> frozenset[str]:
    """Queues that belong to these teams with all that is below them."""
    queues = {queue.name: queue for queue in policy.queues}

    def theirs(name: str | None) -> bool:
        while name is not None:
            queue = queues[name]
            if queue.team:
                return queue.team in teams
            name = queue.parent
        return False

    return frozenset(name for name in queues if all(theirs(each) for each in below(policy, name)))


def part(target: TargetView, queues: Collection[str]) -> TargetView:
    """What a target shows of these queues."""
    rows = [replace(row, why="") for row in target.rows if row.name in queues]
    top = min((row.depth for row in rows), default=0)
    rows = [replace(row, depth=row.depth - top) for row in rows]
    return replace(target, rows=tuple(rows), conditions=(), degraded={}, unassigned=None)


def own_account(account: QueueAccount) -> QueueAccount:
    """A queue's account without what it says of others: its own level, its standing, what waits in it."""
    return replace(
        account,
        levels=(account.own,),
        published=replace(account.published, obstacles=()),
        sentences=account.sentences[:1],
        cures=(),
    )
