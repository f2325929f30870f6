"""The simulated node: its truth is exact, and what a source shows is that truth."""

from fractions import Fraction

import pytest

from agent.core.readings import Allocation, DeviceReading, HolderReading, Unavailable
from agent.simulation.simulated_node import A100, H100, Event, NodeOffline, SimulatedNode, SimulatedSource, make_gpu
from agent.wire import PodFacts
from tests.agent_core.metering import pod

T = 1_790_812_800_000
GPU = make_gpu("GPU-0", 0, H100)
MIG = make_gpu("GPU-1", 1, A100, ["3g.40gb", "1g.10gb"])


def node(**more: bool) -> SimulatedNode:
    return SimulatedNode("node-1", [GPU, MIG], start_ms=T, **more)


def facts(name: str) -> PodFacts:
    return PodFacts(seq=0, uid=name, namespace="ns", name=name, node="node-1", observed_ms=T)


def reading(node: SimulatedNode, at_ms: int, position: int = 0) -> DeviceReading:
    return node.snapshot(at_ms).devices[position]


def counters(reading: DeviceReading) -> dict[str, int | Unavailable]:
    return {holder.holder.uid: holder.busy_us for holder in reading.holders}


def test_truth_is_known_for_any_span() -> None:
    simulated = node()
    simulated.place(T + 1_000, Allocation("GPU-0", pod("a")), 250_000, 1_000)
    simulated.set_utilisation(T + 3_000, "a", 1_000_000)
    simulated.remove(T + 5_000, "a")
    assert simulated.allocated_us("a", T, T + 60_000) == 4_000_000
    assert simulated.allocated_us("a", T + 4_500, T + 60_000) == 500_000
    assert simulated.busy_us("a", T, T + 3_000) == 500_000
    assert simulated.busy_us("a", T + 2_000, T + 4_000) == 1_250_000
    assert simulated.device_busy_us("GPU-0", T, T + 60_000) == 2_500_000
    assert simulated.holders() == ("a",)


def test_mig_time_is_the_instances_share_of_the_gpu() -> None:
    simulated = node()
    simulated.place(T, Allocation("GPU-1", pod("a"), MIG.mig[0].uuid), 500_000, 1_000)
    assert simulated.allocated("a", T, T + 1) == Fraction(3_000, 7)
    assert simulated.busy_us("a", T, T + 7_000) == 1_500_000
    shown = reading(simulated, T + 7_000, 1)
    assert isinstance(shown.busy_us, Unavailable)
    assert [i.busy_us for i in shown.instances] == [1_500_000, 0]


def test_co_holders_that_want_more_than_the_device_get_it_in_proportion() -> None:
    simulated = node()
    for name, wanted in (("a", 900_000), ("b", 600_000)):
        allocation = Allocation("GPU-0", pod(name), sharing="time-slicing", sharing_replicas=4)
        simulated.place(T, allocation, wanted, 1_000)
    assert [simulated.busy_us(n, T, T + 1_000) for n in "ab"] == [600_000, 400_000]
    assert [simulated.allocated_us(n, T, T + 1_000) for n in "ab"] == [250_000, 250_000]
    assert simulated.allocated_us("a", T, T) == 0


def test_a_source_shows_the_counters_of_who_left_once_more() -> None:
    simulated = node()
    simulated.place(T, Allocation("GPU-0", pod("a")), 500_000, 1_000)
    assert counters(reading(simulated, T + 1_000)) == {"a": 500_000}
    simulated.remove(T + 2_000, "a")
    assert counters(reading(simulated, T + 4_000)) == {"a": 1_000_000}
    later = reading(simulated, T + 5_000)
    assert (counters(later), later.busy_us) == ({}, 1_000_000)


def test_without_holder_readings_only_the_device_is_shown() -> None:
    simulated = node(per_holder=False)
    simulated.place(T, Allocation("GPU-0", pod("a")), 500_000, 1_000)
    shown = reading(simulated, T + 1_000)
    assert (shown.holders, shown.busy_us, shown.memory_used_mib) == ((), 500_000, 1_000)


def test_energy_and_power_follow_the_load() -> None:
    simulated = node()
    simulated.place(T + 1_000, Allocation("GPU-0", pod("a")), 500_000, 1_000)
    shown = reading(simulated, T + 3_000)
    assert shown.power_mw == 70_000 + 315_000
    assert shown.energy_uj == 70_000 * 3_000 + 630_000 * 1_000


def test_a_lost_gpu_does_nothing_and_returns_with_fresh_counters() -> None:
    simulated = node()
    simulated.place(T, Allocation("GPU-0", pod("a")), 1_000_000, 1_000)
    simulated.lose(T + 1_000, "GPU-0")
    lost = reading(simulated, T + 2_000)
    assert (lost.health, lost.busy_us) == ("lost", Unavailable("gpu is lost"))
    simulated.recover(T + 3_000, "GPU-0")
    back = reading(simulated, T + 4_000)
    assert (back.health, back.busy_us, counters(back)) == ("ok", 1_000_000, {"a": 1_000_000})
    assert back.counter_epoch != lost.counter_epoch
    assert simulated.lost_ms("GPU-0", T, T + 10_000) == 2_000
    assert simulated.busy_us("a", T, T + 4_000) == 2_000_000
    assert simulated.allocated_us("a", T, T + 4_000) == 4_000_000


