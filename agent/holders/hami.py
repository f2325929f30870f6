"""HAMi's virtual devices. Source: Project-HAMi, resource names."""

from __future__ import annotations

from agent.holders.protocol import HolderPlugin, VirtualDevices

HOLDERS = HolderPlugin(
    name="hami",
    reaches="nothing of its own: it reads names and limits that the kubelet and the API server list",
    page="docs/attribution.md",
    parts=VirtualDevices("nvidia.com/gpu", "nvidia.com/gpucores", "nvidia.com/gpumem", "nvidia.com/gpumem-percentage"),
)
