"""The exposition, byte for byte, and how series come and go."""

import os
import re
from dataclasses import replace
from pathlib import Path
from zoneinfo import ZoneInfo

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from agent.core.readings import (
    SOLE,
    Allocation,
    Condition,
    DeviceReading,
    HolderReading,
    InstanceReading,
    Reading,
    Unavailable,
    XidCount,
)
from agent.core.settings import privilege_text, unseen
from agent.metering.meter import ClosedSet, Meter
from agent.metrics.exporter import UNSCRAPED_MS, AgentMetrics
from agent.metrics.metric_families import Operations
from agent.simulation.simulated_node import A100, H100, SimulatedNode, make_gpu
from agent.wire import Holder, Method, PodFacts, Sharing, UsageInterval

T = 1_790_812_800_000
GOLDEN = Path(__file__).parent / "golden" / "exposition.txt"


def pod(name: str) -> Holder:
    return Holder(kind="pod", uid=f"uid-{name}", namespace="vision", name=name, container="main")


class Bench:
    """A simulated node that is metered and scraped."""

    def __init__(self) -> None:
        self.mig = make_gpu("GPU-1", 1, A100, ["3g.40gb", "1g.10gb"])
        self.node = SimulatedNode("node-1", [make_gpu("GPU-0", 0, H100), self.mig], start_ms=T)
        self.meter = Meter(60_000, ZoneInfo("UTC"))
        self.metrics = AgentMetrics("node-1", "1.2.3")

    def look(self, after_ms: int, ill: bool = False) -> None:
        snapshot = self.node.snapshot(T + after_ms)
        if ill:
            condition = Condition(61, 1_980, 2_619, 0x44, 3, 0, (XidCount(94, 2, T), XidCount(119, 1, T + 1_500)))
            first, *others = snapshot.devices
            snapshot = replace(snapshot, devices=(msgspec.structs.replace(first, condition=condition), *others))
        self.metrics.observe(snapshot, self.meter.observe(snapshot))

    def place(self, after_ms: int, name: str, mig_uuid: str = "", sliced: bool = False) -> None:
        facts = PodFacts(
            seq=0,
            uid=f"uid-{name}",
            namespace="vision",
            name=name,
            node="node-1",
            workload=f"Job/{name}",
            queue_ref="kai:vision",
            observed_ms=T,
        )
        gpu_uuid = "GPU-1" if mig_uuid else "GPU-0"
        allocation = Allocation(gpu_uuid, pod(name), mig_uuid)
        if sliced:
            allocation = Allocation(gpu_uuid, pod(name), sharing="time-slicing", sharing_replicas=4)
        self.node.place(T + after_ms, allocation, 400_000, 2_048, facts)

    def scrape(self) -> dict[tuple[str, str], float]:
        families = text_string_to_metric_families(self.metrics.exposition().decode())
        return {
            (
                sample.name.removeprefix("gputally_"),
                sample.labels.get("pod", "") or sample.labels.get("gpu_uuid", ""),
            ): (sample.value)
            for family in families
            for sample in family.samples
        }


def test_the_exposition_is_what_it_was() -> None:
    bench = Bench()
    bench.place(0, "train", sliced=True)
    bench.place(0, "notebook", bench.mig.mig[1].uuid)
    bench.node.set_stray(T, "GPU-0", 100_000)
    bench.look(0)
    bench.look(60_000)
    bench.node.lose(T + 70_000, "GPU-1")
    bench.look(70_000, ill=True)
    bench.metrics.operate(
        Operations(
            nvml_up=True,
            outbox_rows=7,
            outbox_bytes=4_096,
            outbox_oldest_age_s=12.5,
            uploads={"stored": 3, "retried": 1},
            parked={"undecodable": 1},
            collectors={"nvml": (True, 0.002), "pods": (False, 1.0)},
        )
    )
    seen = bench.metrics.exposition().decode()
    if os.environ.get("GPUTALLY_GOLDEN") == "update":
        GOLDEN.write_text(seen, encoding="utf-8")
    assert seen == GOLDEN.read_text(encoding="utf-8")


def test_the_golden_exposition_follows_the_naming_rules() -> None:
    families = list(text_string_to_metric_families(GOLDEN.read_text(encoding="utf-8")))
    names = {sample.name for family in families for sample in family.samples}
    assert all(name.startswith("gputally_") for name in names)
    assert all(family.documentation.endswith(".") for family in families)
    for family in families:
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter")
            assert not ("pod" in sample.labels and re.match(r"gputally_gpu_", sample.name))


