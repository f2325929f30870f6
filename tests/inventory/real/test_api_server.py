"""The accountant on a real kube-apiserver: inventory by watches, token and access reviews.

These tests verify what the fake server of the other tests imitates."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from accountant.inventory.kubernetes_inventory import ClusterInventory
from accountant.ledger.protocols import NamespaceFacts
from gputally.base.clock import SystemClock
from gputally.base.errors import ClusterRefused, ClusterUnavailable
from gputally.kubernetes.api_client import KubernetesApi
from gputally.kubernetes.list_watch import NamedObject, Reflector
from gputally.server.token_review import TokenReviews
from gputally.server.tokens_and_grants import KubernetesCallers, Principal, Unauthenticated
from tests.real.controlplane import PLAIN_TOKEN, ApiServer, api_server
from tests.shared_files import shared

pytestmark = pytest.mark.real
AUDIENCE = "gputally"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with api_server(tmp_path_factory.mktemp("controlplane")) as running:
        yield running


@pytest.fixture
def api(server: ApiServer) -> KubernetesApi:
    return KubernetesApi.connect(server.kubeconfig)


def namespace(server: ApiServer, name: str, **meta: Any) -> None:
    server.request("POST", "/api/v1/namespaces", {"metadata": {"name": name, **meta}})


def pod(name: str, owners: list[dict[str, object]], gpus: int = 1) -> dict[str, Any]:
    limits = {"nvidia.com/gpu": str(gpus)} if gpus else {"cpu": "1"}
    return {
        "metadata": {"name": name, "ownerReferences": owners, "labels": {"kueue.x-k8s.io/queue-name": "lq"}},
        "spec": {"containers": [{"name": "main", "image": "i", "resources": {"limits": limits}}]},
    }


def reference(kind: str, api_version: str, made: Any) -> dict[str, object]:
    named = {key: made["metadata"][key] for key in ("name", "uid")}
    return {"apiVersion": api_version, "kind": kind, "controller": True, **named}


def test_pods_with_their_chain_namespaces_and_nodes(server: ApiServer, api: KubernetesApi) -> None:
    namespace(server, "vision", annotations={"gputally.dev/team": "vision"})
    job = {"template": {"spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "i"}]}}}
    batch = "/apis/batch/v1/namespaces/vision"
    schedule = {"schedule": "0 3 * * *", "jobTemplate": {"spec": job}}
    cron = server.request("POST", f"{batch}/cronjobs", {"metadata": {"name": "nightly"}, "spec": schedule})
    meta = {"name": "nightly-1", "ownerReferences": [reference("CronJob", "batch/v1", cron)]}
    made = server.request("POST", f"{batch}/jobs", {"metadata": meta, "spec": job})
    pods = "/api/v1/namespaces/vision/pods"
    server.request("POST", pods, pod("nightly-1-x", [reference("Job", "batch/v1", made)], gpus=4))
    server.request("POST", pods, pod("web", [], gpus=0))
    labels = {"karpenter.sh/nodepool": "a", "nvidia.com/gpu.product": "H100"}
    machine = {"metadata": {"name": "gpu-1", "labels": labels}, "spec": {"providerID": "aws:///eu-central-1a/i-0fea"}}
    server.request("POST", "/api/v1/nodes", machine)
    clock = SystemClock()
    inventory = ClusterInventory(api, clock, "prod")
    inventory.sync()
    facts = inventory.read(clock.wall_ms())
    inventory.taken()
    assert NamespaceFacts("prod", "vision", "vision") in facts.namespaces
    ((cluster, fact),) = facts.pods
    assert (cluster, fact.name) == ("prod", "nightly-1-x")
    assert (fact.workload, fact.queue_ref) == ("CronJob/nightly", "kueue:vision/lq")
    assert fact.requests == {"nvidia.com/gpu": "4"}
    assert [owner.kind for owner in fact.owners] == ["Job", "CronJob"]
    assert fact.created_ms is not None
    (node,) = facts.nodes
    assert (node.pool, node.gpu_model, [down.reason for down in node.down]) == ("a", "H100", ["NotReady"])
    assert node.provider_id == "aws:///eu-central-1a/i-0fea"

    # By the watch: a cordon, and a pod that is deleted.
    server.request("PATCH", "/api/v1/nodes/gpu-1", {"spec": {"unschedulable": True}}, "application/merge-patch+json")
    server.request("DELETE", f"{pods}/nightly-1-x", {"gracePeriodSeconds": 0})
    follow_until(inventory._nodes, "MODIFIED")
    follow_until(inventory._pods, "DELETED")
    later = inventory.read(clock.wall_ms())
    assert {down.reason for down in later.nodes[0].down} == {"NotReady", "cordoned"}
    assert [(fact.name, fact.ended_ms is not None) for _, fact in later.pods] == [("nightly-1-x", True)]


def test_queues_by_the_schedulers_own_objects(server: ApiServer, api: KubernetesApi) -> None:
    """Without the definitions no error is reported; with them a pod's queue is the one that its scheduler uses."""
    clock = SystemClock()
    ClusterInventory(api, clock, "prod").sync()
    for path in ("kai/scheduling.run.ai_podgroups", "volcano/scheduling.volcano.sh_podgroups",
                 "kueue/kueue.x-k8s.io_localqueues", "kueue/kueue.x-k8s.io_clusterqueues",
                 "kueue/kueue.x-k8s.io_cohorts"):  # fmt: skip
        document = yaml.load(shared(f"crds/{path}.yaml").read_text(), Loader=yaml.CSafeLoader)
        server.request("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", document)
    namespace(server, "queued")

    def group(api_version: str, name: str, queue: str) -> None:
        body = {"apiVersion": api_version, "kind": "PodGroup", "metadata": {"name": name},
                "spec": {"queue": queue, "minMember": 1}}  # fmt: skip
        until_served(server, f"/apis/{api_version}/namespaces/queued/podgroups", body)

    group("scheduling.run.ai/v2alpha2", "kg", "research")
    group("scheduling.volcano.sh/v1beta1", "vg", "batch")
    for kind, name, spec in (
        ("ClusterQueue", "cq", {"cohortName": "vision"}),
        ("Cohort", "vision", {"parentName": "all"}),
    ):
        body = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": kind, "metadata": {"name": name}, "spec": spec}
        until_served(server, f"/apis/kueue.x-k8s.io/v1beta2/{kind.lower()}s", body)
    local = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "LocalQueue", "metadata": {"name": "lq"}}
    until_served(
        server, "/apis/kueue.x-k8s.io/v1beta2/namespaces/queued/localqueues", {**local, "spec": {"clusterQueue": "cq"}}
    )
    for name, scheduler, notes in (
        ("k", "kai-scheduler", {"pod-group-name": "kg"}),
        ("v", "volcano", {"scheduling.k8s.io/group-name": "vg"}),
        ("q", "default-scheduler", {}),
    ):
        body = pod(name, [])
        body["metadata"]["annotations"] = notes
        body["spec"]["schedulerName"] = scheduler
        if name != "q":
            body["metadata"]["labels"] = {}
        server.request("POST", "/api/v1/namespaces/queued/pods", body)
    inventory = ClusterInventory(api, clock, "prod")
    inventory.sync()
    facts = {
        fact.name: fact.queue_ref for _, fact in inventory.read(clock.wall_ms()).pods if fact.namespace == "queued"
    }
    assert facts == {"k": "kai:research", "v": "volcano:batch", "q": "kueue:queued/lq@cq^vision^all"}
    assert all(kind.heard_ms is not None and kind.failures == 0 for kind in inventory.kinds)


