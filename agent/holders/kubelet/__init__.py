"""Who holds what on a Kubernetes node: the kubelet's devices joined with the API server's pods and resource claims.

It lists and watches only this node's objects, over plain HTTPS without a client library."""

from __future__ import annotations

from agent.holders.protocol import HolderPlugin, HolderSource, NodeSurroundings


def _open(place: str, node: NodeSurroundings) -> HolderSource:
    # The clients of kubelet and API server are read only where they are used.
    from agent.holders.kubelet.kubernetes_source import open_node

    return open_node(place, node)


HOLDERS = HolderPlugin(
    name="kubelet",
    open=_open,
    reaches="connects to the kubelet's PodResources socket; watches pods, this node and resource slices, reads claims",
    page="docs/attribution.md",
)