def test_pods_and_the_unattributed_rest_add_up_to_the_device() -> None:
    bench = Bench()
    bench.place(0, "train", sliced=True)
    bench.node.set_stray(T, "GPU-0", 100_000)
    bench.look(0)
    bench.look(60_000)
    seen = bench.scrape()
    assert seen["gpu_busy_seconds_total", "GPU-0"] == 30.0
    assert seen["pod_gpu_busy_seconds_total", "train"] == 24.0
    assert seen["gpu_unattributed_busy_seconds_total", "GPU-0"] == 6.0
    assert seen["pod_gpu_allocated_seconds_total", "train"] == 15.0


def test_counters_only_grow_and_scraping_changes_nothing() -> None:
    bench = Bench()
    bench.place(0, "train")
    last: dict[tuple[str, str], float] = {}
    for minute in range(4):
        if minute == 2:
            bench.node.reset_counters(T + minute * 60_000, "GPU-0")
        bench.look(minute * 60_000)
        for _ in range(3):
            seen = {key: value for key, value in bench.scrape().items() if key[0].endswith("_total")}
            assert all(seen[key] >= value for key, value in last.items())
            last = seen
    assert last["pod_gpu_allocated_seconds_total", "train"] == 180.0


LOOKS = st.sampled_from([(None, "device"), (None, "allocation"), ("time-slicing", "process"), ("time-slicing", "gpm")])


@settings(deadline=None)
@given(st.lists(LOOKS, min_size=2, max_size=12))
def test_however_a_holder_is_read_and_shared_its_time_is_counted_once(looks: list[tuple[str | None, Method]]) -> None:
    """As Prometheus adds up: each series' own growth from scrape to scrape; a new one has grown by nothing."""
    metrics, snapshot = AgentMetrics("n1", "0"), Bench().node.snapshot(T)
    holder = pod("train")
    snapshot = replace(snapshot, allocations=(Allocation("GPU-0", holder),))
    seen: dict[str, float] = {}
    grown = begun = 0.0
    for minute, (mode, method) in enumerate(looks):
        row = UsageInterval(
            seq=minute, start_ms=T + minute * 60_000, end_ms=T + (minute + 1) * 60_000,
            gpu_uuid="GPU-0", gpu_model="H100", slice=None, holder=holder, health="ok",
            sharing=Sharing(mode, 4) if mode else None,
            capacity_us=15_000_000 if mode else 60_000_000, allocated_us=15_000_000 if mode else 60_000_000,
            busy_us=None if method == "allocation" else 6_000_000, sm_active_us=None, tensor_active_us=None,
            memory_mib_s=None, energy_uj=None, method=method, gaps=(),
        )  # fmt: skip
        metrics.observe(snapshot, [ClosedSet((row,))])
        families = {f.name: f for f in text_string_to_metric_families(metrics.exposition().decode())}
        held = {str(s.labels): s.value for s in families["gputally_pod_gpu_allocated_seconds"].samples}
        growth = {series: value - seen.get(series, value) for series, value in held.items()}
        assert min(growth.values()) >= 0
        grown += sum(growth.values())
        begun += sum(value for series, value in held.items() if series not in seen)
        seen |= held
        share = families["gputally_pod_gpu_share_ratio"].samples
        assert [s.value for s in share] == [0.25 if mode else 1.0]
    given_s = sum(15 if mode else 60 for mode, _ in looks)
    assert sum(seen.values()) == given_s
    assert grown == given_s - begun
    assert begun <= 60 * len(set(looks))


def test_the_series_of_a_gone_pod_leave_after_two_scrapes_of_their_last_value() -> None:
    bench = Bench()
    bench.place(0, "train")
    bench.look(0)
    bench.look(60_000)
    assert bench.scrape()["pod_gpu_allocated_seconds_total", "train"] == 60.0
    bench.node.remove(T + 70_000, "uid-train")
    bench.look(70_000)
    for _ in range(2):
        seen = bench.scrape()
        assert seen["pod_gpu_allocated_seconds_total", "train"] == 70.0
        assert ("pod_info", "train") in seen
    assert not [key for key in bench.scrape() if key[1] == "train"]
    assert bench.scrape()["gpu_busy_seconds_total", "GPU-0"] == 28.0


