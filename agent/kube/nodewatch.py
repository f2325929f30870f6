"""What this node's labels ask of whoever holds its driver: when to let go, and how replicas are shared.

NVIDIA's operator and MIG manager announce on the node what they are about to do, and fail while any process has
the driver open. Their labels, each with its source:

| Label | Driver let go while it is |
|---|---|
| `nvidia.com/gpu-driver-upgrade-state` | one of `…-deletion-`, `drain-`, `pod-restart-`, `reboot-required` |
| `nvidia.com/mig.config.state` | `pending`, `rebooting` |
| `nvidia.com/gpu.deploy.*` | `paused-for-…` (driver upgrade, MIG change) |
| `nvidia.com/gpu.deploy.client` | anything but `true` |

Sources: NVIDIA GPU Operator, "GPU Driver Upgrades"; NVIDIA/mig-parted reconfigure-mig; NVIDIA/k8s-driver-manager;
GPU Operator 26.7 for `gpu.deploy.client`; NVIDIA/gpu-feature-discovery and GKE for the sharing strategy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from agent.kube import apijson
from agent.wire import SharingMode

log = logging.getLogger("agent.kube.nodewatch")

PATH = "/api/v1/nodes"
_UPGRADE = "nvidia.com/gpu-driver-upgrade-state"
_UPGRADING = frozenset({"pod-deletion-required", "drain-required", "pod-restart-required", "reboot-required"})
_MIG = "nvidia.com/mig.config.state"
_RECONFIGURING = frozenset({"pending", "rebooting"})
_DEPLOY, _PAUSED = "nvidia.com/gpu.deploy.", "paused-for-"
_CLIENT = "nvidia.com/gpu.deploy.client"
_STRATEGIES = ("nvidia.com/gpu.sharing-strategy", "cloud.google.com/gke-gpu-sharing-strategy")


def release_reason(labels: Mapping[str, str]) -> str:
    """The label that asks for the driver, as `key=value`; "" where none does."""
    for key in sorted(labels):
        value = labels[key]
        if (
            (key == _UPGRADE and value in _UPGRADING)
            or (key == _MIG and value in _RECONFIGURING)
            or (key.startswith(_DEPLOY) and value.startswith(_PAUSED))
            or (key == _CLIENT and value != "true")
        ):
            return f"{key}={value}"[:128]
    return ""


def replica_mode(labels: Mapping[str, str]) -> SharingMode:
    """How the replicas of a device share it."""
    return "mps" if any(labels.get(key) == "mps" for key in _STRATEGIES) else "time-slicing"


class NodeStore:
    """`agent.kube.reflector.Store` of one node. on_release: told the reason to let go of the driver whenever it
    changes, "" when there is none any more. A node that is gone or unknown asks for nothing."""

    def __init__(self, node: str, on_release: Callable[[str], None]) -> None:
        self._node = node
        self._on_release = on_release
        self._labels: Mapping[str, str] = {}
        self._reason = ""

    @property
    def labels(self) -> Mapping[str, str]:
        return self._labels

    def replace(self, items: Sequence[bytes]) -> None:
        """See agent.kube.reflector.Store."""
        self._labels = {}
        for item in items:
            self._take(item)
        self._decide()

    def apply(self, change: str, item: bytes) -> None:
        """See agent.kube.reflector.Store."""
        if change == "DELETED":
            self._labels = {}
        else:
            self._take(item)
        self._decide()

    def _take(self, item: bytes) -> None:
        try:
            meta = apijson.decode(item, apijson.Node).metadata
        except apijson.Unreadable as error:
            log.warning("a node that cannot be read", extra={"reason": str(error)[:200]})
            return
        if meta.name == self._node:
            self._labels = meta.labels or {}

    def _decide(self) -> None:
        reason = release_reason(self._labels)
        if reason != self._reason:
            log.warning("driver let go" if reason else "driver taken again", extra={"label": reason or self._reason})
            self._reason = reason
            self._on_release(reason)
