"""Walks the policy's tree of queues."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from accountant.wire.policy_models import Policy, QueuePolicy


class PolicyTree:
    """The policy's queues as a tree.

    queues: by name.
    children: by parent, None for the roots, siblings in the order of the policy."""

    def __init__(self, policy: Policy) -> None:
        self.queues: Mapping[str, QueuePolicy] = {queue.name: queue for queue in policy.queues}
        self.children: dict[str | None, list[QueuePolicy]] = {}
        for queue in policy.queues:
            self.children.setdefault(queue.parent, []).append(queue)

    def upwards(self, name: str) -> Iterator[QueuePolicy]:
        """Yield the queue, its parent and so on to the root."""
        at: str | None = name
        while at is not None and at in self.queues:
            yield self.queues[at]
            at = self.queues[at].parent

    def path(self, name: str) -> tuple[QueuePolicy, ...]:
        """Return the queues from the root to the queue. Raises KeyError for a queue that the policy does not have."""
        return tuple(reversed(list(self.upwards(self.queues[name].name))))

    def downwards(self, name: str | None = None) -> Iterator[tuple[int, QueuePolicy]]:
        """Yield (depth, queue) of everything below a queue, or of the whole tree, every queue after its parent."""
        pending = [(0, queue) for queue in reversed(self.children.get(name, ()))]
        while pending:
            depth, queue = pending.pop()
            yield depth, queue
            pending += [(depth + 1, child) for child in reversed(self.children.get(queue.name, ()))]

    def family(self, name: str) -> frozenset[str]:
        """Return the queue and all queues below it."""
        return frozenset((name, *(queue.name for _, queue in self.downwards(name))))

    def leaves(self, name: str | None = None) -> list[QueuePolicy]:
        """Return the queues without children below a queue, or of the whole tree, in the order of the tree."""
        return [queue for _, queue in self.downwards(name) if queue.name not in self.children]

    def team(self, name: str) -> str | None:
        """Return the team of the queue, or of the nearest queue above it with a team."""
        return next((queue.team for queue in self.upwards(name) if queue.team), None)

    def sum_up(self, own: Mapping[str, float]) -> dict[str, float]:
        """Add the descendants' amounts to each queue's own, for every queue of the policy that has any."""
        total: dict[str, float] = {}
        for name in sorted(own):
            for queue in self.upwards(name):
                total[queue.name] = total.get(queue.name, 0.0) + own[name]
        return total
