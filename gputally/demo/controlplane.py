"""The simulated cluster's API server, and the scheduler's dealings with it.

KAI's queue controller writes what queues hold and ask for into `Queue.status`; its scheduler reads
`overQuotaWeight` back. Who changes that weight, and why, is not known here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accountant.wire import Policy
from fairshare.adapters.kai import KINDS, QUEUE, SHARD
from fairshare.kube.kinds import CONFIG_MAP, NODE, Object
from fairshare.kube.memory import MemoryCluster
from fairshare.kube.quantities import GPU
from fairshare.simulator.cluster import WHOLE, NodeSpec
from fairshare.simulator.queues import QueueState

QUEUE_CONTROLLER = "queue-controller"
NODE_CONTROLLER = "kubelet"


class ControlPlane:
    """Queues, nodes and KAI's shard in a `MemoryCluster`."""

    def __init__(self, nodes: Sequence[NodeSpec], policy: Policy) -> None:
        self.cluster = MemoryCluster([*KINDS, NODE, CONFIG_MAP])
        self._nodes = {node.name: node for node in nodes}
        self._states: dict[str, QueueState] = {}
        for queue in policy.queues:
            gpu = {"quota": queue.deserved, "overQuotaWeight": queue.weight, "limit": queue.limit}
            spec: dict[str, Any] = {"priority": queue.priority, "resources": {"gpu": gpu}}
            self._put(QUEUE.api_version, QUEUE.kind, queue.name, spec)
        self._put(SHARD.api_version, SHARD.kind, "default", {"kValue": 0})
        for node in nodes:
            self._put(NODE.api_version, NODE.kind, node.name, {})
            self.node_ready(node.name, ready=True)

    def node_ready(self, name: str, *, ready: bool) -> None:
        """What the node controller says of a node."""
        whole = sum(shape == WHOLE for gpu in self._nodes[name].gpus for shape in gpu.shapes)
        status = {
            "allocatable": {GPU: str(whole)},
            "conditions": [{"type": "Ready", "status": "True" if ready else "Unknown"}],
        }
        self._put_status(NODE.api_version, NODE.kind, name, status, NODE_CONTROLLER)

    def report(self, states: Mapping[str, QueueState]) -> None:
        """The queue controller's part: what changed since the last time."""
        for name, state in sorted(states.items()):
            if self._states.get(name) != state:
                amounts = {
                    "requested": {GPU: str(state.requested)},
                    "allocated": {GPU: str(state.allocated)},
                    "allocatedNonPreemptible": {GPU: str(state.allocated_non_preemptible)},
                }
                self._put_status(QUEUE.api_version, QUEUE.kind, name, amounts, QUEUE_CONTROLLER)
        self._states = dict(states)

    def weights(self) -> dict[str, float]:
        """Over-quota weights as they stand now."""
        return {
            queue["metadata"]["name"]: float(queue["spec"]["resources"]["gpu"]["overQuotaWeight"])
            for queue in self.cluster.list(QUEUE)
        }

    def _put(self, api_version: str, kind: str, name: str, spec: Mapping[str, Any]) -> None:
        obj: Object = {"apiVersion": api_version, "kind": kind, "metadata": {"name": name}, "spec": spec}
        self.cluster.load([obj])

    def _put_status(self, api_version: str, kind: str, name: str, status: Mapping[str, Any], manager: str) -> None:
        obj: Object = {"apiVersion": api_version, "kind": kind, "metadata": {"name": name}, "status": status}
        self.cluster.apply(obj, field_manager=manager, subresource="status")