def until_served(server: ApiServer, path: str, body: object) -> None:
    """Create an object of a kind that was just defined."""
    for _ in range(100):
        try:
            server.request("POST", path, body)
            return
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise AssertionError(error.read()) from error
            threading.Event().wait(0.1)
    raise AssertionError(f"{path} is not served")


def follow_until(reflector: Any, event: str) -> None:
    """Follow until an event of this type has been processed."""
    before = reflector._version
    lines = reflector._api.watch(
        reflector.path,
        {"resourceVersion": before, "allowWatchBookmarks": "true", "timeoutSeconds": "20"},
        metadata_only=reflector._metadata_only,
    )
    for line in lines:
        reflector._apply_line(line)
        if json.loads(line)["type"] == event:
            break
    lines.close()


def test_metadata_alone_are_listed_and_watched(server: ApiServer, api: KubernetesApi) -> None:
    reflector: Reflector[NamedObject, str] = Reflector(
        api, "/api/v1/namespaces", NamedObject, lambda one: one.metadata.name, metadata_only=True
    )
    reflector.sync()
    assert "default" in reflector.values().values()
    namespace(server, "later")
    follow_until(reflector, "ADDED")
    assert "later" in reflector.values().values()


def test_what_the_server_refuses_is_told_in_its_words(server: ApiServer, tmp_path: Path) -> None:
    plain = KubernetesApi.connect(server.kubeconfig_for(PLAIN_TOKEN, tmp_path))
    with pytest.raises(ClusterRefused, match=r"403: .*cannot list resource"):
        plain.get("/api/v1/pods", {})
    dead = tmp_path / "dead"
    dead.write_text(server.kubeconfig.read_text().replace(server.url, "https://127.0.0.1:1"))
    nowhere = KubernetesApi.connect(dead)
    with pytest.raises(ClusterUnavailable):
        nowhere.get("/api/v1/pods", {})


