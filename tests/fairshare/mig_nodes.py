"""Nodes whose GPUs are cut into instances."""

from __future__ import annotations

from collections.abc import Mapping

from fairshare.core.gpu_demand import read_pod
from fairshare.core.queues_and_weights import Pod
from gputally.kubernetes.objects import Object

NVL, PRO_6000, PRO_5000 = (
    "NVIDIA-H100-NVL",
    "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition",
    "NVIDIA-RTX-PRO-5000-Blackwell",
)


def node(name: str, product: str, instances: Mapping[str, int]) -> Object:
    listed = {f"nvidia.com/mig-{profile}": str(count) for profile, count in instances.items()}
    ready = [{"type": "Ready", "status": "True"}]
    return {
        "metadata": {"name": name, "labels": selector_of(product)},
        "status": {"allocatable": listed, "capacity": listed, "conditions": ready},
    }


def selector_of(product: str) -> dict[str, str]:
    return {"nvidia.com/gpu.product": product} if product else {}


BOTH = [
    node("nvl", NVL, {"1g.24gb": 3, "2g.24gb": 1}),
    node("pro", PRO_6000, {"1g.24gb": 2, "2g.48gb": 1}),
    node("small", PRO_5000, {"2g.48gb": 2}),
]


def mig_pod(name: str, profile: str, on: str = "", count: int = 1, product: str = "") -> Pod:
    found = read_pod(
        {
            "metadata": {"name": name, "namespace": "ns", "uid": name},
            "spec": {
                "schedulerName": "fake-scheduler",
                "nodeName": on,
                "nodeSelector": selector_of(product),
                "containers": [{"resources": {"limits": {f"nvidia.com/mig-{profile}": str(count)}}}],
            },
        }
    )
    assert found is not None
    return found
