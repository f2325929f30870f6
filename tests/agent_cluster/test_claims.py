"""ResourceClaims with admin access: a monitor looks at devices that others hold, and holds none of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent.holders.device_allocations import CLAIMS_PATH, HOLDS_MS, Node, ResourceClaims, find_holders
from agent.holders.kubelet_pod_resources import ClaimedDevice, ContainerResources, PodResources
from agent.holders.lean_list_watch import ApiServer
from gputally.base.clock import VirtualClock
from tests.agent_cluster.conftest import gpu
from tests.fakes.apiserver.server import FakeApiServer

GPUS = (gpu(0), gpu(1))


def claim(name: str, *results: dict[str, Any]) -> dict[str, Any]:
    status = {"allocation": {"devices": {"results": list(results)}}}
    return {"kind": "ResourceClaim", "metadata": {"namespace": "monitoring", "name": name}, "status": status}


def result(device: str, **more: Any) -> dict[str, Any]:
    return {"request": "gpus", "driver": "gpu.nvidia.com", "pool": "node-1", "device": device, **more}


def pod(name: str, claim_name: str, *devices: str) -> PodResources:
    claimed = tuple(ClaimedDevice("monitoring", claim_name, "gpu.nvidia.com", "node-1", device) for device in devices)
    return PodResources("monitoring", name, (ContainerResources("main", claimed=claimed),))


@pytest.fixture
def claims(api_server: FakeApiServer, clock: VirtualClock, token: Path) -> ResourceClaims:
    return ResourceClaims(ApiServer(api_server.url, None, token), clock)


def holders(claims: ResourceClaims, *pods: PodResources) -> list[tuple[str, str, str | None]]:
    node = Node(GPUS, monitored=claims.monitored(pods))
    found = find_holders(pods, {}, node)
    assert found.unresolved == ()
    return [(a.gpu_uuid, a.holder.name, a.sharing) for a in found.allocations]


def test_a_monitor_holds_nothing_of_what_it_looks_at(api_server: FakeApiServer, claims: ResourceClaims) -> None:
    api_server.put(claim("all", result("gpu-0", adminAccess=True), result("gpu-1", adminAccess=True)))
    api_server.put(claim("one", result("gpu-0", adminAccess=None)))
    pods = pod("exporter", "all", "gpu-0", "gpu-1"), pod("train", "one", "gpu-0")
    assert len(holders(claims, *pods)) == 3, "nothing is known of the claims yet"
    claims.step()
    assert holders(claims, *pods) == [(GPUS[0].uuid, "train", None)]
    assert claims.failure == ""


def test_each_claim_is_asked_for_once_and_now_and_then(
    api_server: FakeApiServer, claims: ResourceClaims, clock: VirtualClock
) -> None:
    api_server.put(claim("all", result("gpu-0", adminAccess=True)))
    named = pod("exporter", "all", "gpu-0")
    for _ in range(3):
        holders(claims, named)
        claims.step()
    assert [path.rstrip("?") for path in api_server.requests] == [CLAIMS_PATH.format("monitoring", "all")]
    clock.advance(HOLDS_MS)
    api_server.refuse = 503, {}
    claims.step()
    assert "503" in claims.failure
    assert holders(claims, named) == [], "what was known stays known"
    assert len(api_server.requests) == 2
    holders(claims)
    claims.step()
    assert (claims.failure, len(api_server.requests)) == ("", 2), "nobody names it any more"


@pytest.mark.parametrize("status", [403, 404])
def test_a_claim_that_may_not_be_read_counts_as_held_and_it_is_said(
    api_server: FakeApiServer, claims: ResourceClaims, status: int
) -> None:
    api_server.refuse = status, {}
    named = pod("exporter", "all", "gpu-0")
    for _ in range(3):
        assert holders(claims, named) == [(GPUS[0].uuid, "exporter", None)]
        claims.step()
    assert len(api_server.requests) == 1
