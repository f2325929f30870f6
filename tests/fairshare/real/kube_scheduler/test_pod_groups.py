"""The real kube-scheduler starts the groups of which gputally says that they have room, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fairshare.core.queues_and_weights import Gang
from fairshare.schedulers.kube_scheduler.adapter import KubeSchedulerAdapter
from fairshare.targets.weight_plan import look_at
from gputally.kubernetes.api_client import KubernetesCluster
from gputally.kubernetes.objects import GPU, NODE, POD, POD_GROUPS
from tests.deadlines import until
from tests.fairshare.builders import policy_of
from tests.fairshare.observations import pods_of
from tests.fairshare.real_api_server import MERGE
from tests.real.controlplane import ApiServer, api_server, scheduler

pytestmark = pytest.mark.real
GROUPS = "/apis/scheduling.k8s.io/v1alpha2/namespaces/default/podgroups"
POLICY = policy_of([{"name": "a", "refs": ["policy:a"]}])


class Case(NamedTuple):
    """A group whose pods fit on one node of 8 GPUs alone. policy: None for no group."""

    policy: dict[str, Any] | None
    sizes: list[int]
    starts: bool


CASES = {
    "two-of-three": Case({"gang": {"minCount": 2}}, [4, 4, 4], True),
    "all-three": Case({"gang": {"minCount": 3}}, [4, 4, 4], False),
    "one-by-one": Case({"basic": {}}, [4, 4, 4], True),
    "with-a-launcher": Case({"gang": {"minCount": 3}}, [0, 4, 4, 4, 4], True),
    "one-is-too-large": Case({"gang": {"minCount": 1}}, [16, 4], True),
    "too-few-pods": Case({"gang": {"minCount": 4}}, [1, 1, 1], False),
    "no-group": Case(None, [1, 1], False),
}


@pytest.fixture(scope="module")
def grouping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    flags = ("--feature-gates=GenericWorkload=true", f"--runtime-config={POD_GROUPS[-1].api_version}=true")
    with api_server(tmp_path_factory.mktemp("grouping"), *flags) as server:
        for name, case in CASES.items():
            _put(server, name, case)
        yield server


def _put(server: ApiServer, name: str, case: Case) -> None:
    amounts = {GPU: "8", "cpu": "64", "memory": "64Gi", "pods": "110"}
    status = {"capacity": amounts, "allocatable": amounts, "conditions": [{"type": "Ready", "status": "True"}]}
    server.request("POST", "/api/v1/nodes", {"metadata": {"name": name, "labels": {"only": name}}})
    server.request("PATCH", f"/api/v1/nodes/{name}/status", {"status": status}, MERGE)
    server.request("PATCH", f"/api/v1/nodes/{name}", {"spec": {"taints": []}}, MERGE)
    if case.policy is not None:
        server.request("POST", GROUPS, {"metadata": {"name": name}, "spec": {"schedulingPolicy": case.policy}})
    for number, size in enumerate(case.sizes):
        limits = {"resources": {"limits": {GPU: str(size)}}} if size else {}
        spec = {"containers": [{"name": "c", "image": "none", **limits}], "nodeSelector": {"only": name}}
        metadata = {"name": f"{name}-{number}", "labels": {"gputally.dev/queue": "a"}}
        body = {"metadata": metadata, "spec": {**spec, "schedulingGroup": {"podGroupName": name}}}
        server.request("POST", "/api/v1/namespaces/default/pods", body)


def _seen(server: ApiServer) -> dict[str, Gang]:
    cluster = KubernetesCluster.connect((NODE, POD, *POD_GROUPS), server.kubeconfig)
    return {gang.name: gang for gang in look_at(KubeSchedulerAdapter(), POLICY, cluster, pods_of(cluster)).gangs}


def test_groups_start_with_what_gputally_says_that_they_wait_for(grouping: ApiServer, tmp_path: Path) -> None:
    before = _seen(grouping)
    assert {name: gang.waits <= 8 and not gang.held_back for name, gang in before.items()} == {
        name: case.starts for name, case in CASES.items()
    }

    def judged() -> bool:
        judged = {
            each["metadata"]["name"]
            for each in grouping.request("GET", GROUPS)["items"]
            if each.get("status", {}).get("conditions")
        }
        return judged >= {name for name, case in CASES.items() if case.starts} | {"all-three"}

    with scheduler(grouping, tmp_path, [], "--feature-gates=GenericWorkload=true,GangScheduling=true"):
        until(judged, "the scheduler has not tried all groups")
        until(lambda: all(_seen(grouping)[name].allocated for name, case in CASES.items() if case.starts), "not bound")
        after = _seen(grouping)
    assert {name: gang.allocated > 0 for name, gang in after.items()} == {n: case.starts for n, case in CASES.items()}
    assert {gang.waits for name, gang in after.items() if CASES[name].starts} == {0}
