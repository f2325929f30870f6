"""`gputally doctor` on a real API server: real taints, pods that the real kube-scheduler could not place, real
rights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fairshare.schedulers.kai.kinds import QUEUE, SHARD
from gputally.base.clock import SystemClock, VirtualClock
from gputally.base.errors import ClusterUnavailable
from gputally.doctor.__main__ import run_checks
from gputally.doctor.check_inputs import Sources
from gputally.doctor.findings import CheckResult
from gputally.doctor.scheduler_checks import messages
from gputally.kubernetes.api_client import Inspector
from gputally.kubernetes.objects import EVENT, GPU
from tests.deadlines import until
from tests.fairshare.real_api_server import MERGE, served
from tests.fairshare.scheduler_kinds import KINDS
from tests.real.controlplane import PLAIN_TOKEN, ApiServer, scheduler

pytestmark = pytest.mark.real
SPACE = "work"
TAINT = {"key": "dedicated", "value": "infra", "effect": "NoSchedule"}
POLICY = """\
targets: {kai: {mode: weight, apply: enforce}}
queues:
  - {name: vision, team: vision, deserved: 64, refs: [kai:vision]}
  - {name: speech, team: speech, refs: [kueue:speech]}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with served(tmp_path_factory.mktemp("controlplane")) as running:
        yield running


@pytest.fixture(scope="module")
def inspector(server: ApiServer) -> Inspector:
    return Inspector.connect(KINDS, server.kubeconfig)


