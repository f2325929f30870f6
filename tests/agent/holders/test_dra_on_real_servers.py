"""Dynamic resource allocation on a real API server that serves one version of the API: the objects of NVIDIA's driver,
in the version that the server has, give the holders of a node's GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.holders.device_allocations import (
    SLICES_PATHS,
    Node,
    ResourceClaims,
    SliceStore,
    find_holders,
)
from agent.holders.kubelet_pod_resources import ClaimedDevice, ContainerResources, PodResources
from agent.holders.lean_list_watch import ApiServer, Reflector
from gputally.base.clock import SystemClock
from tests.agent.pods import Following
from tests.agent.sample_values import gpu
from tests.deadlines import until
from tests.real.controlplane import ADMIN_TOKEN, api_server
from tests.real.controlplane import ApiServer as RealApiServer

pytestmark = pytest.mark.real
GPUS = [gpu(0), gpu(1)]
Object = dict[str, Any]
DRIVER, NODE = "gpu.nvidia.com", "node-1"


def described(version: str, number: int) -> Object:
    """One device of the driver's ResourceSlice with the attributes and the capacity that it publishes."""
    facts: Object = {
        "attributes": {
            "type": {"string": "gpu"}, "uuid": {"string": GPUS[number].uuid}, "productName": {"string": "NVIDIA H200"},
            "driverVersion": {"version": "580.159.4"}, "resource.kubernetes.io/numaNode": {"int": 0},
        },
        "capacity": {"memory": {"value": "80Gi"}},
    }  # fmt: skip
    shared = {"allowMultipleAllocations": True} if number == 1 else {}
    return {
        "name": f"gpu-{number}",
        **({"basic": {**facts, **shared}} if version == "v1beta1" else {**facts, **shared}),
    }


def claim(version: str, name: str, *results: Object) -> tuple[Object, Object]:
    """A claim and its status."""
    request: Object = {"name": "gpus", "deviceClassName": DRIVER, "count": len(results), "allocationMode": "ExactCount"}
    admin = any(result.get("adminAccess") for result in results)
    if admin:
        request["adminAccess"] = True
    exactly = (
        request
        if version == "v1beta1"
        else {"name": "gpus", "exactly": {k: v for k, v in request.items() if k != "name"}}
    )
    body = {
        "apiVersion": f"resource.k8s.io/{version}",
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "vision"},
        "spec": {"devices": {"requests": [exactly]}},
    }
    devices = [{"request": "gpus", "driver": DRIVER, "pool": NODE, **result} for result in results]
    return body, {"allocation": {"devices": {"results": devices}}}


SHARE = "9d8c9a5e-3a0e-4b61-8b8f-6f1f2d3c4b5a"
CLAIMS = {
    "monitor": ({"device": "gpu-0", "adminAccess": True}, {"device": "gpu-1", "adminAccess": True}),
    "train": ({"device": "gpu-0"},),
    "part": ({"device": "gpu-1", "shareID": SHARE, "consumedCapacity": {"memory": "10Gi"}},),
}


@pytest.fixture(scope="module", params=["v1", "v1beta2", "v1beta1"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, RealApiServer]]:
    version = request.param
    serves = ",".join(f"resource.k8s.io/{each}={str(each == version).lower()}" for each in ("v1", "v1beta2", "v1beta1"))
    flags = f"--runtime-config={serves}", "--feature-gates=DRAAdminAccess=true,DRAConsumableCapacity=true"
    with api_server(tmp_path_factory.mktemp("dra"), *flags) as running:
        yield version, running


def test_one_version_of_the_api_is_enough(server: tuple[str, RealApiServer], tmp_path: Path) -> None:
    version, running = server
    root = f"/apis/resource.k8s.io/{version}"
    labels = {"resource.kubernetes.io/admin-access": "true"}
    running.request(
        "POST", "/api/v1/namespaces", {"metadata": {"name": "vision", "labels": labels}}, "application/json"
    )
    spec = {
        "driver": DRIVER,
        "nodeName": NODE,
        "pool": {"name": NODE, "generation": 1, "resourceSliceCount": 1},
        "devices": [described(version, number) for number in (0, 1)],
    }
    published = {
        "apiVersion": f"resource.k8s.io/{version}",
        "kind": "ResourceSlice",
        "metadata": {"name": "s"},
        "spec": spec,
    }
    running.request("POST", f"{root}/resourceslices", published, "application/json")
    for name, results in CLAIMS.items():
        body, status = claim(version, name, *results)
        path = f"{root}/namespaces/vision/resourceclaims"
        created = running.request("POST", path, body, "application/json")
        running.request("PUT", f"{path}/{name}/status", {**created, "status": status}, "application/json")
    token = tmp_path / "token"
    token.write_text(ADMIN_TOKEN)
    api, clock, store = ApiServer(running.url, running.ca_file, token), SystemClock(), SliceStore()
    reflector = Reflector(api, SLICES_PATHS, f"spec.nodeName={NODE}", store, clock, optional=True)
    following = Following(reflector)
    until(lambda: reflector.synced, "the slices are not listed")
    claims = ResourceClaims(api, clock)
    pods = [
        PodResources("vision", name, (ContainerResources("main", claimed=tuple(
            ClaimedDevice("vision", name, DRIVER, NODE, each["device"], each.get("shareID", "")) for each in results
        )),))
        for name, results in CLAIMS.items()
    ]  # fmt: skip
    claims.read(pods)
    claims.step()
    assert claims.failure == ""
    found = find_holders(pods, {}, Node(GPUS, claimable=store.devices(), claims=claims.read(pods)))
    api.close()
    following.end()
    assert (found.unresolved, found.unknown) == ((), {})
    held = sorted((a.holder.name, a.gpu_uuid, a.sharing, a.fraction_ppm) for a in found.allocations)
    assert held == [("part", GPUS[1].uuid, "dra", 125_000), ("train", GPUS[0].uuid, None, None)]
