"""Pods whose GPUs are allocated by ResourceClaims, and what an index of pods has after they arrived."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fairshare.controller.claimed_pods import ClaimedPods
from fairshare.core.device_claims import CLAIMS, TEMPLATES, read_claim, read_class, read_template
from fairshare.core.gpu_demand import read_claiming
from fairshare.targets.pod_index import PodIndex
from gputally.kubernetes.objects import Object
from tests.fairshare.builders import object_of, pod_object

GPU_CLASS = "gpu.nvidia.com"


def device_request(version: str, count: int = 1, *, of: str = GPU_CLASS, **more: Any) -> dict[str, Any]:
    """A request in the form of a version of the API."""
    wanted = {"deviceClassName": of, "allocationMode": "ExactCount", "count": count, **more}
    return {"name": "r", **wanted} if version == "v1beta1" else {"name": "r", "exactly": wanted}


def claim_object(name: str, *requests: Any, on: str = "", devices: tuple[str, ...] = (), version: str = "v1") -> Object:
    """A claim, which has these devices of a node if one is given."""
    kind = next(kind for kind in CLAIMS if kind.api_version.endswith(f"/{version}"))
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [on]}]}
    results = [{"request": "r", "driver": GPU_CLASS, "pool": on, "device": device} for device in devices]
    allocation = {"devices": {"results": results}, "nodeSelector": {"nodeSelectorTerms": [term]}}
    spec = {"devices": {"requests": list(requests) or [device_request(version)]}}
    return object_of(kind, name, spec, {"allocation": allocation} if on else {}, uid=f"claim-{name}")


def claim_template(name: str, *requests: Any, version: str = "v1") -> Object:
    kind = next(kind for kind in TEMPLATES if kind.api_version.endswith(f"/{version}"))
    return object_of(kind, name, {"spec": {"devices": {"requests": list(requests)}}}, uid=f"template-{name}")


def claiming_pod(name: str, *, claim: str = "", template: str = "", made: str = "", node: str = "") -> Object:
    pod = pod_object(name, gpus=0, node=node)
    named = {"resourceClaimName": claim} if claim else {"resourceClaimTemplateName": template}
    pod["spec"]["resourceClaims"] = [{"name": "gpus", **named}]
    if made:
        pod["status"]["resourceClaimStatuses"] = [{"name": "gpus", "resourceClaimName": made}]
    return pod


class Fed:
    """The pods of a cluster as the index has them, after objects have arrived."""

    def __init__(self, *objects: Object) -> None:
        self.index = PodIndex()
        self.pods = ClaimedPods(self.index.change)
        for obj in objects:
            self.put(obj)

    def put(self, obj: Object, *, gone: bool = False) -> None:
        feed: dict[str, tuple[Callable[[str, Any], None], Callable[[Object], Any]]] = {
            "Pod": (self.pods.pod_changed, read_claiming),
            "ResourceClaim": (self.pods.claim_changed, read_claim),
            "ResourceClaimTemplate": (self.pods.template_changed, read_template),
            "DeviceClass": (self.pods.class_changed, read_class),
        }
        changed, read = feed[obj["kind"]]
        changed(obj["metadata"]["uid"], None if gone else read(obj))

    def held(self) -> dict[str, tuple[float, str, bool]]:
        return {pod.name: (pod.gpus, pod.node, pod.held) for pod in self.index.pods()}
