"""The watch of a node's pods, tested alike on a real kube-apiserver and on the fake.

The rights are the chart's ClusterRole; the tests prove that they are sufficient and necessary."""

from __future__ import annotations

import copy
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import helm_python
import pytest
import yaml

from agent.holders.kubelet.device_allocations import SLICES_PATHS, SliceStore
from agent.holders.kubelet.kubernetes_source import NodeStore
from agent.holders.kubelet.lean_list_watch import ApiServer, ApiUnavailable, LeanReflector
from agent.wire import Owner
from gputally.base.clock import SystemClock
from tests.agent.holders.kubelet.pods import Following, Seen, pod_object
from tests.fakes.apiserver.server import TOKEN, FakeApiServer
from tests.real.controlplane import PLAIN_TOKEN, api_server
from tests.real.controlplane import ApiServer as RealApiServer

CHART = Path(__file__).parents[4] / "helm" / "gputally"
Object = dict[str, Any]


class Backend(Protocol):
    """An API server that the agent watches, with methods that change it."""

    def api(self) -> ApiServer: ...
    def put(self, pod: Object) -> str:
        """Create; the pod's uid."""
        ...

    def status(self, pod: Object, status: Object) -> None: ...
    def delete(self, pod: Object) -> None: ...
    def label_node(self, name: str, labels: dict[str, str | None]) -> None: ...
    def publish(self, resource_slice: Object) -> None: ...


class Fake:
    def __init__(self, folder: Path) -> None:
        self.server = FakeApiServer()
        self._token = folder / "token"
        self._token.write_text(TOKEN)
        self._nodes: dict[str, dict[str, str]] = {}
        self._pods: dict[str, Object] = {}

    def api(self) -> ApiServer:
        return ApiServer(self.server.url, None, self._token)

    def put(self, pod: Object) -> str:
        self._pods[pod["metadata"]["name"]] = copy.deepcopy(pod)
        self.server.put(pod)
        return str(pod["metadata"]["uid"])

    def status(self, pod: Object, status: Object) -> None:
        changed = self._pods[pod["metadata"]["name"]]
        changed["status"] = status
        self.server.put(changed)

    def delete(self, pod: Object) -> None:
        self.server.delete("Pod", pod["metadata"]["namespace"], pod["metadata"]["name"])

    def label_node(self, name: str, labels: dict[str, str | None]) -> None:
        known = self._nodes.setdefault(name, {})
        known.update({key: value for key, value in labels.items() if value is not None})
        for key in [key for key, value in labels.items() if value is None]:
            del known[key]
        self.server.put({"kind": "Node", "metadata": {"name": name, "labels": dict(known)}})

    def publish(self, resource_slice: Object) -> None:
        self.server.put(resource_slice)


class Real:
    def __init__(self, server: RealApiServer, folder: Path) -> None:
        self.server = server
        self._token = folder / "token"
        self._token.write_text(PLAIN_TOKEN)
        self.made: list[str] = []

    def api(self) -> ApiServer:
        return ApiServer(self.server.url, self.server.ca_file, self._token)

    def put(self, pod: Object) -> str:
        made = copy.deepcopy(pod)
        for field in ("uid", "resourceVersion", "creationTimestamp"):
            made["metadata"].pop(field, None)
        made["spec"].pop("priority", None)
        status = made.pop("status")
        path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods"
        uid = self.send("POST", path, made)["metadata"]["uid"]
        self.made.append(f"{path}/{pod['metadata']['name']}")
        self.status(pod, status)
        return str(uid)

    def status(self, pod: Object, status: Object) -> None:
        meta = pod["metadata"]
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/status"
        self.send("PATCH", path, {"status": status}, "application/strategic-merge-patch+json")

    def delete(self, pod: Object) -> None:
        path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
        self.send("DELETE", path, {"gracePeriodSeconds": 0})
        self.made.remove(path)

    def label_node(self, name: str, labels: dict[str, str | None]) -> None:
        patch = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
        nodes = {item["metadata"]["name"] for item in self.send("GET", "/api/v1/nodes", None)["items"]}
        if name in nodes:
            self.send("PATCH", f"/api/v1/nodes/{name}", patch, "application/merge-patch+json")
        else:
            self.send("POST", "/api/v1/nodes", patch)

    def publish(self, resource_slice: Object) -> None:
        self.send("POST", SLICES_PATHS[0], resource_slice)

    def send(self, method: str, path: str, body: Object | None, kind: str = "application/json") -> Any:
        return self.server.request(method, path, body, kind)


