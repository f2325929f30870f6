"""The simulated cluster's node and namespace facts, as an API server's informers would know them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from accountant.ledger import Down, Facts, NamespaceFacts, NodeFacts
from fairshare.simulator.cluster import NodeSpec
from gputally.demo.cluster import CLUSTER, REGION


class SimulatedInventory:
    """accountant.ledger.Inventory, told by the simulation when nodes go and come."""

    def __init__(self, nodes: Sequence[NodeSpec], teams: Sequence[str]) -> None:
        self._nodes = {
            node.name: NodeFacts(
                cluster=CLUSTER,
                name=node.name,
                pool=node.pool,
                region=REGION,
                zone=f"{REGION}a",
                capacity_type="spot" if node.pool == "spot" else "on-demand",
            )
            for node in nodes
        }
        self._namespaces = tuple(NamespaceFacts(CLUSTER, team, team) for team in sorted(teams))

    def node_down(self, name: str, at_ms: int, reason: str) -> None:
        """The node is not ready from `at_ms` on."""
        node = self._nodes[name]
        self._nodes[name] = replace(node, down=(*node.down, Down(at_ms, None, reason)))

    def node_up(self, name: str, at_ms: int) -> None:
        """The node is ready again."""
        node = self._nodes[name]
        self._nodes[name] = replace(node, down=(*node.down[:-1], replace(node.down[-1], end_ms=at_ms)))

    def read(self, now_ms: int) -> Facts:  # noqa: ARG002 - what lies in the future has not been told yet
        """Everything known by now."""
        return Facts(nodes=tuple(self._nodes[name] for name in sorted(self._nodes)), namespaces=self._namespaces)

    def taken(self) -> None:
        """Every reading is whole."""
