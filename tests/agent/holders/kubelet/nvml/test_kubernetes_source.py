"""Holders on a Kubernetes node, from a kubelet and an API server that fail, return and disagree, through to exact
rows."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from agent.core.readings import NodeSnapshot, Unavailable
from agent.core.settings import AgentSettings, SettingsError
from agent.gpu_readers.nvml.driver_lifecycle import Gpus
from agent.gpu_readers.nvml.mig_layout import LOOK_MS
from agent.gpu_readers.nvml.nvml_device import Access
from agent.gpu_readers.nvml.nvml_library import Driver
from agent.gpu_readers.release_by_signal import ReleasableSource
from agent.holders.kubelet.kubelet_grpc_client import OFFER_MS, VALID_MS, Kubelet, UnaryChannel
from agent.holders.kubelet.kubernetes_source import KEEP_MS, SYNC_MS, KubernetesSource, NodeStore
from agent.holders.kubelet.lean_list_watch import LeanReflector, PodStore
from agent.holders.process_cgroups import PodLogs, ProcessTable
from agent.holders.protocol import Holdings
from agent.main_loop import Agent
from agent.node_reader import NodeSource
from agent.upload.spool import Outbox
from agent.upload.uploader import Uploader
from agent.wire import PodFacts, UsageInterval
from gputally.base.background_tasks import BackgroundTask
from gputally.base.clock import VirtualClock
from tests import deadlines
from tests.agent.holders.kubelet.pods import UID, pod_object
from tests.agent.readers import node_source, nvml_alone
from tests.agent.sample_values import MIB, gpu, uuid
from tests.fakes.apiserver.server import FakeApiServer
from tests.fakes.kubelet.server import FakeKubelet
from tests.fakes.nvml.library import FakeNvml
from tests.fakes.process_table import add_process

A = uuid(0)
GPUS = (gpu(0), gpu(1))


class Cluster:
    """A node whose pod store and kubelet polls the test drives; its API server never answers."""

    def __init__(self, kubelet: FakeKubelet, clock: VirtualClock, logs: Path) -> None:
        self.channel = UnaryChannel(kubelet.path, clock)
        self.kubelet = Kubelet(kubelet.path, clock, self.channel)
        self.store = PodStore("node-1", ("team",), clock)
        self.node = NodeStore("node-1", lambda before, reason: None)
        self.pods, nodes = (
            LeanReflector(None, path, "x=y", store, clock)  # type: ignore[arg-type]
            for path, store in (("/pods", self.store), ("/nodes", self.node))
        )
        followed = (self.store, self.pods), (self.node, nodes)
        self.whole = KubernetesSource(self.kubelet, clock, *followed, logs=PodLogs(logs), systems=frozenset({"fake"}))
        self.clock = clock

    def tell(self, change: str, pod: dict[str, Any]) -> None:
        self.store.apply(change, json.dumps(pod).encode())

    def list(self, *pods: dict[str, object]) -> None:
        self.store.replace([json.dumps(pod).encode() for pod in pods])
        self.pods.synced, self.pods.failure = True, ""

    def read(self) -> Holdings:
        self.kubelet.poll()
        return self.whole.read(self.clock.wall_ms(), GPUS)


@pytest.fixture
def cluster(kubelet: FakeKubelet, clock: VirtualClock, tmp_path: Path) -> Iterator[Cluster]:
    """The kubelet has given GPU 0 to the pod of `pod_object`."""
    give(kubelet, A)
    made = Cluster(kubelet, clock, tmp_path / "logs")
    yield made
    made.channel.close()


def give(kubelet: FakeKubelet, *devices: str, name: str = "train-0", resource: str = "nvidia.com/gpu") -> None:
    kubelet.give("vision", name, {"main": {resource: devices}})


def sharing(pods: Holdings) -> list[tuple[str | None, int]]:
    assert not isinstance(pods.allocations, Unavailable), pods.allocations
    return [(a.sharing, a.sharing_replicas) for a in pods.allocations]


def held(pods: Holdings) -> list[tuple[str, str]]:
    assert not isinstance(pods.allocations, Unavailable), pods.allocations
    return [(a.gpu_uuid, a.holder.uid) for a in pods.allocations]


def test_a_gpu_whose_minor_number_was_not_read_may_be_the_device_that_is_found_nowhere(
    kubelet: FakeKubelet, cluster: Cluster
) -> None:
    give(kubelet, "nvidia1")
    cluster.list()
    assert cluster.read().unknown == {}
    found = cluster.whole.read(cluster.clock.wall_ms(), [replace(gpu, minor=None) for gpu in GPUS])
    assert found.unresolved == ("nvidia1",)
    assert set(found.unknown) == {gpu.uuid for gpu in GPUS}


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
    give(kubelet, f"{A}::0", resource="nvidia.com/gpu.shared")
    kubelet.offer("nvidia.com/gpu.shared", [f"{A}::{k}" for k in range(4)])
    node = {"kind": "Node", "metadata": {"name": "node-1", "labels": {"nvidia.com/gpu.sharing-strategy": "mps"}}}
    cluster.node.replace([json.dumps(node).encode()])
    cluster.list(pod_object())
    assert sharing(cluster.read()) == [("mps", 4)]


@pytest.mark.parametrize("meanwhile", [[], [uuid(1)]])
def test_a_device_that_is_not_offered_for_a_while_stays_cut_as_it_was(
    cluster: Cluster, kubelet: FakeKubelet, meanwhile: list[str]
) -> None:
    """The kubelet offers healthy devices only: none while their plugin restarts, and none with a recent XID."""
    give(kubelet, f"{A}::3")
    cluster.list(pod_object())
    four, eight = ([f"{A}::{k}" for k in range(count)] for count in (4, 8))
    for offered, parts in ((four, 4), (meanwhile, 4), (meanwhile, 4), (eight, 8)):
        kubelet.offer("nvidia.com/gpu", offered)
        cluster.clock.advance(OFFER_MS)
        assert sharing(cluster.read()) == [("time-slicing", parts)]


def test_a_device_that_is_not_here_is_named(cluster: Cluster, kubelet: FakeKubelet) -> None:
    give(kubelet, uuid(9))
    cluster.list(pod_object())
    assert dict(cluster.read().sources)["allocations"] == f"no GPU here is called {uuid(9)}"


class FailingOnce:
    """A defective kubelet client: its watch raises once."""

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
    pods = KubernetesSource(cast(Kubelet, kubelet), clock)
    pods.start()
    assert kubelet.again.wait(10)
    pods.close()
    assert "a loop failed and restarts" in caplog.text


REPLICAS = [f"GPU-a::{k}" for k in range(4)]


class Node:
    """A cluster's node with its agent, advanced second by second. processes: the host's, from level `process` up."""

    def __init__(self, cluster: Cluster, nvml: FakeNvml, outbox: Outbox, processes: ProcessTable | None = None) -> None:
        self.clock, self.nvml, self.cluster, self.outbox = cluster.clock, nvml, cluster, outbox
        cluster.list()
        gpus = Gpus(Driver(), access=Access(processes=processes is not None))
        uploader = Uploader(outbox, "", "c1", "node-1", "boot", None, self.clock)
        source = NodeSource(nvml_alone(gpus), processes, cluster.whole, None, "node-1", systems=frozenset({"fake"}))
        self.agent = Agent(AgentSettings(node="node-1"), source, outbox, uploader, self.clock)

    def pass_(self, seconds: int) -> None:
        for _ in range(seconds):
            self.cluster.kubelet.poll()
            self.agent.sample()
            self.clock.advance(1_000)
            self.nvml.tell(f"at {self.clock.wall_ms() * 1_000}")

    def spooled(self) -> tuple[tuple[UsageInterval, ...], tuple[PodFacts, ...]]:
        found = self.outbox.pending(10_000, 100_000_000)
        assert found is not None
        return found.intervals, found.facts

    def held(self) -> list[UsageInterval]:
        """Return the pod's rows."""
        return [row for row in self.spooled()[0] if row.holder is not None and row.holder.uid == UID]