@pytest.fixture(scope="module")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealApiServer]:
    """A real API server that gives its plain user the agent's rights, as the chart gives them to the service
    account."""
    folder = tmp_path_factory.mktemp("controlplane")
    with api_server(folder) as running:
        real = Real(running, folder)
        with pytest.raises(ApiUnavailable, match="HTTP 403") as refused:
            real.api().page("/api/v1/pods", {"fieldSelector": "spec.nodeName=node-1"})
        assert refused.value.status == 403
        for manifest in _agent_rights():
            kind = f"{manifest['kind'].lower()}s"
            real.send("POST", f"/apis/rbac.authorization.k8s.io/v1/{kind}", manifest)
        real.send("POST", "/api/v1/namespaces", {"kind": "Namespace", "metadata": {"name": "vision"}})
        yield running


def _agent_rights() -> list[Object]:
    files = helm_python.Chart.load(CHART).render({}, name="gputally", namespace="metering")
    documents = [document for text in files.values() if "ClusterRole" in text for document in yaml.safe_load_all(text)]
    found = [
        d for d in documents if d and d["kind"].startswith("ClusterRole") and d["metadata"]["name"].endswith("agent")
    ]
    binding = next(d for d in found if d["kind"] == "ClusterRoleBinding")
    binding["subjects"] = [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "plain"}]
    return sorted(found, key=lambda d: str(d["kind"]))


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.real)])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    if request.param == "fake":
        fake = Fake(tmp_path)
        yield fake
        fake.server.close()
        return
    real = Real(request.getfixturevalue("control_plane"), tmp_path)
    yield real
    for path in real.made:
        real.send("DELETE", path, {"gracePeriodSeconds": 0})


@pytest.fixture
def followed(backend: Backend) -> Iterator[Seen]:
    clock, api = SystemClock(), backend.api()
    seen = Seen(clock, "team")
    following = Following(LeanReflector(api, "/api/v1/pods", "spec.nodeName=node-1", seen, clock))
    yield seen
    api.close()
    following.end()


def test_a_pod_is_known_with_all_it_is_billed_by(backend: Backend, followed: Seen) -> None:
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "7c1d", "controller": True}
    labels = {"team": "vision", "fake.gputally.dev/queue": "research", "secret": "x"}
    uid = backend.put(pod_object(name="p0", labels=labels, ownerReferences=[owner]))
    followed.until(lambda: any(v.running for v in followed.views().values()))
    (facts,) = followed.facts(1, ())
    assert (facts.uid, facts.namespace, facts.name, facts.node) == (uid, "vision", "p0", "node-1")
    assert (facts.labels, facts.queue_ref) == ({"team": "vision"}, "fake:research")
    assert (facts.owners, facts.workload) == ((Owner("Job", "train", "7c1d"),), "Job/train")
    assert facts.requests == {"nvidia.com/gpu": "1"}
    assert None not in (facts.created_ms, facts.scheduled_ms, facts.started_ms)


def test_only_the_pods_of_this_node_are_asked_for(backend: Backend, followed: Seen) -> None:
    backend.put(pod_object(name="elsewhere", uid="e", spec={"nodeName": "node-2"}))
    backend.put(pod_object(name="here", uid="h"))
    followed.until(lambda: bool(followed.names()))
    assert followed.names() == {"here"}


