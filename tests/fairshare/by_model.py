"""A cluster with two models of GPUs, and usage by model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accountant.wire.policy_models import Measure, Policy, UsageWindow, WindowSpec
from fairshare.controller.control_loop import Controller
from fairshare.controller.cycle_report import CycleReport
from gputally.base.clock import VirtualClock
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import Object
from gputally.testing.fake_accountant import usage_window
from tests.fairshare.builders import fake_pod, node_object, policy_of
from tests.fairshare.conftest import NOW_MS, Accountant
from tests.fairshare.observations import pods_of

H100, A10 = "NVIDIA-H100-80GB-HBM3", "NVIDIA-A10"


LABEL = "nvidia.com/gpu.product"


HOUR_US = 3_600_000_000


class ByModel(Accountant):
    """A fake accountant that knows usage by GPU model, as parts of the capacity of one hour of eight GPUs each."""

    def __init__(self, **used: Mapping[str, float]) -> None:
        super().__init__()
        self.by_model = used

    def window(self, spec: WindowSpec, measure: Measure, at_ms: int, min_coverage: float) -> UsageWindow:
        counted = [model for model in ("H100", "A10") if spec.gpu_weights.get(model, 1)]
        usage: dict[str, int] = {}
        for model in counted:
            for queue, part in self.by_model.get(model, {}).items():
                usage[queue] = usage.get(queue, 0) + round(part * 8 * HOUR_US)
        version = self.policies[-1].version() if self.policies else None
        unit = "weighted_gpu_us" if spec.gpu_weights else "gpu_us"
        said = {"policy_version": version, "watermark_ms": at_ms, "measure": measure, "unit": unit}
        return usage_window(usage, 8 * HOUR_US * len(counted), end_ms=at_ms, **said)


def by_model_policy(prefix: str = "fake-pods", k: float = 0.0, **more: Any) -> Policy:
    """Two teams with four of eight H100 and four of eight A10 each."""
    quotas = {"H100": {"deserved": 4}, "A10": {"deserved": 4}}
    queues = [{"name": name, "refs": [f"{prefix}:{name}"], "gpu_models": quotas} for name in "ab"]
    return policy_of(queues, k=k, preemption={"mode": "enforce", "min_runtime": 0, "wait": 0}, **more)


def two_models() -> list[Object]:
    return [node_object("h", 8, labels={LABEL: H100}), node_object("t", 8, labels={LABEL: A10})]


def one_cycle(cluster: MemoryCluster, policy: Policy, accountant: Accountant | None = None) -> CycleReport:
    accountant = accountant or ByModel()
    return Controller(policy, accountant, cluster, VirtualClock(NOW_MS), pods=lambda: pods_of(cluster)).cycle()


def waiting_for(name: str, queue: str, gpus: int, model: str | None) -> Object:
    pod = fake_pod(name, queue, node="", gpus=gpus)
    if model is not None:
        pod["spec"]["nodeSelector"] = {LABEL: model}
    return pod