@pytest.fixture
def node(kubelet: FakeKubelet, cluster: Cluster, nvml: FakeNvml, open_outbox: Callable[..., Outbox]) -> Iterator[Node]:
    kubelet.take("vision", "train-0")
    made = Node(cluster, nvml, open_outbox())
    yield made
    made.agent.shutdown()


def test_a_short_pod_ends_its_interval_and_keeps_its_labels_though_nobody_took_them(
    node: Node, kubelet: FakeKubelet
) -> None:
    """The pod starts and ends within a minute without an accountant; its records wait in the outbox."""
    node.pass_(20)
    pod = pod_object(labels={"team": "vision", "fake.gputally.dev/queue": "research"})
    give(kubelet, "GPU-a")
    node.cluster.tell("ADDED", pod)
    node.pass_(13)
    node.cluster.tell("DELETED", pod)  # the kubelet still lists it for a moment
    node.pass_(2)
    kubelet.take("vision", "train-0")
    node.pass_(30)
    rows, facts = node.spooled()
    held = node.held()
    assert sum(row.allocated_us for row in held) == 13_000_000
    assert sum(row.busy_us or 0 for row in held) == pytest.approx(6_500_000, abs=500_000)
    assert sum(row.capacity_us for row in rows) == (rows[-1].end_ms - rows[0].start_ms) * 1_000
    first, *_, last = facts
    assert (first.uid, first.labels, first.queue_ref) == (UID, {"team": "vision"}, "fake:research")
    assert (first.ended_ms, last.ended_ms is None) == (None, False)
    assert first.seq < min(row.seq for row in held)


