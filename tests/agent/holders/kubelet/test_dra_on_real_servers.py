"""Dynamic resource allocation on a real API server: the objects of NVIDIA's driver, in the one version of the API that
the server has, give the holders of a node's GPUs, also as the real kube-scheduler allocates devices that are divided or
shared."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.core.readings import Gpu
from agent.holders.kubelet.device_allocations import (
    SLICES_PATHS,
    NodeAllocations,
    NodeDevices,
    ResourceClaims,
    SliceStore,
    find_holders,
)
from agent.holders.kubelet.kubelet_pod_resources import ClaimedDevice, ContainerResources, PodResources
from agent.holders.kubelet.lean_list_watch import ApiServer, LeanReflector
from gputally.base.clock import SystemClock
from tests.agent.holders.kubelet.pods import Following
from tests.agent.sample_values import gpu
from tests.deadlines import until
from tests.real.controlplane import ADMIN_TOKEN, api_server, scheduler
from tests.real.controlplane import ApiServer as RealApiServer

pytestmark = pytest.mark.real
GPUS = [gpu(0), gpu(1)]
Object = dict[str, Any]
DRIVER, NODE = "gpu.nvidia.com", "node-1"
MERGE = "application/merge-patch+json"


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
    found = holders(running, tmp_path, GPUS, CLAIMS)
    held = sorted((a.holder.name, a.gpu_uuid, a.sharing, a.fraction_ppm) for a in found.allocations)
    assert held == [("part", GPUS[1].uuid, "dra", 125_000), ("train", GPUS[0].uuid, None, None)]


def holders(
    running: RealApiServer, folder: Path, gpus: list[Gpu], claimed: Mapping[str, tuple[Object, ...]]
) -> NodeAllocations:
    """Read slices and claims as the agent does, and return the holders. claimed: the devices of the claim of each pod,
    as the kubelet lists them."""
    token = folder / "token"
    token.write_text(ADMIN_TOKEN)
    api, clock, store = ApiServer(running.url, running.ca_file, token), SystemClock(), SliceStore()
    reflector = LeanReflector(api, SLICES_PATHS, f"spec.nodeName={NODE}", store, clock, optional=True)
    following = Following(reflector)
    until(lambda: reflector.synced, "the slices are not listed")
    claims = ResourceClaims(api, clock)
    pods = [
        PodResources("vision", name, (ContainerResources("main", claimed=tuple(
            ClaimedDevice("vision", name, DRIVER, NODE, each["device"], each.get("shareID", "")) for each in results
        )),))
        for name, results in claimed.items()
    ]  # fmt: skip
    claims.read(pods)
    claims.step()
    assert claims.failure == ""
    found = find_holders(pods, {}, NodeDevices(gpus, claimable=store.devices(), claims=claims.read(pods)))
    api.close()
    following.end()
    assert (found.unresolved, found.unknown) == ((), {})
    return found


# --- devices that are divided or shared, allocated by the real scheduler ---------------------------
# Names, attributes, capacities, counters and request policies as kubernetes-sigs/dra-driver-nvidia-gpu 95932046
# publishes them (cmd/gpu-kubelet-plugin: mig.go, partitions.go, consumable_shares.go) for Kubernetes 1.35 and later.

WHOLE = {"multiprocessors": "132", "memory": "81559Mi"}
SMALL, LARGE = {"multiprocessors": "16", "memory": "9856Mi"}, {"multiprocessors": "60", "memory": "40320Mi"}
COUNTERS = "gpu-0-counter-set"
DIVIDED = [replace(
    gpu(0, "1g.10gb", "1g.10gb", "3g.40gb"),
    mig=tuple(
        replace(instance, profile_id=profile, start=start)
        for instance, (profile, start) in zip(
            gpu(0, "1g.10gb", "1g.10gb", "3g.40gb").mig, ((19, 0), (19, 1), (9, 4)), strict=True
        )
    ),
), gpu(1), gpu(2), gpu(3)]  # fmt: skip


def counters(amounts: Mapping[str, str], start: int, size: int) -> Object:
    slices = {f"memory-slice-{number}": {"value": "1"} for number in range(start, start + size)}
    return {**{name: {"value": amount} for name, amount in amounts.items()}, **slices}


def device(name: str, kind: str, amounts: Mapping[str, Object], uuid: str = "", **more: Any) -> Object:
    attributes = {"type": {"string": kind}, **({"uuid": {"string": uuid}} if uuid else {})}
    return {"name": name, "attributes": attributes, "capacity": amounts, **more}


def part_of_gpu_0(profile: str, number: int, start: int, size: int, amounts: Mapping[str, str]) -> Object:
    """A MIG device that the driver makes when a claim gets it."""
    taken = [{"counterSet": COUNTERS, "counters": counters(amounts, start, size)}]
    name = f"gpu-0-mig-{profile.replace('.', '')}-{number}-{start}"
    built = device(name, "mig", {key: {"value": amount} for key, amount in amounts.items()}, consumesCounters=taken)
    built["attributes"]["profile"] = {"string": profile}
    return built


def shared(number: int, least: str, default: str, **more: Object) -> Object:
    """A GPU that several claims may have."""
    policy = {"default": default, "validRange": {"min": least, "max": "81559Mi", "step": "1Mi"}}
    amounts = {"memory": {"value": "81559Mi", "requestPolicy": policy}, **more}
    return device(f"gpu-{number}", "gpu", amounts, GPUS_UUID[number], allowMultipleAllocations=True)


GPUS_UUID = [each.uuid for each in DIVIDED]
SHARES = {"value": "4", "requestPolicy": {"default": "1", "validRange": {"min": "1", "max": "4", "step": "1"}}}
PUBLISHED: dict[str, Object] = {
    "counters": {"sharedCounters": [{"name": COUNTERS, "counters": counters(WHOLE, 0, 8)}]},
    "divided": {"devices": [
        device(
            "gpu-0", "gpu", {name: {"value": amount} for name, amount in WHOLE.items()}, GPUS_UUID[0],
            consumesCounters=[{"counterSet": COUNTERS, "counters": counters(WHOLE, 0, 8)}],
        ),
        *(part_of_gpu_0("1g.10gb", 19, start, 1, SMALL) for start in range(7)),
        *(part_of_gpu_0("3g.40gb", 9, start, 4, LARGE) for start in (0, 4)),
    ]},
    "shared": {"devices": [shared(1, "1Mi", "81559Mi"), shared(2, "0", "0", shares=SHARES), shared(3, "0", "0")]},
}  # fmt: skip


def of(number: int, **more: Any) -> Object:
    """A request for the GPU with this number."""
    expression = f"device.attributes['{DRIVER}'].uuid == '{GPUS_UUID[number]}'"
    return {"deviceClassName": DRIVER, "selectors": [{"cel": {"expression": expression}}], **more}


def instances(profile: str, count: int) -> Object:
    expression = f"device.attributes['{DRIVER}'].profile == '{profile}'"
    return {"deviceClassName": "mig.nvidia.com", "count": count, "selectors": [{"cel": {"expression": expression}}]}


REQUESTED: dict[str, tuple[Object, ...]] = {
    "monitor": ({"deviceClassName": DRIVER, "allocationMode": "All", "adminAccess": True},),
    "small": (instances("1g.10gb", 2),),
    "large": (instances("3g.40gb", 1),),
    "ten": (of(1, capacity={"requests": {"memory": "10Gi"}}),),
    "twenty": (of(1, capacity={"requests": {"memory": "20Gi"}}),),
    "one-of-four": (of(2),),
    "two-of-four": (of(2, capacity={"requests": {"shares": "2"}}),),
    "any": (of(3),),
    "twice": (of(3), of(3)),
}


def test_devices_that_the_scheduler_divides_and_shares(tmp_path: Path) -> None:
    gates = "--feature-gates=DRAAdminAccess=true,DRAConsumableCapacity=true,DRAPartitionableDevices=true"
    root, kind = "/apis/resource.k8s.io/v1", {"apiVersion": "resource.k8s.io/v1"}
    with api_server(tmp_path, gates) as running, scheduler(running, tmp_path, [], gates):
        labels = {"resource.kubernetes.io/admin-access": "true"}
        running.request("POST", "/api/v1/namespaces", {"metadata": {"name": "vision", "labels": labels}})
        running.request("POST", "/api/v1/nodes", {"metadata": {"name": NODE}})
        running.request("PATCH", f"/api/v1/nodes/{NODE}", {"spec": {"taints": []}}, MERGE)
        room = {"cpu": "8", "memory": "8Gi", "pods": "110"}
        ready = [{"type": "Ready", "status": "True"}]
        status = {"capacity": room, "allocatable": room, "conditions": ready}
        running.request("PATCH", f"/api/v1/nodes/{NODE}/status", {"status": status}, MERGE)
        for name, wanted in ((DRIVER, "gpu"), ("mig.nvidia.com", "mig")):
            expression = f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == '{wanted}'"
            selectors = [{"cel": {"expression": expression}}]
            body = {**kind, "kind": "DeviceClass", "metadata": {"name": name}, "spec": {"selectors": selectors}}
            running.request("POST", f"{root}/deviceclasses", body)
        pool = {"name": NODE, "generation": 1, "resourceSliceCount": len(PUBLISHED)}
        for name, content in PUBLISHED.items():
            spec = {"driver": DRIVER, "nodeName": NODE, "pool": pool, **content}
            body = {**kind, "kind": "ResourceSlice", "metadata": {"name": name}, "spec": spec}
            running.request("POST", f"{root}/resourceslices", body)
        for name, requests in REQUESTED.items():
            devices = {"requests": [{"name": f"r{number}", "exactly": each} for number, each in enumerate(requests)]}
            body = {**kind, "kind": "ResourceClaim", "metadata": {"name": name}, "spec": {"devices": devices}}
            running.request("POST", f"{root}/namespaces/vision/resourceclaims", body)
            container = {"name": "main", "image": "none", "resources": {"claims": [{"name": "gpu"}]}}
            names = [{"name": "gpu", "resourceClaimName": name}]
            body = {"metadata": {"name": name}, "spec": {"containers": [container], "resourceClaims": names}}
            running.request("POST", "/api/v1/namespaces/vision/pods", body)

        def allocated() -> dict[str, tuple[Object, ...]] | None:
            listed = running.request("GET", f"{root}/namespaces/vision/resourceclaims")["items"]
            given = {each["metadata"]["name"]: (each.get("status") or {}).get("allocation") for each in listed}
            if not all(given.values()):
                # A pod that was tried before the scheduler knew every device is tried again when one changes.
                change = {"metadata": {"annotations": {"second": str(int(time.monotonic()))}}}
                running.request("PATCH", f"{root}/resourceslices/{next(iter(PUBLISHED))}", change, MERGE)
            return (
                {name: tuple(one["devices"]["results"]) for name, one in given.items()} if all(given.values()) else None
            )

        found = holders(running, tmp_path, DIVIDED, until(allocated, "not all claims are allocated"))
    first, second, large = (instance.uuid for instance in DIVIDED[0].mig)
    held = sorted((a.holder.name, a.gpu_uuid, a.mig_uuid, a.sharing, a.fraction_ppm) for a in found.allocations)
    assert held == [
        ("any", GPUS_UUID[3], "", "dra", None),
        ("large", GPUS_UUID[0], large, None, None),
        ("one-of-four", GPUS_UUID[2], "", "dra", 250_000),
        ("small", GPUS_UUID[0], first, None, None),
        ("small", GPUS_UUID[0], second, None, None),
        ("ten", GPUS_UUID[1], "", "dra", 125_553),  # 10,240 of 81,559 MiB
        ("twenty", GPUS_UUID[1], "", "dra", 251_106),
        ("twice", GPUS_UUID[3], "", "dra", None),
        ("two-of-four", GPUS_UUID[2], "", "dra", 500_000),
    ]