def test_a_stray_process_is_read_but_holds_nothing() -> None:
    simulated = node()
    simulated.set_stray(T, "GPU-0", 300_000)
    simulated.set_stray(T + 1_000, "GPU-0", 100_000)
    shown = simulated.snapshot(T + 2_000)
    assert shown.allocations == ()
    assert counters(shown.devices[0]) == {"stray-GPU-0": 400_000}
    simulated.set_stray(T + 2_000, "GPU-0", 0)
    assert reading(simulated, T + 9_000).busy_us == 400_000
    assert simulated.holders() == ()


def test_repartitioning_needs_an_empty_gpu() -> None:
    simulated = node()
    simulated.place(T, Allocation("GPU-1", pod("a"), MIG.mig[0].uuid), 1_000_000, 1_000)
    with pytest.raises(ValueError, match="in use"):
        simulated.repartition(T, "GPU-1", ["7g.80gb"])
    simulated.remove(T + 700, "a")
    simulated.repartition(T + 800, "GPU-1", ["7g.80gb"])
    assert [m.profile for m in simulated.gpus[1].mig] == ["7g.80gb"]
    assert simulated.device_busy_us("GPU-1", T, T + 800) == 300_000


def test_facts_of_an_ended_pod_are_shown_twice_more() -> None:
    simulated = node()
    simulated.place(T, Allocation("GPU-0", pod("a")), 0, 0, facts("a"))
    (shown,) = simulated.snapshot(T + 1_000).facts
    assert (shown.started_ms, shown.ended_ms) == (T, None)
    simulated.remove(T + 2_000, "a")
    ended = [[f.ended_ms for f in simulated.snapshot(T + at).facts] for at in (3_000, 4_000, 5_000)]
    assert ended == [[T + 2_000], [T + 2_000], []]


def test_an_offline_node_shows_nothing_and_a_silent_kubelet_says_why() -> None:
    simulated = node()
    simulated.set_offline(T, True)
    with pytest.raises(NodeOffline, match="node-1 is offline"):
        simulated.snapshot(T + 1)
    simulated.set_offline(T + 2, False)
    simulated.set_holders_unavailable(T + 2, "kubelet gone")
    assert simulated.snapshot(T + 3).allocations == Unavailable("kubelet gone")


@pytest.mark.parametrize(
    ("allocation", "utilisation", "message"),
    [
        (Allocation("GPU-9", pod("a")), 0, "no GPU GPU-9"),
        (Allocation("GPU-1", pod("a")), 0, "in MIG mode"),
        (Allocation("GPU-1", pod("a"), "MIG-9"), 0, "no MIG instance MIG-9"),
        (Allocation("GPU-0", pod("a")), 1_000_001, "utilisation is between"),
        (Allocation("GPU-0", pod("there")), 0, "already"),
    ],
)
def test_impossible_placements_are_refused(allocation: Allocation, utilisation: int, message: str) -> None:
    simulated = node()
    simulated.place(T, Allocation("GPU-0", pod("there")), 0, 0)
    with pytest.raises(ValueError, match=message):
        simulated.place(T, allocation, utilisation, 0)


def test_time_does_not_run_backwards_and_nobody_leaves_twice() -> None:
    simulated = node()
    simulated.snapshot(T + 10)
    with pytest.raises(ValueError, match="backwards"):
        simulated.lose(T + 9, "GPU-0")
    with pytest.raises(ValueError, match="holds no device"):
        simulated.remove(T + 10, "a")


@pytest.mark.parametrize(
    ("mig", "message"), [(["9g.90gb"], "unknown MIG profile"), (["4g.40gb", "4g.40gb"], "do not fit on one GPU")]
)
def test_impossible_mig_layouts_are_refused(mig: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_gpu("GPU-0", 0, A100, mig)


def test_a_source_applies_what_is_due_at_its_own_instant() -> None:
    simulated = node()
    allocation = Allocation("GPU-0", pod("a"))
    source = SimulatedSource(
        simulated,
        [
            Event(T + 900, lambda n: n.remove(T + 900, "a")),
            Event(T + 100, lambda n: n.place(T + 100, allocation, 1_000_000, 0)),
        ],
    )
    assert source.snapshot(T + 99).allocations == ()
    assert source.snapshot(T + 100).allocations == (allocation,)
    last = source.snapshot(T + 5_000)
    assert last.devices[0].holders == (HolderReading(pod("a"), busy_us=800_000, memory_mib=0),)
    assert simulated.allocated_us("a", T, T + 5_000) == 800_000
    source.close()
