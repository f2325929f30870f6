"""Who belongs to whom, for joins in Prometheus: nodes to pools, queues to teams, namespaces to teams.

Asks the ledger; keeps nothing. Series are bounded by the nodes that exist, the queues of the policy, and
MOST_NAMESPACES.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from accountant.books.costs import ALLOCATED
from accountant.ledger import NodeFacts
from accountant.wire import IDLE, Policy, UsageLine

MOST_NAMESPACES = 500
"""Pairs of team and namespace that are shown: those that held most."""


def of_nodes(nodes: Iterable[NodeFacts], now_ms: int) -> Metric:
    """Nodes of the inventory that are not deleted."""
    family = GaugeMetricFamily(
        "gputally_node_info",
        "A node of the inventory, and where it belongs; always 1.",
        labels=["node", "pool", "region", "capacity_type"],
    )
    known = {
        (node.name, node.pool, node.region, node.capacity_type)
        for node in nodes
        if node.deleted_ms is None or node.deleted_ms > now_ms
    }
    for labels in sorted(known):
        family.add_metric(labels, 1)
    return family


def of_queues(policy: Policy | None) -> Metric:
    """Queues of the policy in force."""
    family = GaugeMetricFamily(
        "gputally_queue_info",
        "A queue of the policy, above it its parent, and the team that pays for it; always 1.",
        labels=["queue", "parent", "team"],
    )
    if policy is not None:
        for queue in sorted(policy.queues, key=lambda queue: queue.name):
            family.add_metric([queue.name, queue.parent or "", team_of(policy, queue.name)], 1)
    return family


def team_of(policy: Policy, name: str | None) -> str:
    """The team that a queue or the nearest queue above it names; "" where none does."""
    queues = {queue.name: queue for queue in policy.queues}
    while name is not None and name in queues:
        if queues[name].team is not None:
            return str(queues[name].team)
        name = queues[name].parent
    return ""


def of_namespaces(lines: Iterable[UsageLine]) -> Iterator[tuple[tuple[str, str], int]]:
    """((team, namespace), GPU-µs held) of usage by both: those that held most, sorted by name."""
    held = {
        (line.key["team"], line.key["namespace"]): sum(
            getattr(line.accounts_gpu_us, each) for each in sorted(ALLOCATED)
        )
        for line in lines
        if line.key["team"] != IDLE
    }
    most = sorted(held.items(), key=lambda each: (-each[1], each[0]))[:MOST_NAMESPACES]
    yield from sorted((key, gpu_us) for key, gpu_us in most if gpu_us)


def namespaces_family() -> GaugeMetricFamily:
    """Without samples."""
    return GaugeMetricFamily(
        "gputally_month_namespace_gpu_seconds",
        f"GPU time held in the current month so far by team and namespace, used or not; the {MOST_NAMESPACES} largest.",
        labels=["team", "namespace"],
    )
