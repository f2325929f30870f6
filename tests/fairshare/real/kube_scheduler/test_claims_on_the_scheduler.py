"""The real kube-scheduler allocates devices of ResourceClaims, and the extender counts them, with the chart's role."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fairshare.controller.claimed_pods import ClaimedPods
from fairshare.controller.control_loop import Controller
from fairshare.core.gpu_demand import QUEUE_LABEL, PodReducer, read_claiming
from fairshare.core.queues_and_weights import Pod
from fairshare.http_server import serve_extender
from fairshare.schedulers.kube_scheduler.extender import KubeSchedulerExtender
from fairshare.targets.extender import ExtenderView
from fairshare.targets.pod_index import PodIndex
from gputally.base.clock import SystemClock
from gputally.kubernetes.api_client import KubernetesCluster
from gputally.kubernetes.list_watch import Reflector
from gputally.kubernetes.objects import POD
from tests.deadlines import until
from tests.fairshare.builders import policy_of
from tests.fairshare.conftest import Accountant
from tests.fairshare.real.chart_roles import install
from tests.fairshare.real_api_server import MERGE
from tests.fairshare.scheduler_kinds import KINDS
from tests.real.controlplane import ApiServer, scheduler

pytestmark = pytest.mark.real
DRIVER, GROUP, SPACE = "gpu.nvidia.com", "/apis/resource.k8s.io/v1", "claims"
NODES = ("dra-0", "dra-1")


@contextmanager
def _followed(cluster: KubernetesCluster, index: PodIndex) -> Iterator[ClaimedPods]:
    """Follow pods and claims as a controller with the extender does."""
    clock, stop = SystemClock(), threading.Event()
    claimed = ClaimedPods(index.change)
    pods: Reflector[Any, Pod] = Reflector(
        cluster.api(),
        POD.path(),
        dict,
        PodReducer(clock, read_claiming),
        claimed.pod_changed,
        now_ms=clock.monotonic_ms,
    )
    several = (*claimed.reflectors(cluster.api(), clock.monotonic_ms), pods)
    for each in several:
        each.prime()
        assert each.behind() is None
    threads = [threading.Thread(target=each.run, args=(stop,), daemon=True) for each in several]
    for thread in threads:
        thread.start()
    try:
        yield claimed
    finally:
        stop.set()  # the threads end with the watches' connections


def _capacity(kubeconfig: Path, index: PodIndex) -> dict[str, float]:
    """Return the GPUs of the nodes as a controller with the chart's role counts them."""
    policy = policy_of([{"name": "a", "refs": ["policy:a"]}], targets={"kube_scheduler": {"mode": "extender"}})
    cluster = KubernetesCluster.connect(KINDS, kubeconfig)
    report = Controller(
        policy, Accountant(), cluster, SystemClock(), pods=index.pods, claims_counted=True, silent=True
    ).cycle()
    counted = {node: report.gpus_by_node[node] for node in NODES}
    assert counted == dict.fromkeys(NODES, 4.0)
    assert not [each for each in report.conditions if each.type == "Readable"]
    return counted


def test_claims_are_counted_where_the_scheduler_allocates_them(
    server: ApiServer, ask: Callable[..., Any], tmp_path: Path
) -> None:
    """Two pods of one device each, and one of three: best fit keeps the second node whole until it is needed."""
    values = {"fairshare": {"extender": {"enabled": True, "from": ["127.0.0.0/8"]}}}
    kubeconfig = install(server, tmp_path, "claiming", values)
    ask("POST", "/api/v1/namespaces", {"metadata": {"name": SPACE}})
    selectors = [{"cel": {"expression": f"device.driver == '{DRIVER}'"}}]
    ask("POST", f"{GROUP}/deviceclasses", {"metadata": {"name": "fast"}, "spec": {"selectors": selectors}})
    for node in NODES:
        ask("POST", "/api/v1/nodes", {"metadata": {"name": node}})
        amounts = {"cpu": "64", "memory": "64Gi", "pods": "110"}
        status = {"capacity": amounts, "allocatable": amounts, "conditions": [{"type": "Ready", "status": "True"}]}
        ask("PATCH", f"/api/v1/nodes/{node}/status", {"status": status}, content_type=MERGE)
        ask("PATCH", f"/api/v1/nodes/{node}", {"spec": {"taints": []}}, content_type=MERGE)
        pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
        devices = [{"name": f"gpu-{number}"} for number in range(4)]
        spec = {"driver": DRIVER, "nodeName": node, "pool": pool, "devices": devices}
        ask("POST", f"{GROUP}/resourceslices", {"metadata": {"name": node}, "spec": spec})

    def start(name: str, count: int) -> None:
        exactly = {"deviceClassName": "fast", "allocationMode": "ExactCount", "count": count}
        claim = {"metadata": {"name": name}, "spec": {"devices": {"requests": [{"name": "r", "exactly": exactly}]}}}
        ask("POST", f"{GROUP}/namespaces/{SPACE}/resourceclaims", claim)
        container = {"name": "c", "image": "none", "resources": {"claims": [{"name": "gpus"}]}}
        claims = [{"name": "gpus", "resourceClaimName": name}]
        spec = {"containers": [container], "resourceClaims": claims, "terminationGracePeriodSeconds": 0}
        metadata = {"name": name, "labels": {QUEUE_LABEL: "a"}}
        ask("POST", f"/api/v1/namespaces/{SPACE}/pods", {"metadata": metadata, "spec": spec})

    index, answers = PodIndex(), []

    def held() -> dict[str, tuple[float, str]]:
        return {pod.name: (pod.gpus, pod.node) for pod in index.pods() if pod.namespace == SPACE and pod.held}

    try:
        with _followed(KubernetesCluster.connect(KINDS, kubeconfig), index) as claimed:
            view = ExtenderView(_capacity(kubeconfig, index), index)
            extender = KubeSchedulerExtender(lambda: view, SystemClock(), with_claims=claimed.with_claims)
            with serve_extender("127.0.0.1", 0, extender.routes, answered=lambda *told: answers.append(told)) as url:
                options = {"urlPrefix": f"{url}/scheduler", "prioritizeVerb": "prioritize", "nodeCacheCapable": True}
                calls = {**options, "weight": 100, "httpTimeout": "5s", "ignorable": True}
                with scheduler(server, tmp_path, [calls]):
                    for name, count in (("one", 1), ("two", 1), ("three", 3)):
                        start(name, count)
                        until(lambda name=name: name in held(), f"{name} is not allocated: {answers}")
                    found = held()
                    assert {name: gpus for name, (gpus, _) in found.items()} == {"one": 1.0, "two": 1.0, "three": 3.0}
                    assert found["one"][1] == found["two"][1] != found["three"][1]
                    ask("DELETE", f"/api/v1/namespaces/{SPACE}/pods/two?gracePeriodSeconds=0")
                    until(lambda: "two" not in held(), "the pod is still there")
    finally:
        for what in (*(f"/api/v1/nodes/{node}" for node in NODES), f"{GROUP}/deviceclasses/fast"):
            ask("DELETE", what)
        for node in NODES:
            ask("DELETE", f"{GROUP}/resourceslices/{node}")
        ask("DELETE", f"/api/v1/namespaces/{SPACE}/pods?gracePeriodSeconds=0")
