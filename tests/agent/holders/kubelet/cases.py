"""The tasks of the kubelet's source in the tests of all tasks of the agent."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

from agent.holders.kubelet.device_allocations import ResourceClaims, SliceStore
from agent.holders.kubelet.kubelet_grpc_client import Kubelet
from agent.holders.kubelet.kubernetes_source import KubernetesSource, NodeStore
from agent.holders.kubelet.lean_list_watch import PATH, ApiServer, LeanReflector, PodStore
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import VirtualClock
from tests.agent.task_steps import Asked, Step


class AskedClaims(ResourceClaims):
    """Requests claims although no pod names one."""

    def __init__(self, step: Step, clock: VirtualClock) -> None:
        super().__init__(cast(ApiServer, Asked(step)), clock)
        self.step = step  # type: ignore[method-assign]


def _started(name: str, step: Step, clock: VirtualClock, tasks: BackgroundTasks) -> Callable[[], None]:
    """Start the source with this task's step; return the function that ends it."""
    api = cast(ApiServer, Asked(step))
    other = Step("hangs")
    kubelet = Kubelet(Path("/none"), clock, Asked(step if name == "kubelet" else other))
    followed: dict[str, Any] = {}
    if name == "pods":
        pods = PodStore("n", (), clock, lambda: None)
        followed["pods"] = (pods, LeanReflector(api, PATH, "spec.nodeName=n", pods, clock))
    elif name == "node":
        node = NodeStore("n", lambda before, reason: None)
        followed["node"] = (node, LeanReflector(api, PATH, "metadata.name=n", node, clock))
    elif name == "slices":
        slices = SliceStore()
        followed["slices"] = (slices, LeanReflector(api, PATH, "spec.nodeName=n", slices, clock))
    elif name == "claims":
        followed["claims"] = AskedClaims(step, clock)
    source = KubernetesSource(kubelet, clock, **followed, tasks=tasks)
    source.start()

    def end() -> None:
        other.released.set()
        source.close()

    return end


TASKS = {name: partial(_started, name) for name in ("kubelet", "pods", "node", "slices", "claims")}