@pytest.fixture(scope="module")
def accounts(server: ApiServer) -> str:
    """A namespace with an agent's account, a user's, and an agent's pod on a node."""
    namespace(server, "gputally")
    for name in ("agent", "lead", "root"):
        server.request("POST", "/api/v1/namespaces/gputally/serviceaccounts", {"metadata": {"name": name}})
    server.request("POST", "/api/v1/nodes", {"metadata": {"name": "gpu-7"}})
    body = pod("agent-x", [], gpus=0)
    body["spec"] |= {"nodeName": "gpu-7", "serviceAccountName": "agent"}
    server.request("POST", "/api/v1/namespaces/gputally/pods", body)
    rules = [
        ("lead", [{"apiGroups": ["gputally.dev"], "resources": ["teams"], "resourceNames": ["vision"],
                   "verbs": ["get"]}]),
        ("root", [{"apiGroups": ["gputally.dev"], "resources": ["usage"], "verbs": ["get"]},
                  {"apiGroups": ["gputally.dev"], "resources": ["ledgers"], "verbs": ["update"]}]),
    ]  # fmt: skip
    rbac = "rbac.authorization.k8s.io"
    for name, allowed in rules:
        server.request("POST", f"/apis/{rbac}/v1/clusterroles", {"metadata": {"name": name}, "rules": allowed})
        binding = {
            "metadata": {"name": name},
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": "gputally"}],
        }
        server.request("POST", f"/apis/{rbac}/v1/clusterrolebindings", binding)
    return "gputally"


def token(server: ApiServer, account: str, *, audience: str = AUDIENCE, pod_name: str | None = None) -> str:
    spec: dict[str, Any] = {"audiences": [audience], "expirationSeconds": 600}
    if pod_name is not None:
        spec["boundObjectRef"] = {"kind": "Pod", "apiVersion": "v1", "name": pod_name}
    made = server.request("POST", f"/api/v1/namespaces/gputally/serviceaccounts/{account}/token", {"spec": spec})
    found: str = made["status"]["token"]
    return found


def reviews(api: KubernetesApi, agents: tuple[str, ...] = ("gputally/agent",)) -> TokenReviews:
    callers = KubernetesCallers(audience=AUDIENCE, agents=agents, rights=True, jobs=True)
    return TokenReviews(api, SystemClock(), "prod", callers, (), lambda: ["speech", "vision"])


def ask(api: KubernetesApi, text: str) -> Principal:
    return asyncio.run(reviews(api).authenticate(text))


def test_an_agents_token_names_the_node_of_its_pod(server: ApiServer, api: KubernetesApi, accounts: str) -> None:
    found = ask(api, token(server, "agent", pod_name="agent-x"))
    assert found == Principal("gputally/agent@gpu-7", frozenset({"ingest"}), "prod", "gpu-7")


def test_a_job_is_known_by_its_pod(server: ApiServer, api: KubernetesApi, accounts: str) -> None:
    """A pod of any account may report the progress of its own job. A token without a pod may report none."""
    uid = json.loads(api.get("/api/v1/namespaces/gputally/pods/agent-x", {}))["metadata"]["uid"]
    way = reviews(api, agents=())
    found = asyncio.run(way.authenticate(token(server, "agent", pod_name="agent-x")))
    assert (found.scopes, found.cluster, found.pod) == (frozenset({"progress"}), "prod", uid)
    assert asyncio.run(way.authenticate(token(server, "agent"))).scopes == frozenset()


def test_a_token_without_pod_or_for_others_is_nobodys(server: ApiServer, api: KubernetesApi, accounts: str) -> None:
    with pytest.raises(Unauthenticated, match="not bound to a node"):
        ask(api, token(server, "agent"))
    with pytest.raises(Unauthenticated, match="not known"):
        ask(api, token(server, "agent", audience="https://localhost", pod_name="agent-x"))
    good = token(server, "agent", pod_name="agent-x")
    with pytest.raises(Unauthenticated, match="not known"):
        ask(api, good[:-6] + "AAAAAA")


def test_rbac_says_what_people_may(server: ApiServer, api: KubernetesApi, accounts: str) -> None:
    lead, root = ask(api, token(server, "lead")), ask(api, token(server, "root"))
    assert (lead.scopes, lead.teams) == ({"read"}, {"vision"})
    assert (root.scopes, root.teams) == ({"read", "admin"}, None)