def test_every_series_of_a_gone_holder_leaves_however_it_was_read() -> None:
    bench = Bench()
    bench.place(0, "train")
    bench.look(0)
    bench.look(60_000)
    bench.node.remove(T + 70_000, "uid-train")
    bench.place(70_000, "train", sliced=True)
    bench.look(70_000)
    bench.look(130_000)
    assert bench.metrics.exposition().count(b"gputally_pod_gpu_allocated_seconds_total{") == 2
    bench.node.remove(T + 140_000, "uid-train")
    bench.look(140_000)
    for _ in range(2):
        bench.scrape()
    assert not [key for key in bench.scrape() if key[1] == "train"]


def test_where_nobody_scrapes_the_gone_are_forgotten_all_the_same() -> None:
    """Many clusters have no Prometheus: a node of short jobs would remember each of them for ever."""
    bench = Bench()
    for minute in range(120):
        bench.place(minute * 60_000, f"job-{minute}")
        bench.look(minute * 60_000)
        bench.node.remove(T + minute * 60_000 + 30_000, f"uid-job-{minute}")
        bench.look(minute * 60_000 + 30_000)
    shown = {pod for name, pod in bench.scrape() if name == "pod_gpu_allocated_seconds_total"}
    assert shown == {f"job-{minute}" for minute in range(119 - UNSCRAPED_MS // 60_000, 120)}
    assert len({pod for name, pod in bench.scrape() if name == "pod_info"}) <= len(shown)


def test_nobody_is_forgotten_while_the_holders_are_unknown() -> None:
    bench = Bench()
    bench.place(0, "train")
    bench.look(0)
    bench.look(60_000)
    bench.node.set_holders_unavailable(T + 61_000, "kubelet gone")
    bench.look(62_000)
    for _ in range(5):
        assert ("pod_gpu_allocated_seconds_total", "train") in bench.scrape()


def test_rows_of_a_former_mig_layout_keep_the_name_of_their_instance() -> None:
    bench = Bench()
    instance = bench.mig.mig[0].uuid
    bench.place(0, "train", instance)
    bench.look(0)
    bench.node.remove(T + 30_000, "uid-train")
    bench.node.repartition(T + 30_000, "GPU-1", ["7g.80gb"])
    bench.look(30_000)
    text = bench.metrics.exposition().decode()
    assert f'mig_uuid="{instance}"' in text


def test_before_anything_was_seen_the_agent_still_answers() -> None:
    metrics = AgentMetrics("node-1", "1.2.3")
    metrics.operate(Operations(nvml_up=False))
    text = metrics.exposition().decode()
    assert "gputally_nvml_up 0.0" in text
    assert 'gputally_agent_build_info{node="node-1",version="1.2.3"} 1.0' in text


def test_the_level_of_privilege_and_what_it_hides_are_said_on_kubernetes_only() -> None:
    metrics = AgentMetrics("n1", "0")
    assert b"privilege" not in metrics.exposition()
    metrics.operate(Operations(privilege="process", unseen=unseen("process")))
    shown = metrics.exposition().decode()
    assert 'gputally_agent_privilege_info{level="process"} 1.0' in shown
    assert 'gputally_agent_unseen{what="mig-utilisation"} 1.0' in shown
    assert set(unseen("allocation")) > set(unseen("process")) > set(unseen("profiling"))
    assert privilege_text("profiling") == "nothing"


def test_what_is_said_to_be_unseen_never_contradicts_what_is_seen() -> None:
    mig = make_gpu("GPU-1", 1, A100, ["3g.40gb"])
    refused = Unavailable("no permission (nvmlGpmMigSampleGet, 4)")

    def cut(busy: Reading) -> DeviceReading:
        return DeviceReading(mig, instances=(InstanceReading(mig.mig[0].uuid, busy),))

    assert "mig-utilisation" not in unseen("allocation", [cut(5)]), "an exporter, or a driver that lets anybody"
    assert unseen("profiling", [cut(refused)]) == ("mig-utilisation",)
    whole = DeviceReading(make_gpu("GPU-0", 0, H100), unlisted=(("", "timeout"),))
    assert unseen("profiling", [whole]) == (
        "pod-busy-on-shared-gpus", "pod-memory-on-shared-gpus", "processes-outside-kubernetes",
    )  # fmt: skip
    shared = (HolderReading(pod("a"), busy_us=refused, memory_mib=3), HolderReading(pod("b"), busy_us=7, memory_mib=4))
    assert unseen("process", [cut(5), DeviceReading(whole.gpu, holders=shared)]) == ("pod-busy-on-shared-gpus",)
    alone = (HolderReading(pod("a"), busy_us=SOLE, memory_mib=3),)
    assert unseen("process", [cut(5), DeviceReading(whole.gpu, holders=alone)]) == ()