def test_a_pod_that_ended_and_one_that_was_deleted_are_told_as_over(backend: Backend, followed: Seen) -> None:
    ended, deleted = pod_object(name="ended", uid="1"), pod_object(name="deleted", uid="2")
    uids = {backend.put(ended), backend.put(deleted)}
    followed.until(lambda: followed.names() == {"ended", "deleted"})
    over = {"terminated": {"startedAt": "2026-10-01T08:00:05Z", "finishedAt": "2026-10-01T09:00:00Z", "exitCode": 0}}
    statuses = [{"name": "main", "image": "i", "imageID": "i", "ready": False, "restartCount": 0, "state": over}]
    backend.status(ended, {"phase": "Succeeded", "containerStatuses": statuses})
    backend.delete(deleted)
    followed.until(lambda: followed.names() == {"ended"} and all(v.over for v in followed.views().values()))
    facts = followed.facts(1, ())
    assert {f.uid for f in facts} == uids
    assert all(f.ended_ms is not None for f in facts)
    assert next(f.ended_ms for f in facts if f.name == "ended") == 1_790_845_200_000  # 09:00


def test_labels_of_the_node_ask_for_the_driver(backend: Backend) -> None:
    told: queue.Queue[str] = queue.Queue()
    clock, api = SystemClock(), backend.api()
    backend.label_node("node-1", {"nvidia.com/mig.config.state": "pending"})
    store = NodeStore("node-1", lambda before, reason: told.put(reason))
    following = Following(LeanReflector(api, "/api/v1/nodes", "metadata.name=node-1", store, clock))
    assert told.get(timeout=10) == "nvidia.com/mig.config.state=pending"
    backend.label_node("node-1", {"nvidia.com/mig.config.state": "success"})
    assert told.get(timeout=10) == ""
    backend.label_node("node-1", {"nvidia.com/gpu.deploy.dcgm": "paused-for-driver-upgrade"})
    assert told.get(timeout=10) == "nvidia.com/gpu.deploy.dcgm=paused-for-driver-upgrade"
    backend.label_node("node-1", {"nvidia.com/gpu.deploy.dcgm": None})
    assert told.get(timeout=10) == ""
    api.close()
    following.end()


def slice_object(name: str, node: str, *devices: tuple[str, str], driver: str = "gpu.nvidia.com") -> Object:
    attributes = [{"name": d, "attributes": {"uuid": {"string": u}, "index": {"int": 0}}} for d, u in devices]
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": driver, "nodeName": node, "pool": pool, "devices": attributes}
    meta = {"name": name}
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": meta, "spec": spec}


def test_devices_that_claims_name_have_their_uuids(backend: Backend) -> None:
    backend.publish(slice_object("a", "node-1", ("gpu-0", "GPU-0"), ("gpu-0-mig-9-0-4", "MIG-1")))
    backend.publish(slice_object("b", "node-2", ("gpu-0", "GPU-2")))
    backend.publish(slice_object("c", "node-1", ("nic-0", "NIC-0"), driver="net.example.org"))
    store, clock = SliceStore(), SystemClock()
    reflector = LeanReflector(backend.api(), SLICES_PATHS, "spec.nodeName=node-1", store, clock, optional=True)
    reflector._list()
    uuids = {key: device.uuid for key, device in store.devices().items()}
    assert uuids == {("node-1", "gpu-0"): "GPU-0", ("node-1", "gpu-0-mig-9-0-4"): "MIG-1"}


@pytest.mark.real
@pytest.mark.parametrize("path", ["/api/v1/secrets", "/api/v1/configmaps", "/apis/apps/v1/deployments"])
def test_nothing_else_is_granted(control_plane: RealApiServer, tmp_path: Path, path: str) -> None:
    with pytest.raises(ApiUnavailable) as refused:
        Real(control_plane, tmp_path).api().page(path, {})
    assert refused.value.status == 403
