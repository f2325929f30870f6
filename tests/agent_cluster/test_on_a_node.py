"""The agent on a Kubernetes node: the real binding on a simulated NVML, a kubelet over gRPC, pods of the API server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.core.readings import Snapshot, Unavailable
from agent.core.settings import Settings, SettingsError
from agent.devices.driver_lifecycle import Gpus, ReleasableSource
from agent.devices.mig_layout import LOOK_MS
from agent.devices.nvml_device import Access
from agent.devices.nvml_library import Driver
from agent.holders.kubelet_client import Kubelet, UnaryChannel
from agent.holders.kubernetes_source import NodePods, kubernetes_source
from agent.holders.lean_list_watch import PodStore, Reflector
from agent.holders.node_snapshot import NodeSource
from agent.holders.process_cgroups import ProcessTable
from agent.main_loop import Agent
from agent.upload.spool import Outbox
from agent.upload.uploader import Uploader
from agent.wire import PodFacts, UsageInterval
from gputally.base.clock import SystemClock, VirtualClock
from tests import patience
from tests.agent_cluster.conftest import MIB
from tests.agent_cluster.objects import UID, pod_object
from tests.fakes.apiserver.server import FakeApiServer
from tests.fakes.kubelet.server import FakeKubelet
from tests.fakes.nvml.library import FakeNvml
from tests.fakes.process_table import add_process

REPLICAS = [f"GPU-a::{k}" for k in range(4)]


class Node:
    """One node, moved second by second. processes: the host's, from level `process` up."""

    def __init__(
        self,
        kubelet: FakeKubelet,
        nvml: FakeNvml,
        clock: VirtualClock,
        folder: Path,
        processes: ProcessTable | None = None,
    ) -> None:
        self.clock = clock
        self.nvml = nvml
        self.channel = UnaryChannel(kubelet.path, clock)
        self.kubelet = Kubelet(kubelet.path, clock, self.channel)
        self.store = PodStore("node-1", ("team",), clock)
        self.reflector = Reflector(None, "/pods", "x=y", self.store, clock)  # type: ignore[arg-type]
        self.reflector.synced = True
        pods = NodePods(self.kubelet, clock, (self.store, self.reflector))
        gpus = Gpus(Driver(), access=Access(processes=processes is not None))
        self.outbox = Outbox(folder / "outbox.sqlite", clock, fsync=False)
        uploader = Uploader(self.outbox, "", "c1", "node-1", "boot", None, clock)
        self.source = NodeSource(gpus, processes, pods, None, "node-1")
        self.agent = Agent(Settings(node="node-1"), self.source, self.outbox, uploader, clock)

    def pass_(self, seconds: int) -> None:
        for _ in range(seconds):
            self.kubelet.poll()
            self.agent.sample()
            self.clock.advance(1_000)
            self.nvml.tell(f"at {self.clock.wall_ms() * 1_000}")

    def tell(self, change: str, pod: dict[str, Any]) -> None:
        self.store.apply(change, json.dumps(pod).encode())

    def spooled(self) -> tuple[tuple[UsageInterval, ...], tuple[PodFacts, ...]]:
        found = self.outbox.pending(10_000, 100_000_000)
        assert found is not None
        return found.intervals, found.facts

    def held(self) -> list[UsageInterval]:
        """The rows of the pod."""
        return [row for row in self.spooled()[0] if row.holder is not None and row.holder.uid == UID]


@pytest.fixture
def node(kubelet: FakeKubelet, nvml: FakeNvml, clock: VirtualClock, tmp_path: Path) -> Iterator[Node]:
    made = Node(kubelet, nvml, clock, tmp_path)
    yield made
    made.agent.shutdown()
    made.channel.close()


def test_a_short_pod_ends_its_interval_and_keeps_its_labels_though_nobody_took_them(
    node: Node, kubelet: FakeKubelet
) -> None:
    """Born and gone within a minute, with no accountant there: everything waits in the outbox."""
    node.pass_(20)
    pod = pod_object(labels={"team": "vision", "kai.scheduler/queue": "research"})
    kubelet.give("vision", "train-0", {"main": {"nvidia.com/gpu": ["GPU-a"]}})
    node.tell("ADDED", pod)
    node.pass_(13)
    node.tell("DELETED", pod)  # the kubelet still lists it for a moment
    node.pass_(2)
    kubelet.take("vision", "train-0")
    node.pass_(30)
    rows, facts = node.spooled()
    held = node.held()
    assert sum(row.allocated_us for row in held) == 13_000_000
    assert sum(row.busy_us or 0 for row in held) == pytest.approx(6_500_000, abs=500_000)
    assert sum(row.capacity_us for row in rows) == (rows[-1].end_ms - rows[0].start_ms) * 1_000
    first, *_, last = facts
    assert (first.uid, first.labels, first.queue_ref) == (UID, {"team": "vision"}, "kai:research")
    assert (first.ended_ms, last.ended_ms is None) == (None, False)
    assert first.seq < min(row.seq for row in held)


