"""The metrics page, byte for byte, its text format, the DCGM-compatible series and the HTTP server."""

from __future__ import annotations

import http.client
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from agent.core.readings import (
    SOLE,
    Allocation,
    DeviceCondition,
    DeviceReading,
    HolderReading,
    InstanceReading,
    Reading,
    Unavailable,
    XidCount,
)
from agent.core.settings import privilege_text, unseen
from agent.metering.meter import ClosedSet, Meter
from agent.metrics import exporter
from agent.metrics.dcgm_compat import DcgmOutput
from agent.metrics.exporter import UNSCRAPED_MS, AgentMetrics, Exposition
from agent.metrics.metric_families import Family, Kind, Operations, TextFormat
from agent.simulation.simulated_node import A100, H100, SimulatedNode, make_gpu
from agent.wire import Holder, Method, PodFacts, Sharing, UsageInterval
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import VirtualClock
from gputally.base.host_names import KnownHosts
from tests.agent.sample_values import T0
from tests.hypothesis_examples import examples

GOLDEN = Path(__file__).parent / "golden" / "exposition.txt"


MIG = make_gpu("GPU-1", 1, A100, ["3g.40gb", "1g.10gb"])


def pod(name: str) -> Holder:
    return Holder(kind="pod", uid=f"uid-{name}", namespace="vision", name=name, container="main")


