"""Who holds what on a Kubernetes node: the kubelet's devices joined with the API server's pods and resource claims.

It lists and watches only this node's objects, over plain HTTPS without a client library."""

from __future__ import annotations

from pathlib import Path

from agent.holders.protocol import HolderPlugin, HolderSource, NodeSurroundings, SourceCheck
from gputally.base.clock import Clock
from gputally.kubernetes.rights import Rights


def _open(place: str, node: NodeSurroundings) -> HolderSource:
    # The clients of kubelet and API server are read only where they are used.
    from agent.holders.kubelet.kubernetes_source import open_node

    return open_node(place, node)


def _check(socket: Path, clock: Clock) -> SourceCheck:
    from agent.holders.kubelet.kubelet_grpc_client import Kubelet, UnaryChannel

    channel = UnaryChannel(socket, clock)
    try:
        answer = Kubelet(socket, clock, channel).poll()
    finally:
        channel.close()
    return SourceCheck(len(answer.pods), answer.took_ms, answer.failure)


HOLDERS = HolderPlugin(
    name="kubelet",
    open=_open,
    check=_check,
    reaches="connects to the kubelet's PodResources socket; watches pods, this node and resource slices, reads claims",
    page="docs/attribution.md",
    # Each request has a field selector for the agent's own node, which RBAC cannot require.
    rights=(
        Rights("", "pods", "list watch", "labels, owners and queues of the pods of its node", "agent"),
        Rights("resource.k8s.io", "resourceslices", "list watch", "the GPU of a device in a ResourceClaim", "agent"),
        Rights("resource.k8s.io", "resourceclaims", "get", "whether a claim only monitors its devices", "agent"),
        Rights("", "nodes", "list watch", "labels of its node that tell it to close the driver", "agent"),
    ),
)
