"""GPUs that nodes offer by ResourceSlices alone are capacity, and free only where claims are counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from fairshare.controller.control_loop import Controller
from fairshare.controller.cycle_report import CycleReport
from fairshare.core.published_devices import SLICES, with_published
from gputally.base.clock import VirtualClock
from gputally.base.errors import ClusterRefused, ClusterUnavailable
from gputally.kubernetes.objects import GPU, Kind, Object, gpus_of_nodes
from tests.fairshare.builders import Failing, fake_pod, node_object, object_of, policy_of
from tests.fairshare.conftest import NOW_MS, Accountant
from tests.fairshare.observations import pods_of
from tests.fairshare.scheduler_kinds import KINDS


def _device(name: str, kind: str = "gpu", *, basic: bool = False, **attributes: str) -> dict[str, Any]:
    stated = {"attributes": {key: {"string": text} for key, text in {"type": kind, **attributes}.items()}}
    return {"name": name, **({"basic": stated} if basic else stated)}


def _slice(
    node: str, devices: Sequence[Mapping[str, Any]], *, number: int = 0, generation: int = 1, kind: Kind = SLICES[0],
    driver: str = "gpu.nvidia.com",
) -> Object:  # fmt: skip
    pool = {"name": node, "generation": generation, "resourceSliceCount": 1}
    spec = {"driver": driver, "nodeName": node, "pool": pool, "devices": list(devices)}
    return object_of(kind, f"{node}-{driver}-{generation}-{number}", spec)


def _bare(name: str) -> Object:
    node = node_object(name)
    node["status"]["allocatable"] = {"cpu": "8"}
    return node


EIGHT = [_device(f"gpu-{number}", uuid=f"GPU-{number}") for number in range(8)]
PARTS = [_device(f"gpu-0-mig-{i}", "mig", parentUUID="GPU-0", profile="1g.10gb") for i in range(7)]


@pytest.mark.parametrize(
    ("slices", "expected"),
    [
        ([_slice("n", EIGHT[:4]), _slice("n", EIGHT[4:], number=1)], 8.0),
        ([_slice("n", EIGHT), _slice("n", EIGHT[:6], generation=2)], 6.0),
        ([_slice("n", [*EIGHT[:2], *PARTS])], 2.0),
        ([_slice("n", [*EIGHT[1:2], *PARTS])], 2.0),
        ([_slice("n", [*EIGHT[:2], _device("gpu-vfio-0", "vfio", uuid="GPU-0")])], 2.0),
        ([_slice("n", EIGHT[:3], driver="nic.example.com")], 0.0),
        ([_slice("n", [_device(f"d{i}", "", basic=True) for i in range(4)], kind=SLICES[2])], 4.0),
        ([_slice("other", EIGHT)], 0.0),
    ],
    ids=[
        "two slices", "newest generation", "possible MIG", "MIG alone", "vfio", "other driver", "v1beta1", "other node",
    ],
)  # fmt: skip
def test_each_published_gpu_counts_once(slices: list[Object], expected: float) -> None:
    nodes, counted = with_published([_bare("n")], slices)
    assert gpus_of_nodes(nodes) == pytest.approx(expected)
    assert counted == ({"n"} if expected else set())


def test_a_node_with_a_device_plugin_keeps_its_own_count() -> None:
    down = node_object("down", 0)
    down["status"]["capacity"] = {GPU: "8"}
    nodes, counted = with_published([node_object("n", 4), down], [_slice("n", EIGHT), _slice("down", EIGHT)])
    assert (gpus_of_nodes(nodes), counted) == (4.0, frozenset())


def _cycle(cluster: Failing, *, claims_counted: bool = False) -> CycleReport:
    policy = policy_of([{"name": q, "refs": [f"fake-pods:{q}"]} for q in "ab"], k=0.0)
    return Controller(
        policy, Accountant(), cluster, VirtualClock(NOW_MS), pods=lambda: pods_of(cluster),
        claims_counted=claims_counted,
    ).cycle()  # fmt: skip


def _cluster() -> Failing:
    work = [fake_pod(q, q, node="", gpus=8) for q in "ab"]
    return Failing(KINDS, [node_object("plugin", 4), _bare("claims"), _slice("claims", EIGHT), *work])


@pytest.mark.parametrize("counted", [False, True])
def test_they_are_divided_and_are_free_where_claims_are_counted(*, counted: bool) -> None:
    report = _cycle(_cluster(), claims_counted=counted)
    (target,) = report.targets
    assert {due.queue: due.gpus for due in target.entitlements} == {"a": 6.0, "b": 6.0}
    assert report.free_by_node == ({"plugin": 4.0, "claims": 8.0} if counted else {"plugin": 4.0})
    assert not report.hold


@pytest.mark.parametrize(
    ("error", "reason", "readable"),
    [
        (ClusterUnavailable("GET: 503"), "NodesUnread", []),
        (ClusterRefused("GET: 403"), None, [("False", "ReadRefused")]),
    ],
    ids=["no answer", "no right"],
)
def test_slices_that_cannot_be_read_are_no_empty_nodes(
    error: Exception, reason: str | None, readable: list[tuple[str, str]]
) -> None:
    cluster = _cluster()
    cluster.failing, cluster.error = frozenset({"list ResourceSlice"}), error
    report = _cycle(cluster)
    assert (report.hold.reason if report.hold else None) == reason
    assert [(each.status, each.reason) for each in report.conditions if each.type == "Readable"] == readable
