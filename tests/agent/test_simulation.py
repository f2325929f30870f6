"""The simulated node: its true use is exact, a source reports it, and a scenario file describes it."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path
from textwrap import dedent

import pytest

import agent.simulation.scenario_file
from agent.core.readings import Allocation, DeviceReading, HolderReading, Unavailable
from agent.simulation.scenario_file import load_scenario
from agent.simulation.simulated_node import (
    A100,
    H100,
    NodeOffline,
    SimulatedEvent,
    SimulatedNode,
    SimulatedSource,
    make_gpu,
)
from agent.wire import PodFacts
from gputally.base.yaml_file import FileFault
from tests.agent.sample_values import T0
from tests.agent.snapshots import pod

GPU = make_gpu("GPU-0", 0, H100)
MIG = make_gpu("GPU-1", 1, A100, ["3g.40gb", "1g.10gb"])


def node(**more: bool) -> SimulatedNode:
    return SimulatedNode("node-1", [GPU, MIG], start_ms=T0, **more)


@pytest.fixture
def simulated() -> SimulatedNode:
    return node()


def facts(name: str) -> PodFacts:
    return PodFacts(seq=0, uid=name, namespace="ns", name=name, node="node-1", observed_ms=T0)


def reading(node: SimulatedNode, at_ms: int, position: int = 0) -> DeviceReading:
    return node.snapshot(at_ms).devices[position]


def counters(reading: DeviceReading) -> dict[str, int | Unavailable]:
    return {holder.holder.uid: holder.busy_us for holder in reading.holders}


def test_truth_is_known_for_any_span(simulated: SimulatedNode) -> None:
    simulated.place(T0 + 1_000, Allocation("GPU-0", pod("a")), 250_000, 1_000)
    simulated.set_utilisation(T0 + 3_000, "a", 1_000_000)
    simulated.remove(T0 + 5_000, "a")
    assert simulated.allocated_us("a", T0, T0 + 60_000) == 4_000_000
    assert simulated.allocated_us("a", T0 + 4_500, T0 + 60_000) == 500_000
    assert simulated.busy_us("a", T0, T0 + 3_000) == 500_000
    assert simulated.busy_us("a", T0 + 2_000, T0 + 4_000) == 1_250_000
    assert simulated.device_busy_us("GPU-0", T0, T0 + 60_000) == 2_500_000
    assert simulated.holders() == ("a",)


def test_mig_time_is_the_instances_share_of_the_gpu(simulated: SimulatedNode) -> None:
    simulated.place(T0, Allocation("GPU-1", pod("a"), MIG.mig[0].uuid), 500_000, 1_000)
    assert simulated.allocated("a", T0, T0 + 1) == Fraction(3_000, 7)
    assert simulated.busy_us("a", T0, T0 + 7_000) == 1_500_000
    shown = reading(simulated, T0 + 7_000, 1)
    assert isinstance(shown.busy_us, Unavailable)
    assert [i.busy_us for i in shown.instances] == [1_500_000, 0]


def test_co_holders_that_want_more_than_the_device_get_it_in_proportion(simulated: SimulatedNode) -> None:
    for name, wanted in (("a", 900_000), ("b", 600_000)):
        allocation = Allocation("GPU-0", pod(name), sharing="time-slicing", sharing_replicas=4)
        simulated.place(T0, allocation, wanted, 1_000)
    assert [simulated.busy_us(n, T0, T0 + 1_000) for n in "ab"] == [600_000, 400_000]
    assert [simulated.allocated_us(n, T0, T0 + 1_000) for n in "ab"] == [250_000, 250_000]
    assert simulated.allocated_us("a", T0, T0) == 0


def test_a_source_shows_the_counters_of_who_left_once_more(simulated: SimulatedNode) -> None:
    simulated.place(T0, Allocation("GPU-0", pod("a")), 500_000, 1_000)
    assert counters(reading(simulated, T0 + 1_000)) == {"a": 500_000}
    simulated.remove(T0 + 2_000, "a")
    assert counters(reading(simulated, T0 + 4_000)) == {"a": 1_000_000}
    later = reading(simulated, T0 + 5_000)
    assert (counters(later), later.busy_us) == ({}, 1_000_000)


def test_without_holder_readings_only_the_device_is_shown() -> None:
    simulated = node(per_holder=False)
    simulated.place(T0, Allocation("GPU-0", pod("a")), 500_000, 1_000)
    shown = reading(simulated, T0 + 1_000)
    assert (shown.holders, shown.busy_us, shown.memory_used_mib) == ((), 500_000, 1_000)


def test_activity_is_a_part_of_busy_time_that_a_job_has_on_all_its_gpus_and_never_falls(
    simulated: SimulatedNode,
) -> None:
    """GPU-1 is divided, and GPU-0 changes its holder and loses its counters."""
    for worker, (gpu, mig) in enumerate((("GPU-0", ""), ("GPU-1", MIG.mig[0].uuid))):
        simulated.place(T0, Allocation(gpu, pod(f"train-7-worker-{worker}"), mig), 1_000_000, 1_000)
    whole, divided = reading(simulated, T0 + 7_000), reading(simulated, T0 + 7_000, 1).instances[0]
    parts = [
        [Fraction(value, of.busy_us) for value in (of.sm_active_us, of.tensor_active_us)]  # type: ignore[arg-type]
        for of in (whole, divided)
    ]
    assert parts[0] == parts[1] != [0, 0]
    assert all(0 <= part <= 1 for part in parts[0])
    simulated.remove(T0 + 8_000, "train-7-worker-0")
    simulated.place(T0 + 8_000, Allocation("GPU-0", pod("other")), 1_000_000, 1_000)
    before = reading(simulated, T0 + 8_000).tensor_active_us
    after = reading(simulated, T0 + 9_000).tensor_active_us
    assert isinstance(before, int)
    assert isinstance(after, int)
    assert whole.tensor_active_us < before <= after  # type: ignore[operator]
    simulated.reset_counters(T0 + 9_000, "GPU-0")
    assert reading(simulated, T0 + 9_000).tensor_active_us == 0


def test_energy_and_power_follow_the_load(simulated: SimulatedNode) -> None:
    simulated.place(T0 + 1_000, Allocation("GPU-0", pod("a")), 500_000, 1_000)
    shown = reading(simulated, T0 + 3_000)
    assert shown.power_mw == 70_000 + 315_000
    assert shown.energy_uj == 70_000 * 3_000 + 630_000 * 1_000


def test_a_lost_gpu_does_nothing_and_returns_with_fresh_counters(simulated: SimulatedNode) -> None:
    simulated.place(T0, Allocation("GPU-0", pod("a")), 1_000_000, 1_000)
    simulated.lose(T0 + 1_000, "GPU-0")
    lost = reading(simulated, T0 + 2_000)
    assert [(one.xid, one.count, one.last_ms) for one in lost.condition.xids] == [(79, 1, T0 + 1_000)]
    assert lost.condition.recoveries
    assert (lost.health, lost.busy_us) == ("lost", Unavailable("gpu is lost"))
    simulated.recover(T0 + 3_000, "GPU-0")
    back = reading(simulated, T0 + 4_000)
    assert (back.health, back.busy_us, counters(back)) == ("ok", 1_000_000, {"a": 1_000_000})
    assert back.counter_epoch != lost.counter_epoch
    assert simulated.lost_ms("GPU-0", T0, T0 + 10_000) == 2_000
    assert simulated.busy_us("a", T0, T0 + 4_000) == 2_000_000
    assert simulated.allocated_us("a", T0, T0 + 4_000) == 4_000_000


def test_a_stray_process_is_read_but_holds_nothing(simulated: SimulatedNode) -> None:
    simulated.set_stray(T0, "GPU-0", 300_000)
    simulated.set_stray(T0 + 1_000, "GPU-0", 100_000)
    shown = simulated.snapshot(T0 + 2_000)
    assert shown.allocations == ()
    assert counters(shown.devices[0]) == {"stray-GPU-0": 400_000}
    simulated.set_stray(T0 + 2_000, "GPU-0", 0)
    assert reading(simulated, T0 + 9_000).busy_us == 400_000
    assert simulated.holders() == ()


def test_repartitioning_needs_an_empty_gpu(simulated: SimulatedNode) -> None:
    simulated.place(T0, Allocation("GPU-1", pod("a"), MIG.mig[0].uuid), 1_000_000, 1_000)
    with pytest.raises(ValueError, match="in use"):
        simulated.repartition(T0, "GPU-1", ["7g.80gb"])
    simulated.remove(T0 + 700, "a")
    simulated.repartition(T0 + 800, "GPU-1", ["7g.80gb"])
    assert [m.profile for m in simulated.gpus[1].mig] == ["7g.80gb"]
    assert simulated.device_busy_us("GPU-1", T0, T0 + 800) == 300_000


def test_facts_of_an_ended_pod_are_shown_twice_more(simulated: SimulatedNode) -> None:
    simulated.place(T0, Allocation("GPU-0", pod("a")), 0, 0, facts("a"))
    (shown,) = simulated.snapshot(T0 + 1_000).facts
    assert (shown.started_ms, shown.ended_ms) == (T0, None)
    simulated.remove(T0 + 2_000, "a")
    ended = [[f.ended_ms for f in simulated.snapshot(T0 + at).facts] for at in (3_000, 4_000, 5_000)]
    assert ended == [[T0 + 2_000], [T0 + 2_000], []]


def test_an_offline_node_shows_nothing_and_a_silent_kubelet_says_why(simulated: SimulatedNode) -> None:
    simulated.set_offline(T0, True)
    with pytest.raises(NodeOffline, match="node-1 is offline"):
        simulated.snapshot(T0 + 1)
    simulated.set_offline(T0 + 2, False)
    simulated.set_holders_unavailable(T0 + 2, "kubelet gone")
    assert simulated.snapshot(T0 + 3).allocations == Unavailable("kubelet gone")


@pytest.mark.parametrize(
    ("allocation", "utilisation", "message"),
    [
        (Allocation("GPU-9", pod("a")), 0, "no GPU GPU-9"),
        (Allocation("GPU-1", pod("a")), 0, "in MIG mode"),
        (Allocation("GPU-1", pod("a"), "MIG-9"), 0, "no MIG instance MIG-9"),
        (Allocation("GPU-0", pod("a")), 1_000_001, "utilisation must be between"),
        (Allocation("GPU-0", pod("there")), 0, "already"),
    ],
)
def test_impossible_placements_are_refused(
    simulated: SimulatedNode, allocation: Allocation, utilisation: int, message: str
) -> None:
    simulated.place(T0, Allocation("GPU-0", pod("there")), 0, 0)
    with pytest.raises(ValueError, match=message):
        simulated.place(T0, allocation, utilisation, 0)


def test_time_does_not_run_backwards_and_nobody_leaves_twice(simulated: SimulatedNode) -> None:
    simulated.snapshot(T0 + 10)
    with pytest.raises(ValueError, match="backwards"):
        simulated.lose(T0 + 9, "GPU-0")
    with pytest.raises(ValueError, match="holds no device"):
        simulated.remove(T0 + 10, "a")


@pytest.mark.parametrize(
    ("mig", "message"), [(["9g.90gb"], "unknown MIG profile"), (["4g.40gb", "4g.40gb"], "do not fit on one GPU")]
)
def test_impossible_mig_layouts_are_refused(mig: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_gpu("GPU-0", 0, A100, mig)


def test_a_source_applies_what_is_due_at_its_own_instant(simulated: SimulatedNode) -> None:
    allocation = Allocation("GPU-0", pod("a"))
    source = SimulatedSource(
        simulated,
        [
            SimulatedEvent(T0 + 900, lambda n: n.remove(T0 + 900, "a")),
            SimulatedEvent(T0 + 100, lambda n: n.place(T0 + 100, allocation, 1_000_000, 0)),
        ],
    )
    assert source.snapshot(T0 + 99).allocations == ()
    assert source.snapshot(T0 + 100).allocations == (allocation,)
    last = source.snapshot(T0 + 5_000)
    assert last.devices[0].holders == (HolderReading(pod("a"), busy_us=800_000, memory_mib=0),)
    assert simulated.allocated_us("a", T0, T0 + 5_000) == 800_000
    source.close()


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "node.yaml"
    path.write_text(dedent(text), encoding="utf-8")
    return path


def documented_example() -> str:
    match = re.search(r"```yaml\n(.*?)```", agent.simulation.scenario_file.__doc__ or "", re.DOTALL)
    assert match is not None
    return match[1]


def test_the_documented_example_runs(tmp_path: Path) -> None:
    source = load_scenario(write(tmp_path, documented_example()), "node-1", T0)
    first = source.snapshot(T0)
    assert [d.gpu.uuid for d in first.devices] == ["GPU-node-1-0", "GPU-a"]
    assert not isinstance(first.allocations, Unavailable)
    assert [a.holder.name for a in first.allocations] == ["train-0", "notebook"]
    assert [(f.name, f.queue_ref, f.labels) for f in first.facts] == [
        ("train-0", "policy:vision", {"app": "train"}),
        ("notebook", "", {}),
    ]
    assert source.snapshot(T0 + 11_000).devices[0].health == "lost"
    last = source.snapshot(T0 + 14_500)
    assert last.allocations == Unavailable("kubelet gone")
    with pytest.raises(NodeOffline):
        source.snapshot(T0 + 15_000)
    assert source.node.busy_us("train-0", T0, T0 + 9_000) == 5_000 * 900 + 4_000 * 400


def test_relative_times_count_from_the_start_of_the_agent_where_no_origin_is_given(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """\
        gpus: [{model: H100}]
        events:
          - {after_ms: 500, place: {gpu: 0, pod: late, of_replicas: 4, replicas: 3}}
          - {at_ms: 1790812800100, place: {gpu: 0, pod: early, fraction_ppm: 250000}}
        """,
    )
    source = load_scenario(path, "n", T0)
    shown = source.snapshot(T0 + 1_000).allocations
    assert not isinstance(shown, Unavailable)
    assert [(a.holder.name, a.sharing, a.sharing_replicas, a.replicas, a.fraction_ppm) for a in shown] == [
        ("early", "fraction", 0, 1, 250_000),
        ("late", "time-slicing", 4, 3, None),
    ]
    assert source.node.allocated_us("late", T0, T0 + 1_000) == 375_000


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("gpus: [{model: H100, colour: red}]\n", "node.yaml:1: gpus.0.colour: unknown key"),
        ("gpus:\n  - {model: V100}\n", "node.yaml:2: unknown GPU model 'V100'"),
        ("gpus:\n  - {model: A100, mig: [9g]}\n", "node.yaml:2: unknown MIG profile '9g'"),
        ("gpus: [{model: H100, uuid: x}, {model: H100, uuid: x}]\n", "node.yaml:1: two GPUs have the same uuid"),
        (
            "gpus: [{model: H100}]\nevents:\n  - {after_ms: 1}\n",
            "node.yaml:3: an event needs exactly one of place",
        ),
        (
            "gpus: [{model: H100}]\nevents:\n  - {lose: 0}\n",
            "node.yaml:3: an event needs either at_ms or after_ms",
        ),
        ("gpus: [{model: H100}]\nevents:\n  - {after_ms: 1, lose: 3}\n", "node.yaml:3: no GPU 3: the node has 1"),
        (
            "gpus: [{model: H100}]\nevents:\n  - {after_ms: 1, remove: a}\n",
            "node.yaml:3: a holds no device",
        ),
        (
            "gpus: [{model: H100}]\nevents:\n  - {after_ms: 1, place: {gpu: 0, pod: a, mig: 0}}\n",
            "node.yaml:3: no MIG instance 0: GPU 0 has 0",
        ),
    ],
)
def test_every_fault_has_its_place(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(FileFault) as caught:
        load_scenario(write(tmp_path, text), "n", T0)
    assert fault in str(caught.value)