@pytest.fixture(scope="module")
def cluster(server: ApiServer, inspector: Inspector, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A tainted node with eight free GPUs, a full one, pods that wait for them, and a KAI that keeps its own
    history."""
    server.request("POST", "/api/v1/namespaces", {"metadata": {"name": SPACE}})
    for name, taints in (("tainted", [TAINT]), ("full", [])):
        server.request("POST", "/api/v1/nodes", {"metadata": {"name": name}})
        room = {GPU: "8", "cpu": "64", "memory": "64Gi", "pods": "110"}
        status = {"capacity": room, "allocatable": room, "conditions": [{"type": "Ready", "status": "True"}]}
        server.request("PATCH", f"/api/v1/nodes/{name}/status", {"status": status}, MERGE)
        server.request("PATCH", f"/api/v1/nodes/{name}", {"spec": {"taints": taints}}, MERGE)
    queue = {"resources": {"gpu": {"quota": 8, "limit": -1, "overQuotaWeight": 1}}}
    for kind, name, spec in (
        (QUEUE, "vision", queue),
        (SHARD, "default", {"kValue": 1.0, "usageDBConfig": {"clientType": "prometheus"}}),
    ):
        body = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": {"name": name}, "spec": spec}
        server.request("POST", f"/apis/{kind.api_version}/{kind.plural}", body)
    with scheduler(server, tmp_path_factory.mktemp("scheduler")):
        run(server, "filler", 8)
        until(lambda: bound(server, "filler"), "the filler is not bound")
        run(server, "train", 4)
        run(server, "huge", 32)
        until(lambda: len(messages(inspector.list(EVENT, fields="reason=FailedScheduling"))) == 2, "no events")


def run(server: ApiServer, name: str, gpus: int) -> None:
    container = {"name": "c", "image": "none", "resources": {"limits": {GPU: str(gpus)}}}
    body = {"metadata": {"name": name}, "spec": {"containers": [container]}}
    server.request("POST", f"/api/v1/namespaces/{SPACE}/pods", body)


def bound(server: ApiServer, name: str) -> bool:
    return bool(server.request("GET", f"/api/v1/namespaces/{SPACE}/pods/{name}")["spec"].get("nodeName"))


@pytest.fixture
def examine(tmp_path: Path, sources_of: Callable[..., Sources]) -> Callable[..., dict[str, CheckResult]]:
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY)

    def make(inspector: Inspector, *only: str, **options: Any) -> dict[str, CheckResult]:
        sources = sources_of(inspector, policy=policy, **options)
        return {result.check: result for result in run_checks(sources, only)}

    return make


@pytest.mark.usefixtures("cluster")
def test_what_is_wrong_is_found(inspector: Inspector, examine: Callable[..., dict[str, CheckResult]]) -> None:
    later = VirtualClock(SystemClock().wall_ms() + 600_000)  # ten minutes on, when nobody is new any more
    found = examine(inspector, "placement", "weights", "guarantees", "conflicts", at=later)
    taint, huge = found["placement"].findings
    assert taint.what == "taint dedicated=infra:NoSchedule keeps 1 pods from free GPUs: work/train"
    assert "8 GPUs free on tainted; requested: 4" in taint.evidence
    assert 'the scheduler: "0/2 nodes are available' in taint.evidence
    assert huge.what == "work/huge waits: 32 GPUs are not free"
    assert "Insufficient nvidia.com/gpu" in huge.evidence
    assert [each.what for each in found["weights"].findings] == [
        "weights published to kai have no effect (HistoryCountedTwice)",
        "kai is not set up as the policy says (PolicyDiffers)",
        "it is unknown whether weights published to kueue have an effect (ConfigurationUnread)",
        "queue speech has no object at kueue",
    ]
    assert found["guarantees"].findings[0].evidence == "64 deserved, 16 installed, 16 up: vision 64"
    assert found["conflicts"].status == "ok"


@pytest.mark.usefixtures("cluster")
def test_the_taint_is_gone_once_the_remedy_is_done(
    server: ApiServer, inspector: Inspector, examine: Callable[..., dict[str, CheckResult]]
) -> None:
    later = VirtualClock(SystemClock().wall_ms() + 600_000)
    (before, _) = examine(inspector, "placement", at=later)["placement"].findings
    assert before.remedy.startswith("kubectl taint nodes tainted dedicated:NoSchedule-")
    server.request("PATCH", "/api/v1/nodes/tainted", {"spec": {"taints": []}}, MERGE)
    try:
        after = examine(inspector, "placement", at=later)["placement"].findings
        assert not any("taint" in each.what for each in after)
    finally:
        server.request("PATCH", "/api/v1/nodes/tainted", {"spec": {"taints": [TAINT]}}, MERGE)


def test_rights_of_a_caller_and_of_an_account(
    server: ApiServer, inspector: Inspector, examine: Callable[..., dict[str, CheckResult]], tmp_path: Path
) -> None:
    assert examine(inspector, "permissions")["permissions"].status == "ok"
    plain = Inspector.connect(KINDS, server.kubeconfig_for(PLAIN_TOKEN, tmp_path))
    refused = examine(plain, "permissions")["permissions"]
    assert [each.severity for each in refused.findings] == ["error", "error", "warning", "error"]
    assert "reviewed for plain" in refused.seen
    labels = {"app.kubernetes.io/name": "gputally", "app.kubernetes.io/component": "agent"}
    space = "/api/v1/namespaces/default/serviceaccounts"
    server.request("POST", space, {"metadata": {"name": "gputally-agent", "labels": labels}})
    try:
        (found,) = examine(inspector, "permissions")["permissions"].findings
        assert found.evidence == "system:serviceaccount:default:gputally-agent lacks 7 of 7 rights"
        bind(server, "gputally-agent")
        allowed = examine(inspector, "permissions")["permissions"]
        assert (allowed.status, "7 rights of agent" in allowed.seen) == ("ok", True)
    finally:
        server.request("DELETE", f"{space}/gputally-agent")


def bind(server: ApiServer, account: str) -> None:
    rules = [
        {"apiGroups": [""], "resources": ["pods", "nodes"], "verbs": ["list", "watch"]},
        {"apiGroups": ["resource.k8s.io"], "resources": ["resourceslices"], "verbs": ["list", "watch"]},
        {"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims"], "verbs": ["get"]},
    ]
    rbac = "/apis/rbac.authorization.k8s.io/v1"
    server.request("POST", f"{rbac}/clusterroles", {"metadata": {"name": account}, "rules": rules})
    binding = {
        "metadata": {"name": account},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": account},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": "default"}],
    }
    server.request("POST", f"{rbac}/clusterrolebindings", binding)
    path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
    spec = {
        "user": f"system:serviceaccount:default:{account}",
        "resourceAttributes": {"resource": "pods", "verb": "list"},
    }
    # The authorizer follows roles by a watch of its own.
    until(lambda: server.request("POST", path, {"spec": spec})["status"]["allowed"], "the role does not act")


def test_what_cannot_be_read_is_said(
    server: ApiServer, examine: Callable[..., dict[str, CheckResult]], tmp_path: Path
) -> None:
    plain = Inspector.connect(KINDS, server.kubeconfig_for(PLAIN_TOKEN, tmp_path))
    found = examine(plain, "placement", "weights", "clock", at=SystemClock())
    assert "events.events.k8s.io is forbidden" in found["placement"].unknown
    assert found["weights"].findings[0].what == "kai cannot be read"
    assert found["clock"].status == "ok"


def test_who_we_are_and_what_is_served(inspector: Inspector) -> None:
    assert inspector.caller() == "admin"
    served_ = inspector.served(["", "kueue.x-k8s.io", "no.such.group"])
    assert served_["", "pods"] == ("v1",)
    assert set(served_["kueue.x-k8s.io", "clusterqueues"]) == {"v1beta1", "v1beta2"}
    assert abs(inspector.server_ms() - SystemClock().wall_ms()) < 5_000


def test_nobody_there(tmp_path: Path, server: ApiServer) -> None:
    text = server.kubeconfig.read_text().replace(server.url, "https://127.0.0.1:1")
    (tmp_path / "kubeconfig").write_text(text)
    gone = Inspector.connect(KINDS, tmp_path / "kubeconfig")
    with pytest.raises(ClusterUnavailable, match="does not answer"):
        gone.server_ms()