class Bench:
    """A simulated node that is metered and scraped."""

    def __init__(self) -> None:
        self.mig = MIG
        self.node = SimulatedNode("node-1", [make_gpu("GPU-0", 0, H100), MIG], start_ms=T0)
        self.meter = Meter(60_000, ZoneInfo("UTC"))
        self.metrics = AgentMetrics("node-1", "1.2.3")

    def look(self, after_ms: int, ill: bool = False) -> None:
        snapshot = self.node.snapshot(T0 + after_ms)
        if ill:
            condition = DeviceCondition(
                61, 1_980, 2_619, 0x44, 3, 0, (XidCount(94, 2, T0), XidCount(119, 1, T0 + 1_500))
            )
            first, *others = snapshot.devices
            snapshot = replace(snapshot, devices=(msgspec.structs.replace(first, condition=condition), *others))
        self.metrics.observe(snapshot, self.meter.observe(snapshot))

    def minute(self) -> None:
        """Let the first minute pass."""
        self.look(0)
        self.look(60_000)

    def place(self, after_ms: int, name: str, mig_uuid: str = "", sliced: bool = False) -> None:
        facts = PodFacts(
            seq=0, uid=f"uid-{name}", namespace="vision", name=name, node="node-1", workload=f"Job/{name}",
            queue_ref="kai:vision", observed_ms=T0,
        )  # fmt: skip
        mode, replicas = ("time-slicing", 4) if sliced else (None, 0)
        allocation = Allocation("GPU-1" if mig_uuid else "GPU-0", pod(name), mig_uuid, mode, replicas)
        self.node.place(T0 + after_ms, allocation, 400_000, 2_048, facts)

    def scrape(self) -> dict[tuple[str, str], float]:
        """Return the values by metric, and by pod or else by GPU."""
        samples = [s for f in text_string_to_metric_families(self.metrics.exposition().decode()) for s in f.samples]
        return {
            (s.name.removeprefix("gputally_"), s.labels.get("pod", "") or s.labels.get("gpu_uuid", "")): s.value
            for s in samples
        }


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_the_exposition_is_what_it_was(bench: Bench) -> None:
    bench.place(0, "train", sliced=True)
    bench.place(0, "notebook", bench.mig.mig[1].uuid)
    bench.node.set_stray(T0, "GPU-0", 100_000)
    bench.minute()
    bench.node.lose(T0 + 70_000, "GPU-1")
    bench.look(70_000, ill=True)
    bench.metrics.operate(
        Operations(
            nvml_up=True,
            intervals_closed=9,
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


def test_pods_and_the_unattributed_rest_add_up_to_the_device(bench: Bench) -> None:
    bench.place(0, "train", sliced=True)
    bench.node.set_stray(T0, "GPU-0", 100_000)
    bench.minute()
    seen = bench.scrape()
    assert seen["gpu_busy_seconds_total", "GPU-0"] == 30.0
    assert seen["pod_gpu_busy_seconds_total", "train"] == 24.0
    assert seen["gpu_unattributed_busy_seconds_total", "GPU-0"] == 6.0
    assert seen["pod_gpu_allocated_seconds_total", "train"] == 15.0


def test_counters_only_grow_and_scraping_changes_nothing(bench: Bench) -> None:
    bench.place(0, "train")
    last: dict[tuple[str, str], float] = {}
    for minute in range(4):
        if minute == 2:
            bench.node.reset_counters(T0 + minute * 60_000, "GPU-0")
        bench.look(minute * 60_000)
        for _ in range(3):
            seen = {key: value for key, value in bench.scrape().items() if key[0].endswith("_total")}
            assert all(seen[key] >= value for key, value in last.items())
            last = seen
    assert last["pod_gpu_allocated_seconds_total", "train"] == 180.0


LOOKS = st.sampled_from([(None, "device"), (None, "allocation"), ("time-slicing", "process"), ("time-slicing", "gpm")])


@given(st.lists(LOOKS, min_size=2, max_size=12))
def test_however_a_holder_is_read_and_shared_its_time_is_counted_once(looks: list[tuple[str | None, Method]]) -> None:
    """Added up as Prometheus does: the growth of each series between scrapes, with none for a new series."""
    metrics, snapshot = AgentMetrics("n1", "0"), Bench().node.snapshot(T0)
    holder = pod("train")
    snapshot = replace(snapshot, allocations=(Allocation("GPU-0", holder),))
    seen: dict[str, float] = {}
    grown = begun = 0.0
    for minute, (mode, method) in enumerate(looks):
        row = UsageInterval(
            seq=minute, start_ms=T0 + minute * 60_000, end_ms=T0 + (minute + 1) * 60_000,
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


def test_the_series_of_a_gone_pod_leave_after_two_scrapes_of_their_last_value(bench: Bench) -> None:
    bench.place(0, "train")
    bench.minute()
    assert bench.scrape()["pod_gpu_allocated_seconds_total", "train"] == 60.0
    bench.node.remove(T0 + 70_000, "uid-train")
    bench.look(70_000)
    for _ in range(2):
        seen = bench.scrape()
        assert seen["pod_gpu_allocated_seconds_total", "train"] == 70.0
        assert ("pod_info", "train") in seen
    assert not [key for key in bench.scrape() if key[1] == "train"]
    assert bench.scrape()["gpu_busy_seconds_total", "GPU-0"] == 28.0


def test_every_series_of_a_gone_holder_leaves_however_it_was_read(bench: Bench) -> None:
    bench.place(0, "train")
    bench.minute()
    bench.node.remove(T0 + 70_000, "uid-train")
    bench.place(70_000, "train", sliced=True)
    bench.look(70_000)
    bench.look(130_000)
    assert bench.metrics.exposition().count(b"gputally_pod_gpu_allocated_seconds_total{") == 2
    bench.node.remove(T0 + 140_000, "uid-train")
    bench.look(140_000)
    for _ in range(2):
        bench.scrape()
    assert not [key for key in bench.scrape() if key[1] == "train"]


def test_where_nobody_scrapes_the_gone_are_forgotten_all_the_same(bench: Bench) -> None:
    """Many clusters have no Prometheus: otherwise a node of short jobs would remember each of them for ever."""
    for minute in range(120):
        bench.place(minute * 60_000, f"job-{minute}")
        bench.look(minute * 60_000)
        bench.node.remove(T0 + minute * 60_000 + 30_000, f"uid-job-{minute}")
        bench.look(minute * 60_000 + 30_000)
    seen = bench.scrape()
    shown = {pod for name, pod in seen if name == "pod_gpu_allocated_seconds_total"}
    assert shown == {f"job-{minute}" for minute in range(119 - UNSCRAPED_MS // 60_000, 120)}
    assert len({pod for name, pod in seen if name == "pod_info"}) <= len(shown)


def test_nobody_is_forgotten_while_the_holders_are_unknown(bench: Bench) -> None:
    bench.place(0, "train")
    bench.minute()
    bench.node.set_holders_unavailable(T0 + 61_000, "kubelet gone")
    bench.look(62_000)
    for _ in range(5):
        assert ("pod_gpu_allocated_seconds_total", "train") in bench.scrape()


def test_rows_of_a_former_mig_layout_keep_the_name_of_their_instance(bench: Bench) -> None:
    instance = bench.mig.mig[0].uuid
    bench.place(0, "train", instance)
    bench.look(0)
    bench.node.remove(T0 + 30_000, "uid-train")
    bench.node.repartition(T0 + 30_000, "GPU-1", ["7g.80gb"])
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


KINDS: tuple[Kind, ...] = ("counter", "gauge", "untyped")
# What the format cannot carry: a line ends at any of these for some readers.
words = st.text(st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp")) | st.sampled_from('\n\\"{}=,# '), max_size=8)
numbers = st.floats(allow_nan=False) | st.integers(-(2**60), 2**60)
series = st.dictionaries(st.tuples(words, words), numbers, max_size=5)
TEXT = TextFormat()


@settings(max_examples=examples(20, 120))
@given(st.lists(st.tuples(st.sampled_from(KINDS), series), max_size=4))
def test_the_parser_reads_back_what_was_given(drawn: list[tuple[Kind, dict[tuple[str, str], float]]]) -> None:
    families = []
    for number, (kind, rows) in enumerate(drawn):
        family = Family(f"gputally_{kind}{number}" + "_total" * (kind == "counter"), "A text.", kind, ("pod", "gpu"))
        for labels, value in rows.items():
            family.add(labels, value)
        families.append(family)
    for _ in range(2):  # the second time from memory
        read = list(text_string_to_metric_families(TEXT.render(families).decode()))
        assert [(f.name, f.type) for f in read] == [
            (f.name.removesuffix("_total"), "unknown" if f.kind == "untyped" else f.kind) for f in families
        ]
        for found, family in zip(read, families, strict=True):
            assert {s.name for s in found.samples} <= {family.name}
            seen = [((s.labels["pod"], s.labels["gpu"]), s.value) for s in found.samples]
            assert seen == [(labels, float(value)) for labels, value in family.series]


def test_figures_that_are_none_have_their_own_words() -> None:
    family = Family("gputally_x", "Two\nlines and a \\.", "gauge")
    for value in (float("nan"), float("inf"), float("-inf"), True, 1234567):
        family.add((), value)
    lines = TEXT.render([family]).decode().splitlines()
    assert lines[0] == "# HELP gputally_x Two\\nlines and a \\\\."
    assert [line.split()[1] for line in lines[2:]] == ["NaN", "+Inf", "-Inf", "1.0", "1234567.0"]


Seen = dict[tuple[str, str, str, str], float]


@pytest.fixture(scope="module")
def seen() -> Seen:
    """GPU-0 is shared by a (40 %) and b (20 %), and an unknown process uses 10 %; c holds an instance of GPU-1."""
    node = SimulatedNode("node-1", [make_gpu("GPU-0", 0, H100), MIG], start_ms=T0)
    for name, ppm in (("a", 400_000), ("b", 200_000)):
        node.place(T0, Allocation("GPU-0", pod(name), sharing="time-slicing", sharing_replicas=4), ppm, 2_048)
    node.place(T0, Allocation("GPU-1", pod("c"), MIG.mig[0].uuid), 500_000, 100)
    node.set_stray(T0, "GPU-0", 100_000)
    meter, output = Meter(60_000, ZoneInfo("UTC")), DcgmOutput("node-1")
    condition = DeviceCondition(61, 1_980, 2_619, 0, xids=(XidCount(31, 1, T0), XidCount(79, 1, T0 + 5)))
    for minute in range(3):
        snapshot = node.snapshot(T0 + minute * 60_000)
        first, second = snapshot.devices
        unread = HolderReading(pod("stray"))
        first = msgspec.structs.replace(first, condition=condition, holders=(*first.holders, unread))
        snapshot = replace(snapshot, devices=(first, second))
        output.observe(snapshot, meter.observe(snapshot))
    text = TEXT.render(output.collect()).decode()
    seen: Seen = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name.removeprefix("DCGM_FI_"), sample.labels["UUID"], sample.labels["GPU_I_ID"]
            assert (*key, sample.labels["pod"]) not in seen
            seen[*key, sample.labels["pod"]] = sample.value
    return seen


def test_pods_that_share_a_gpu_have_their_own_share_and_add_up(seen: Seen) -> None:
    assert [seen["DEV_GPU_UTIL", "GPU-0", "", pod] for pod in ("a", "b", "")] == [40, 20, 10]
    power = [value for (name, uuid, _, _), value in seen.items() if (name, uuid) == ("DEV_POWER_USAGE", "GPU-0")]
    assert round(sum(power), 6) == 70 + 0.7 * (700 - 70)
    energy = [v for (name, uuid, _, _), v in seen.items() if (name, uuid) == ("DEV_TOTAL_ENERGY_CONSUMPTION", "GPU-0")]
    assert round(sum(energy)) == round(sum(power) * 120 * 1_000)


def test_an_instance_is_measured_against_itself(seen: Seen) -> None:
    assert ("DEV_GPU_UTIL", "GPU-1", "1", "c") not in seen
    assert round(seen["PROF_GR_ENGINE_ACTIVE", "GPU-1", "1", "c"], 6) == 0.5
    assert seen["PROF_GR_ENGINE_ACTIVE", "GPU-1", "2", ""] == 0


def test_memory_is_each_pods_own_and_the_device_is_described_once(seen: Seen) -> None:
    assert [seen["DEV_FB_USED", "GPU-0", "", pod] for pod in ("a", "")] == [2_048, 0]
    assert seen["DEV_FB_FREE", "GPU-0", "", ""] == 81_559 - 4_096
    assert (seen["DEV_GPU_TEMP", "GPU-0", "", ""], seen["DEV_XID_ERRORS", "GPU-0", "", ""]) == (61, 79)
    assert sum(name == "DEV_SM_CLOCK" and uuid == "GPU-0" for name, uuid, _, _ in seen) == 1


# --- the HTTP server ------------------------------------------------------------------------------


@contextmanager
def serving(alive: Callable[[], bool]) -> Iterator[Exposition]:
    server = Exposition("127.0.0.1", 0, lambda: b"", alive, BackgroundTasks(VirtualClock(0)))
    try:
        yield server
    finally:
        server.close()


def asked(server: Exposition) -> http.client.HTTPConnection:
    """A connection that has requested /livez."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("GET", "/livez")
    return connection


def test_a_hanging_sampler_fails_the_probe() -> None:
    with serving(lambda: False) as server, closing(asked(server)) as connection:
        response = connection.getresponse()
        assert (response.status, response.read()) == (503, b"sampling hangs\n")


def test_more_requests_than_allowed_are_hung_up_on() -> None:
    entered, release = threading.Semaphore(0), threading.Event()

    def slow() -> bool:
        entered.release()
        return release.wait(10)

    with serving(slow) as server, ExitStack() as after:
        clients = []
        for _ in range(exporter.MAX_REQUESTS):
            clients.append(after.enter_context(closing(asked(server))))
            assert entered.acquire(timeout=10)
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as refused:
            assert refused.recv(1) == b""
        release.set()
        assert [client.getresponse().read() for client in clients] == [b"ok\n"] * exporter.MAX_REQUESTS


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("10.1.2.3:9401", 200), ("[fd00::1]:9401", 200), ("gpu-node-1", 200), ("agent.gputally.svc:9401", 200),
        ("metrics.example.com:9401", 200), ("NODE-1.lab.example.com", 200), ("evil.example.com", 421),
        ("node-1.lab.example.com.evil.example.com", 421), ("", 421),
    ],
)  # fmt: skip
def test_the_port_answers_under_names_that_no_stranger_can_have(host: str, status: int) -> None:
    """A stranger's name can resolve to the node's address in a browser (DNS rebinding)."""
    hosts = KnownHosts(("metrics.example.com",), lambda: "node-1.lab.example.com")
    server = Exposition("127.0.0.1", 0, lambda: b"", lambda: True, BackgroundTasks(VirtualClock(0)), hosts)
    try:
        for path in ("/metrics", "/livez", "/readyz"):
            with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)) as connection:
                connection.request("GET", path, headers={"Host": host})
                assert connection.getresponse().status == status
    finally:
        server.close()