def test_an_instance_that_only_the_kubelet_told_of_is_looked_for(
    node: Node, kubelet: FakeKubelet, nvml: FakeNvml
) -> None:
    """Drivers report a new MIG layout by an event; where they do not, its pod must not wait for a minute."""
    nvml.tell("machine", "fail nvmlEventSetCreate 3", "on 0", "migmode 1", f"mig MIG-1 1 0 3 3g.71gb {MIB} 0")
    node.pass_(30)
    nvml.tell("on 0", "migclear", f"mig MIG-2 2 0 7 7g.141gb {MIB} 0")
    kubelet.give("vision", "train-0", {"main": {"nvidia.com/mig-7g.141gb": ["MIG-2"]}})
    node.tell("ADDED", pod_object())
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
        node.tell("ADDED", pod_object(name=f"p{number}", uid=f"u{number}"))
    node.pass_(121)
    rows, _ = node.spooled()
    pods = [row for row in rows if row.holder is not None and row.holder.kind == "pod"]
    assert {(row.allocated_us, row.busy_us) for row in pods} == {(15_000_000, None)}
    assert {row.sharing.replicas for row in pods if row.sharing} == {4}
    nobody = [row for row in rows if row.holder is not None and row.holder.kind == "unattributed"]
    assert sum(row.busy_us or 0 for row in nobody) == pytest.approx(60_000_000, abs=500_000)


def test_a_kubelet_that_is_away_for_a_while_costs_certainty_and_no_time(node: Node, kubelet: FakeKubelet) -> None:
    kubelet.give("vision", "train-0", {"main": {"nvidia.com/gpu": ["GPU-a"]}})
    node.tell("ADDED", pod_object())
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
    kubelet: FakeKubelet, nvml: FakeNvml, clock: VirtualClock, tmp_path: Path
) -> None:
    """Two containers of a static pod on one GPU; its control group is called by a hash, its containers by ids."""
    config_hash, ids = "c0ffee00" * 4, ["a" * 64, "b" * 64]
    proc = tmp_path / "proc"
    for pid, container_id in zip((10, 11), ids, strict=True):
        add_process(proc, pid, f"0::/kubepods/pod{config_hash}/{container_id}")
    nvml.tell(f"load 11 250000 {MIB}")
    kubelet.offer("nvidia.com/gpu", REPLICAS)
    kubelet.give("vision", "train-0", {"a": {"nvidia.com/gpu": [REPLICAS[0]]}, "b": {"nvidia.com/gpu": [REPLICAS[1]]}})
    statuses = [{"name": n, "containerID": f"containerd://{i}"} for n, i in zip("ab", ids, strict=True)]
    annotations = {"kubernetes.io/config.hash": config_hash}
    node = Node(kubelet, nvml, clock, tmp_path, ProcessTable(proc))
    node.tell("ADDED", pod_object(annotations=annotations, status={"containerStatuses": statuses}))
    node.pass_(121)
    rows, _ = node.spooled()
    busy = {c: sum(r.busy_us or 0 for r in rows if r.holder and r.holder.container == c) for c in ("a", "b")}
    assert busy == {"a": pytest.approx(60_000_000, rel=0.1), "b": pytest.approx(30_000_000, rel=0.1)}
    assert {r.holder.uid for r in rows if r.holder and r.holder.kind == "pod"} == {UID}
    node.agent.shutdown()
    node.channel.close()


# --- put together from settings --------------------------------------------------------------------


def until(condition: Callable[[], bool]) -> None:
    patience.until(condition, "other threads did not do it")


class Running:
    """The source as `gputally agent run` makes it."""

    def __init__(self, source: NodeSource, gpus: Gpus) -> None:
        self.source = source
        self.gpus = gpus
        self._at_ms = 0
        self.last: Snapshot | None = None

    def look(self) -> Snapshot:
        self._at_ms += 1_000
        self.last = self.source.snapshot(self._at_ms)
        return self.last

    def holders(self) -> list[str]:
        allocations = self.look().allocations
        return [] if isinstance(allocations, Unavailable) else [a.holder.uid for a in allocations]

    def nvml(self) -> str:
        return dict(self.look().sources)["nvml"]


@pytest.fixture
def running(nvml: FakeNvml, kubelet: FakeKubelet, api_server: FakeApiServer, token: Path) -> Iterator[Running]:
    chosen = Settings(
        node="node-1",
        kubelet_socket=str(kubelet.path),
        api_url=api_server.url,
        api_token_file=str(token),
        pod_labels=" team ,",
    )
    gpus = Gpus(Driver(), access=Access(processes=False))
    made = Running(kubernetes_source(chosen, "node-1", gpus, SystemClock(), {}), gpus)
    yield made
    made.source.close()


def test_from_settings_to_who_holds_what(running: Running, kubelet: FakeKubelet, api_server: FakeApiServer) -> None:
    until(lambda: not isinstance(running.look().allocations, Unavailable))
    assert running.holders() == []
    kubelet.give("vision", "train-0", {"main": {"nvidia.com/gpu": ["GPU-a"]}})
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
    source = ReleasableSource(NodeSource(gpus, None), gpus, clock, hold_s=60)
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
    chosen = Settings(kubelet_socket=str(tmp_path / "none"))
    with pytest.raises(SettingsError, match="--standalone"):
        kubernetes_source(chosen, "n", Gpus(Driver()), SystemClock(), {})


def test_without_the_api_server_there_are_names(nvml: FakeNvml, kubelet: FakeKubelet) -> None:
    kubelet.give("vision", "train-0", {"main": {"nvidia.com/gpu": ["GPU-a"]}})
    chosen = Settings(kubelet_socket=str(kubelet.path), api_url="off")
    gpus = Gpus(Driver(), access=Access(processes=False))
    made = Running(kubernetes_source(chosen, "n", gpus, SystemClock(), {}), gpus)
    until(lambda: made.holders() == ["vision/train-0"])
    made.source.close()
