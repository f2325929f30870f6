"""Which resources that pods request are GPUs, or parts of them."""

from __future__ import annotations

from collections.abc import Mapping

GPU_RESOURCES = ("nvidia.com/gpu", "nvidia.com/mig-", "amd.com/gpu", "gpu.intel.com/", "habana.ai/gaudi")
"""Prefixes of the names of resources that are GPUs or parts of one."""
_LIMITS = (
    "nvidia.com/gpumem", "nvidia.com/gpucores", "gpu.intel.com/millicores", "gpu.intel.com/memory.max",
    "gpu.intel.com/tiles", "gpu.intel.com/i915_monitoring", "gpu.intel.com/xe_monitoring",
)  # fmt: skip
"""Prefixes of the names of resources that limit the use of a GPU, or let a monitor read it, and are none themselves."""


def is_gpu_resource(name: str) -> bool:
    return name.startswith(GPU_RESOURCES) and not name.startswith(_LIMITS)


def requested_devices(requests: Mapping[str, str]) -> int | None:
    """The number of GPUs, or parts of them, among a pod's requests; None if none is among them: then it asks by a claim
    or by a label, of which the number is not known. A quantity that is not an integer of at most nine digits counts as
    one."""
    amounts = [amount for name, amount in requests.items() if is_gpu_resource(name)]
    return (
        None
        if not amounts
        else sum(int(amount) if amount.isdecimal() and len(amount) < 10 else 1 for amount in amounts)
    )
