"""The compatibility series: dcgm-exporter's names, but sharing pods add up to the device."""

from dataclasses import replace
from zoneinfo import ZoneInfo

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from agent.core.readings import Allocation, Condition, HolderReading, XidCount
from agent.metering.meter import Meter
from agent.metrics.dcgm_compat import DcgmOutput
from agent.metrics.metric_families import TextFormat
from agent.simulation.simulated_node import A100, H100, SimulatedNode, make_gpu
from agent.wire import Holder

T = 1_790_812_800_000
MIG = make_gpu("GPU-1", 1, A100, ["3g.40gb", "1g.10gb"])
Seen = dict[tuple[str, str, str, str], float]


def pod(name: str) -> Holder:
    return Holder(kind="pod", uid=f"uid-{name}", namespace="vision", name=name, container="main")


def scraped(minutes: int = 2) -> Seen:
    """GPU-0 is shared by a (40 %) and b (20 %) with a stray (10 %); of GPU-1 one instance is held by c."""
    node = SimulatedNode("node-1", [make_gpu("GPU-0", 0, H100), MIG], start_ms=T)
    for name, ppm in (("a", 400_000), ("b", 200_000)):
        node.place(T, Allocation("GPU-0", pod(name), sharing="time-slicing", sharing_replicas=4), ppm, 2_048)
    node.place(T, Allocation("GPU-1", pod("c"), MIG.mig[0].uuid), 500_000, 100)
    node.set_stray(T, "GPU-0", 100_000)
    meter, output = Meter(60_000, ZoneInfo("UTC")), DcgmOutput("node-1")
    condition = Condition(61, 1_980, 2_619, 0, xids=(XidCount(31, 1, T), XidCount(79, 1, T + 5)))
    for minute in range(minutes + 1):
        snapshot = node.snapshot(T + minute * 60_000)
        first, second = snapshot.devices
        unread = HolderReading(pod("stray"))
        first = msgspec.structs.replace(first, condition=condition, holders=(*first.holders, unread))
        snapshot = replace(snapshot, devices=(first, second))
        output.observe(snapshot, meter.observe(snapshot))
    text = TextFormat().render(output.collect()).decode()
    seen: Seen = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name.removeprefix("DCGM_FI_"), sample.labels["UUID"], sample.labels["GPU_I_ID"]
            assert (*key, sample.labels["pod"]) not in seen
            seen[*key, sample.labels["pod"]] = sample.value
    return seen


def test_pods_that_share_a_gpu_have_their_own_share_and_add_up() -> None:
    seen = scraped()
    assert seen["DEV_GPU_UTIL", "GPU-0", "", "a"] == 40
    assert seen["DEV_GPU_UTIL", "GPU-0", "", "b"] == 20
    assert seen["DEV_GPU_UTIL", "GPU-0", "", ""] == 10
    power = [value for (name, uuid, _, _), value in seen.items() if (name, uuid) == ("DEV_POWER_USAGE", "GPU-0")]
    assert round(sum(power), 6) == 70 + 0.7 * (700 - 70)
    energy = [v for (name, uuid, _, _), v in seen.items() if (name, uuid) == ("DEV_TOTAL_ENERGY_CONSUMPTION", "GPU-0")]
    assert round(sum(energy)) == round(sum(power) * 120 * 1_000)


def test_an_instance_is_measured_against_itself() -> None:
    seen = scraped()
    assert ("DEV_GPU_UTIL", "GPU-1", "1", "c") not in seen
    assert round(seen["PROF_GR_ENGINE_ACTIVE", "GPU-1", "1", "c"], 6) == 0.5
    assert seen["PROF_GR_ENGINE_ACTIVE", "GPU-1", "2", ""] == 0


def test_memory_is_each_pods_own_and_the_device_is_described_once() -> None:
    seen = scraped()
    assert seen["DEV_FB_USED", "GPU-0", "", "a"] == 2_048
    assert seen["DEV_FB_USED", "GPU-0", "", ""] == 0
    assert seen["DEV_FB_FREE", "GPU-0", "", ""] == 81_559 - 4_096
    assert seen["DEV_GPU_TEMP", "GPU-0", "", ""] == 61
    assert seen["DEV_XID_ERRORS", "GPU-0", "", ""] == 79
    assert sum(name == "DEV_SM_CLOCK" and uuid == "GPU-0" for name, uuid, _, _ in seen) == 1