def test_an_instance_that_only_the_kubelet_told_of_is_looked_for(
    node: Node, kubelet: FakeKubelet, nvml: FakeNvml
) -> None:
    """Drivers usually report a new MIG layout by an event. Without one, its pod must not wait for a minute."""
    nvml.tell("machine", "fail nvmlEventSetCreate 3", "on 0", "migmode 1", f"mig MIG-1 1 0 3 3g.71gb {MIB} 0")
    node.pass_(30)
    nvml.tell("on 0", "migclear", f"mig MIG-2 2 0 7 7g.141gb {MIB} 0")
    kubelet.give("vision", "train-0", {"main": {"nvidia.com/mig-7g.141gb": ["MIG-2"]}})
    node.cluster.tell("ADDED", pod_object())
    node.pass_(20)
    kubelet.give("vision", "other", {"main": {"nvidia.com/mig-1g.18gb": ["MIG-none"]}})
    node.pass_(3)
    before = nvml.calls("nvmlDeviceGetMaxMigDeviceCount")
    node.pass_(68)
    assert sum(row.allocated_us for row in node.held()) >= (90 - 2 - LOOK_MS // 1_000) * 1_000_000
    assert nvml.calls("nvmlDeviceGetMaxMigDeviceCount") - before <= 60_000 // LOOK_MS + 2, "not with every reading"


def test_on_a_shared_gpu_the_allocation_is_exact_and_who_was_busy_is_unknown(node: Node, kubelet: FakeKubelet) -> None:
    kubelet.offer("nvidia.com/gpu", REPLICAS)
    for number in (0, 1):
        kubelet.give("vision", f"p{number}", {"main": {"nvidia.com/gpu": [REPLICAS[number]]}})
        node.cluster.tell("ADDED", pod_object(name=f"p{number}", uid=f"u{number}"))
    node.pass_(121)
    rows, _ = node.spooled()
    pods = [row for row in rows if row.holder is not None and row.holder.kind == "pod"]
    assert {(row.allocated_us, row.busy_us) for row in pods} == {(15_000_000, None)}
    assert {row.sharing.replicas for row in pods if row.sharing} == {4}
    nobody = [row for row in rows if row.holder is not None and row.holder.kind == "unattributed"]
    assert sum(row.busy_us or 0 for row in nobody) == pytest.approx(60_000_000, abs=500_000)


def test_a_kubelet_that_is_away_for_a_while_costs_certainty_and_no_time(node: Node, kubelet: FakeKubelet) -> None:
    give(kubelet, "GPU-a")
    node.cluster.tell("ADDED", pod_object())
    node.pass_(60)
    kubelet.stop()
    node.pass_(60)
    kubelet.start()
    node.pass_(61)
    held = node.held()
    assert sum(row.allocated_us for row in held) == 180_000_000
    unknown = sum(gap.end_ms - gap.start_ms for row in held for gap in row.gaps)
    assert 0 < unknown <= 31_000


def test_with_the_hosts_processes_each_container_has_its_own_time(
    kubelet: FakeKubelet, cluster: Cluster, nvml: FakeNvml, open_outbox: Callable[..., Outbox], tmp_path: Path
) -> None:
    """Two containers of a static pod on one GPU; the pod's cgroup has a hash as its name, its containers have ids."""
    config_hash, ids = "c0ffee00" * 4, ["a" * 64, "b" * 64]
    proc = tmp_path / "proc"
    for pid, container_id in zip((10, 11), ids, strict=True):
        add_process(proc, pid, f"0::/kubepods/pod{config_hash}/{container_id}")
    nvml.tell(f"load 11 250000 {MIB}")
    kubelet.offer("nvidia.com/gpu", REPLICAS)
    kubelet.give("vision", "train-0", {"a": {"nvidia.com/gpu": [REPLICAS[0]]}, "b": {"nvidia.com/gpu": [REPLICAS[1]]}})
    statuses = [{"name": n, "containerID": f"containerd://{i}"} for n, i in zip("ab", ids, strict=True)]
    annotations = {"kubernetes.io/config.hash": config_hash}
    node = Node(cluster, nvml, open_outbox(), ProcessTable(proc))
    cluster.tell("ADDED", pod_object(annotations=annotations, status={"containerStatuses": statuses}))
    node.pass_(121)
    rows, _ = node.spooled()
    busy = {c: sum(r.busy_us or 0 for r in rows if r.holder and r.holder.container == c) for c in ("a", "b")}
    assert busy == {"a": pytest.approx(60_000_000, rel=0.1), "b": pytest.approx(30_000_000, rel=0.1)}
    assert {r.holder.uid for r in rows if r.holder and r.holder.kind == "pod"} == {UID}
    node.agent.shutdown()


# --- put together from settings --------------------------------------------------------------------


def until(condition: Callable[[], bool]) -> None:
    deadlines.until(condition, "other threads did not do it")


class Running:
    """The source as `gputally agent run` builds it."""

    def __init__(self, source: NodeSource, gpus: Gpus) -> None:
        self.source = source
        self.gpus = gpus
        self._at_ms = 0
        self.last: NodeSnapshot | None = None

    def look(self) -> NodeSnapshot:
        self._at_ms += 1_000
        self.last = self.source.snapshot(self._at_ms)
        return self.last

    def holders(self) -> list[str]:
        allocations = self.look().allocations
        return [] if isinstance(allocations, Unavailable) else [a.holder.uid for a in allocations]

    def nvml(self) -> str:
        return dict(self.look().sources)["nvml"]


@pytest.fixture
def running(
    nvml: FakeNvml, kubelet: FakeKubelet, api_server: FakeApiServer, token: Path, tmp_path: Path
) -> Iterator[Running]:
    chosen = AgentSettings(
        node="node-1",
        kubelet_socket=str(kubelet.path),
        api_url=api_server.url,
        api_token_file=str(token),
        pod_labels=" team ,",
    )
    gpus = Gpus(Driver(), access=Access(processes=False))
    made = Running(node_source(chosen, nvml_alone(gpus), tmp_path), gpus)
    yield made
    made.source.close()


def test_from_settings_to_who_holds_what(running: Running, kubelet: FakeKubelet, api_server: FakeApiServer) -> None:
    until(lambda: not isinstance(running.look().allocations, Unavailable))
    assert running.holders() == []
    give(kubelet, "GPU-a")
    api_server.put(pod_object(labels={"team": "vision", "other": "x"}))
    until(lambda: running.holders() == [UID])
    assert running.last is not None
    assert [(f.uid, f.labels) for f in running.last.facts] == [(UID, {"team": "vision"})]
    assert {name: failure for name, failure in running.last.sources if failure} == {}


def test_the_driver_is_let_go_while_the_node_asks_for_it(running: Running, api_server: FakeApiServer) -> None:
    until(lambda: running.nvml() == "")

    def label(value: str) -> None:
        labels = {"nvidia.com/mig.config.state": value}
        api_server.put({"kind": "Node", "metadata": {"name": "node-1", "labels": labels}})

    for value in ("pending", "rebooting"):
        label(value)
        until(lambda value=value: running.nvml() == f"released: nvidia.com/mig.config.state={value}")  # type: ignore[misc]
        assert running.gpus.idle
    label("success")
    until(lambda: running.nvml() == "")


def test_a_signal_lets_go_for_its_time(nvml: FakeNvml, clock: VirtualClock) -> None:
    gpus = Gpus(Driver())
    readers = nvml_alone(gpus)
    source = ReleasableSource(NodeSource(readers, None), readers, clock, hold_s=60)
    assert dict(source.snapshot(1_000).sources)["nvml"] == ""
    source.close_driver()
    assert dict(source.snapshot(2_000).sources)["nvml"] == "released: signal"
    clock.advance(59_999)
    source.close_driver()
    clock.advance(59_999)
    source.snapshot(3_000)
    assert gpus.idle
    clock.advance(1)
    assert dict(source.snapshot(4_000).sources)["nvml"] == ""
    source.close()


def test_neither_a_pod_nor_a_node_is_said_with_the_ways_out(nvml: FakeNvml, tmp_path: Path) -> None:
    chosen = AgentSettings(kubelet_socket=str(tmp_path / "none"))
    with pytest.raises(SettingsError, match="--holders processes"):
        node_source(chosen, nvml_alone(Gpus(Driver())), tmp_path)


def test_without_the_api_server_there_are_names(nvml: FakeNvml, kubelet: FakeKubelet, tmp_path: Path) -> None:
    give(kubelet, "GPU-a")
    chosen = AgentSettings(kubelet_socket=str(kubelet.path), api_url="off")
    gpus = Gpus(Driver(), access=Access(processes=False))
    made = Running(node_source(chosen, nvml_alone(gpus), tmp_path), gpus)
    until(lambda: made.holders() == ["vision/train-0"])
    assert set(dict(made.look().sources)) == {"nvml", "kubelet", "allocations"}
    made.source.close()
