"""The real kube-scheduler calls the extender: gangs are placed by best fit, preemption is narrowed, and without the
extender it continues by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from fairshare.core.gpu_demand import QUEUE_LABEL, read_pod
from fairshare.core.queues_and_weights import Pod
from fairshare.http_server import serve_extender
from fairshare.schedulers.kube_scheduler.extender import KubeSchedulerExtender
from fairshare.targets.extender import ExtenderView, QueueShare, sides_of
from fairshare.targets.pod_index import PodIndex
from gputally.base.clock import SystemClock
from gputally.kubernetes.api_client import KubernetesCluster
from gputally.kubernetes.objects import GPU, NODE, POD
from gputally.server.https_server import Tls, TlsFiles
from tests.deadlines import until
from tests.fairshare.real_api_server import MERGE
from tests.real.controlplane import ApiServer, scheduler

pytestmark = pytest.mark.real
Request = Callable[..., Any]


class Cockpit:
    """Three nodes of eight GPUs, a namespace, the real scheduler, and the extender over the real pods."""

    def __init__(self, real: KubernetesCluster, ask: Request, namespace: str) -> None:
        self.real, self.ask, self.namespace = real, ask, namespace
        self.shares: dict[str, QueueShare] = {}
        self.answers: list[tuple[str, str]] = []

    def room(self) -> ExtenderView:
        pods: list[Pod] = []
        self.real.scan(POD, lambda obj: pods.extend([pod] if (pod := read_pod(obj)) else []))
        index = PodIndex()
        for pod in pods:
            index.change(pod.uid, pod)
        queues = {pod.ref: pod.ref.removeprefix("policy:") for pod in pods} | {
            f"policy:{name}": name for name in self.shares
        }
        gpus = {f"gpu-{i}": 8.0 for i in range(3)}
        return ExtenderView(gpus, index, self.shares, queues, sides_of(self.shares, queues))

    def pod(self, name: str, gpus: int, queue: str, **spec: Any) -> None:
        container = {"name": "c", "image": "none", "resources": {"limits": {GPU: str(gpus)}}}
        spec = {"containers": [container], "terminationGracePeriodSeconds": 0, **spec}
        body = {"metadata": {"name": name, "labels": {QUEUE_LABEL: queue}}, "spec": spec}
        self.ask("POST", f"/api/v1/namespaces/{self.namespace}/pods", body)

    def nodes(self) -> dict[str, str]:
        """Return the bound pods with their nodes."""
        return {
            pod["metadata"]["name"]: pod["spec"]["nodeName"]
            for pod in self.real.list(POD)
            if pod["metadata"]["namespace"] == self.namespace and pod["spec"].get("nodeName")
        }

    def until_bound(self, *names: str) -> dict[str, str]:
        def bound() -> dict[str, str] | None:
            nodes = self.nodes()
            return nodes if set(names) <= nodes.keys() else None

        return until(bound, f"{names} are not bound")


@pytest.fixture
def cockpit(real: KubernetesCluster, ask: Request, cached: bool) -> Iterator[Cockpit]:
    namespace = f"gang-{cached}".lower()
    ask("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
    for i in range(3):
        ask("POST", "/api/v1/nodes", {"metadata": {"name": f"gpu-{i}"}})
        amounts = {GPU: "8", "cpu": "64", "memory": "64Gi", "pods": "110"}
        ready = [{"type": "Ready", "status": "True"}]
        status = {"capacity": amounts, "allocatable": amounts, "conditions": ready}
        change = {"status": status, "spec": {"taints": []}}
        ask("PATCH", f"/api/v1/nodes/gpu-{i}/status", change, content_type=MERGE)
        ask("PATCH", f"/api/v1/nodes/gpu-{i}", {"spec": {"taints": []}}, content_type=MERGE)
    try:
        yield Cockpit(real, ask, namespace)
    finally:
        ask("DELETE", f"/api/v1/namespaces/{namespace}/pods?gracePeriodSeconds=0")
        for i in range(3):
            ask("DELETE", f"/api/v1/nodes/gpu-{i}")
        assert real.list(NODE) == []


def _extender(url: str, **options: Any) -> dict[str, Any]:
    verbs = {"urlPrefix": f"{url}/scheduler", "prioritizeVerb": "prioritize", "preemptVerb": "preempt"}
    managed = {"managedResources": [{"name": GPU, "ignoredByScheduler": False}], "nodeCacheCapable": True}
    # The scheduler goes on without an answer that takes longer, and a busy machine takes a second for one.
    return {**verbs, **managed, "weight": 100, "httpTimeout": "30s", "ignorable": True, **options}


@pytest.mark.parametrize("cached", [True, False])
def test_gangs_land_by_best_fit_and_victims_are_few(
    server: ApiServer, cockpit: Cockpit, tmp_path: Path, cached: bool
) -> None:
    extender = KubeSchedulerExtender(cockpit.room, SystemClock())

    def told(verb: str, _seconds: float, result: str) -> None:
        cockpit.answers.append((verb, result))

    with serve_extender("127.0.0.1", 0, extender.routes, answered=told) as url:
        with scheduler(server, tmp_path, [_extender(url, nodeCacheCapable=cached)]):
            # Alone it would spread these; best fit keeps whole nodes for the gang that comes last.
            for i in range(4):
                cockpit.pod(f"small-{i}", 2, "small")
            small = {f"small-{i}" for i in range(4)}
            bound = cockpit.until_bound(*small)
            assert len({bound[name] for name in small}) == 1
            cockpit.pod("big-0", 8, "big")
            cockpit.pod("big-1", 8, "big")
            bound = cockpit.until_bound("big-0", "big-1", *small)
            assert len({bound["big-0"], bound["big-1"], bound["small-0"]}) == 3

            # `small` holds its share, `big` is above its own: only a node of `big` may be emptied.
            cockpit.shares = {"small": QueueShare(8, 8), "big": QueueShare(16, 8), "urgent": QueueShare(0, 8)}
            urgent = f"urgent-{cached}".lower()
            classes = "/apis/scheduling.k8s.io/v1/priorityclasses"
            cockpit.ask("POST", classes, {"metadata": {"name": urgent}, "value": 1000})
            cockpit.pod("urgent", 8, "urgent", priorityClassName=urgent)
            bound = cockpit.until_bound("urgent")
            assert bound["urgent"] != bound["small-0"]
            assert small <= bound.keys()
            assert len(bound.keys() & {"big-0", "big-1"}) == 1

            # No queue is above its share any more: nothing is taken.
            cockpit.shares = {name: QueueShare(8, 8) for name in ("small", "big", "urgent")}
            asked = len([answer for answer in cockpit.answers if answer[0] == "preempt"])
            cockpit.pod("greedy", 8, "urgent", priorityClassName=urgent)
            until(lambda: len([a for a in cockpit.answers if a[0] == "preempt"]) > asked, "no preemption was asked for")
            assert cockpit.nodes() == bound
            assert {result for _, result in cockpit.answers} == {"ok"}
            cockpit.ask("DELETE", f"/api/v1/namespaces/{cockpit.namespace}/pods/greedy?gracePeriodSeconds=0")
        with scheduler(server, tmp_path, [_extender("http://127.0.0.1:1")]):  # no server listens there
            cockpit.ask("DELETE", f"/api/v1/namespaces/{cockpit.namespace}/pods/urgent?gracePeriodSeconds=0")
            cockpit.pod("alone", 8, "small")
            assert cockpit.until_bound("alone")["alone"] == bound["urgent"]


@pytest.mark.parametrize("cached", ["https"])
def test_over_https_an_authority_is_needed(server: ApiServer, cockpit: Cockpit, tmp_path: Path, cached: str) -> None:
    """With `https://` in urlPrefix and no `tlsConfig.caFile` the scheduler does not call the extender, and binds by
    itself."""
    assert cached  # the namespace
    authority = trustme.CA()
    mine = authority.issue_cert("127.0.0.1")
    paths = {name: tmp_path / f"{name}.pem" for name in ("ca", "cert", "key")}
    authority.cert_pem.write_to_path(paths["ca"])
    mine.cert_chain_pems[0].write_to_path(paths["cert"])
    mine.private_key_pem.write_to_path(paths["key"])
    extender = KubeSchedulerExtender(cockpit.room, SystemClock())
    with serve_extender("127.0.0.1", 0, extender.routes, tls=Tls(TlsFiles(paths["cert"], paths["key"]))) as url:
        with scheduler(server, tmp_path, [_extender(url)]):
            cockpit.pod("without", 2, "small")
            cockpit.until_bound("without")
            assert extender.acts().reason == "NoRequests"
        trusted = {"enableHTTPS": True, "tlsConfig": {"caFile": str(paths["ca"])}}
        with scheduler(server, tmp_path, [_extender(url, **trusted)]):
            cockpit.pod("with", 2, "small")
            cockpit.until_bound("with")
            assert extender.acts().status == "True"
