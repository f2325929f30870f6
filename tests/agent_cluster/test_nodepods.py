"""Who holds what, from a kubelet and an API server that come, go and disagree; through to exact rows."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from agent.core.readings import Unavailable
from agent.holders.kubelet_client import OFFER_MS, VALID_MS, Kubelet, UnaryChannel
from agent.holders.kubernetes_source import KEEP_MS, SYNC_MS, NodePods, NodeStore
from agent.holders.lean_list_watch import PodStore, Reflector
from agent.holders.pod_and_job_files import Pods
from agent.holders.process_cgroups import PodLogs
from gputally.base.background_tasks import BackgroundTask
from gputally.base.clock import VirtualClock
from tests.agent_cluster.conftest import T0, gpu, uuid
from tests.agent_cluster.objects import UID, pod_object
from tests.fakes.kubelet.server import FakeKubelet

A = uuid(0)
GPUS = (gpu(0), gpu(1))


class Silent:
    """An API server that never answers: the stores are fed by the test."""


class Cluster:
    """One node whose stores and polls are moved by hand."""

    def __init__(self, kubelet: FakeKubelet, clock: VirtualClock, logs: Path) -> None:
        self.channel = UnaryChannel(kubelet.path, clock)
        self.kubelet = Kubelet(kubelet.path, clock, self.channel)
        self.store = PodStore("node-1", ("team",), clock)
        self.node = NodeStore("node-1", lambda before, reason: None)
        api = Silent()
        self.pods = Reflector(api, "/pods", "x=y", self.store, clock)  # type: ignore[arg-type]
        nodes = Reflector(api, "/nodes", "x=y", self.node, clock)  # type: ignore[arg-type]
        self.logs = PodLogs(logs)
        self.whole = NodePods(self.kubelet, clock, (self.store, self.pods), (self.node, nodes), logs=self.logs)
        self.clock = clock

    def list(self, *pods: dict[str, object]) -> None:
        self.store.replace([json.dumps(pod).encode() for pod in pods])
        self.pods.synced, self.pods.failure = True, ""

    def read(self) -> Pods:
        self.kubelet.poll()
        return self.whole.read(self.clock.wall_ms(), GPUS)


@pytest.fixture
def cluster(kubelet: FakeKubelet, clock: VirtualClock, tmp_path: Path) -> Iterator[Cluster]:
    kubelet.give("vision", "train-0", {"main": {"nvidia.com/gpu": [A]}})
    made = Cluster(kubelet, clock, tmp_path / "logs")
    yield made
    made.channel.close()


def held(pods: Pods) -> list[tuple[str, str]]:
    assert not isinstance(pods.allocations, Unavailable), pods.allocations
    return [(a.gpu_uuid, a.holder.uid) for a in pods.allocations]


def test_a_gpu_whose_minor_number_was_not_read_may_be_the_device_that_is_found_nowhere(
    kubelet: FakeKubelet, cluster: Cluster
) -> None:
    kubelet.give("vision", "train-1", {"main": {"nvidia.com/gpu": ["nvidia1"]}})
    cluster.list()
    cluster.kubelet.poll()
    blind = [replace(gpu, minor=None) for gpu in GPUS]
    found = cluster.whole.read(cluster.clock.wall_ms(), blind)
    assert found.unresolved == ("nvidia1",)
    assert set(found.unknown) == {gpu.uuid for gpu in GPUS}
    assert cluster.whole.read(cluster.clock.wall_ms(), GPUS).unknown == {}


def test_both_together(cluster: Cluster) -> None:
    cluster.list(pod_object())
    pods = cluster.read()
    assert held(pods) == [(A, UID)]
    assert [f.uid for f in pods.facts] == [UID]
    assert dict(pods.sources)["kubelet"] == dict(pods.sources)["pods"] == ""


def test_until_the_pods_are_listed_nobody_is_billed_under_a_makeshift_name(cluster: Cluster) -> None:
    assert cluster.read().allocations == Unavailable("pods: not listed yet")
    cluster.clock.advance(SYNC_MS)
    assert held(cluster.read()) == [(A, "vision/train-0")]
    cluster.list(pod_object())
    assert held(cluster.read()) == [(A, UID)]


def test_the_log_folders_know_a_pod_that_the_api_server_could_not_name(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "logs" / "vision_train-0_uid-of-the-log").mkdir(parents=True)
    cluster.clock.advance(SYNC_MS)
    assert held(cluster.read()) == [(A, "uid-of-the-log")]


def test_without_the_kubelet_holders_are_unknown_after_a_while_and_facts_go_on(
    cluster: Cluster, kubelet: FakeKubelet
) -> None:
    cluster.list(pod_object())
    cluster.read()
    kubelet.stop()
    cluster.clock.advance(VALID_MS)
    assert held(cluster.read()) == [(A, UID)]
    cluster.clock.advance(1)
    pods = cluster.read()
    assert isinstance(pods.allocations, Unavailable)
    assert "No such file" in pods.allocations.reason
    assert [f.uid for f in pods.facts] == [UID]
    assert dict(pods.sources)["kubelet"] != ""


def test_a_kubelet_that_restarts_lists_nothing_at_first_and_nobody_loses_a_gpu(
    cluster: Cluster, kubelet: FakeKubelet
) -> None:
    cluster.list(pod_object())
    cluster.read()
    kubelet.stop()
    kubelet.take("vision", "train-0")
    kubelet.start()
    assert held(cluster.read()) == [(A, UID)]
    cluster.clock.advance(KEEP_MS)
    assert held(cluster.read()) == [(A, UID)]
    cluster.clock.advance(1)
    assert held(cluster.read()) == []


@pytest.mark.parametrize("how", ["ended", "deleted", "terminating"])
def test_a_pod_that_is_over_lets_go_at_once(cluster: Cluster, kubelet: FakeKubelet, how: str) -> None:
    cluster.list(pod_object())
    cluster.read()
    item = json.dumps(pod_object(phase="Succeeded" if how == "ended" else "Running")).encode()
    if how == "terminating":
        over = pod_object(deletionTimestamp="2026-10-01T09:00:00Z")
        cluster.store.apply("MODIFIED", json.dumps(over).encode())
        assert held(cluster.read()) == [(A, UID)]  # its processes may still run; the kubelet says when they do not
        kubelet.take("vision", "train-0")
    else:
        cluster.store.apply("MODIFIED" if how == "ended" else "DELETED", item)
    assert held(cluster.read()) == []
    assert [f.uid for f in cluster.read().facts] == [UID]


def test_replicas_are_shared_as_the_node_says(cluster: Cluster, kubelet: FakeKubelet) -> None:
    kubelet.give("vision", "train-0", {"main": {"nvidia.com/gpu.shared": [f"{A}::0"]}})
    kubelet.offer("nvidia.com/gpu.shared", [f"{A}::{k}" for k in range(4)])
    node = {"kind": "Node", "metadata": {"name": "node-1", "labels": {"nvidia.com/gpu.sharing-strategy": "mps"}}}
    cluster.node.replace([json.dumps(node).encode()])
    cluster.list(pod_object())
    pods = cluster.read()
    assert not isinstance(pods.allocations, Unavailable)
    assert [(a.sharing, a.sharing_replicas) for a in pods.allocations] == [("mps", 4)]


@pytest.mark.parametrize("meanwhile", [[], [uuid(1)]])
def test_a_device_that_is_not_offered_for_a_while_stays_cut_as_it_was(
    cluster: Cluster, kubelet: FakeKubelet, meanwhile: list[str]
) -> None:
    """The kubelet offers healthy devices only: none while their plugin restarts, not one that had an XID."""

    def parts() -> list[int]:
        cluster.clock.advance(OFFER_MS)
        pods = cluster.read()
        assert not isinstance(pods.allocations, Unavailable)
        return [a.sharing_replicas for a in pods.allocations]

    kubelet.give("vision", "train-0", {"main": {"nvidia.com/gpu": [f"{A}::3"]}})
    cluster.list(pod_object())
    kubelet.offer("nvidia.com/gpu", [f"{A}::{k}" for k in range(4)])
    assert parts() == [4]
    kubelet.offer("nvidia.com/gpu", meanwhile)
    assert (parts(), parts()) == ([4], [4])
    kubelet.offer("nvidia.com/gpu", [f"{A}::{k}" for k in range(8)])
    assert parts() == [8]


def test_a_device_that_is_not_here_is_named(cluster: Cluster, kubelet: FakeKubelet) -> None:
    kubelet.give("vision", "train-0", {"main": {"nvidia.com/gpu": [uuid(9)]}})
    cluster.list(pod_object())
    assert dict(cluster.read().sources)["allocations"] == f"no GPU here is called {uuid(9)}"


def test_without_an_api_server_the_kubelet_is_enough(kubelet: FakeKubelet, clock: VirtualClock, tmp_path: Path) -> None:
    kubelet.give("vision", "train-0", {"main": {"nvidia.com/gpu": [A]}})
    channel = UnaryChannel(kubelet.path, clock)
    polled = Kubelet(kubelet.path, clock, channel)
    polled.poll()
    pods = NodePods(polled, clock).read(T0, GPUS)
    assert held(pods) == [(A, "vision/train-0")]
    assert [name for name, _ in pods.sources] == ["kubelet", "allocations"]
    channel.close()


class FailingOnce:
    """Stands for a kubelet client with a defect: following it raises once."""

    def __init__(self) -> None:
        self.begun = 0
        self.again = threading.Event()

    def run(self, stop: threading.Event, _task: BackgroundTask) -> None:
        self.begun += 1
        if self.begun == 1:
            raise ValueError("a defect")
        self.again.set()
        stop.wait()

    def close(self) -> None:
        """Hold nothing."""


def test_a_defect_does_not_end_the_thread_that_follows_the_kubelet(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    kubelet = FailingOnce()
    pods = NodePods(cast(Kubelet, kubelet), clock)
    pods.start()
    assert kubelet.again.wait(10)
    pods.close()
    assert "a loop failed and restarts" in caplog.text
