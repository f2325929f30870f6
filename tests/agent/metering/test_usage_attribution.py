"""Layouts (the share of each holder in a GPU) and the division of busy time and energy among holders."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.readings import Allocation, Gpu, MigInstance
from agent.metering.usage_attribution import (
    active_energy,
    attribute_activity,
    attribute_busy,
    attribute_energy,
    lay_out,
)
from agent.simulation.simulated_node import A100, H100, make_gpu
from agent.wire import Sharing, SharingMode
from tests.agent.snapshots import pod

GPU = make_gpu("GPU-0", 0, H100)
MIG = make_gpu("GPU-1", 1, A100, ["3g.40gb", "2g.20gb", "1g.10gb"])
MINUTE_US = 60_000_000


def sliced(name: str, replicas: int = 1, of: int = 4, mig_uuid: str = "") -> Allocation:
    return Allocation("GPU-0", pod(name), mig_uuid, "time-slicing", of, replicas)


def fraction(name: str, ppm: int | None) -> Allocation:
    return Allocation("GPU-0", pod(name), sharing="fraction", fraction_ppm=ppm)


def whole(name: str, sharing: SharingMode | None = None) -> Allocation:
    return Allocation("GPU-0", pod(name), sharing=sharing)


EMPTY_MIG = Gpu("GPU-1", 1, "A100", 81_920, mig_enabled=True)
TOO_MUCH_MIG = replace(EMPTY_MIG, mig=tuple(MigInstance(f"M{i}", "4g", i, 0, 4, 1) for i in range(2)))


@pytest.mark.parametrize(("gpu", "allocations", "permille"), [
    pytest.param(GPU, [], [(None, 1000)], id="free"),
    pytest.param(GPU, [whole("a")], [("a", 1000)], id="whole"),
    pytest.param(GPU, [sliced("a"), sliced("b", 2)], [("a", 250), ("b", 500), (None, 250)], id="replicas"),
    pytest.param(GPU, [sliced("a", 4), sliced("b", 4)], [("a", 500), ("b", 500)], id="too many replicas"),
    pytest.param(GPU, [sliced("a"), sliced("a")], [("a", 500), (None, 500)], id="one holder twice"),
    pytest.param(GPU, [whole("a"), whole("a")], [("a", 1000)], id="whole twice"),
    pytest.param(GPU, [fraction("a", 250_000), fraction("b", 500_000)], [("a", 250), ("b", 500), (None, 250)],
                 id="fractions"),
    pytest.param(GPU, [fraction("a", 900_000), fraction("b", 600_000)], [("a", 600), ("b", 400)], id="too much"),
    pytest.param(GPU, [fraction("a", 250_000), fraction("b", None)], [("a", 250), ("b", 500), (None, 250)],
                 id="one declares nothing"),
    pytest.param(GPU, [whole(name, "processes") for name in "abcd"], [(name, 250) for name in "abcd"],
                 id="none declares anything"),
    pytest.param(EMPTY_MIG, [], [(None, 1000)], id="MIG without instances"),
    pytest.param(TOO_MUCH_MIG, [], [(None, 500), (None, 500)], id="instances beyond the device"),
])  # fmt: skip
def test_a_gpu_is_divided_over_its_holders(
    gpu: Gpu, allocations: list[Allocation], permille: list[tuple[str | None, int]]
) -> None:
    layout = lay_out(gpu, allocations)
    capacities = layout.capacities(60_000)
    found = [(s.holder.name if s.holder else None, c) for s, c in zip(layout.shares, capacities, strict=True)]
    assert found == [(name, MINUTE_US * share // 1000) for name, share in permille]


def test_thirds_of_an_odd_span_go_by_largest_remainder() -> None:
    assert lay_out(GPU, [sliced(name, of=3) for name in "abc"]).capacities(1) == (334, 333, 333)


def test_mig_gives_each_instance_its_compute_and_the_unused_slice_a_row_of_its_own() -> None:
    layout = lay_out(MIG, [Allocation("GPU-1", pod("a"), MIG.mig[1].uuid)])
    assert [s.slice.profile if s.slice else None for s in layout.shares] == ["3g.40gb", "2g.20gb", "1g.10gb", None]
    assert [s.holder.name if s.holder else None for s in layout.shares] == [None, "a", None, None]
    assert layout.capacities(60_000) == (25_714_286, 17_142_857, 8_571_429, 8_571_428)
    assert layout.shares[1].slice is not None
    assert (layout.shares[1].slice.compute, layout.shares[1].slice.compute_of) == (2, 7)


def test_a_full_mig_layout_has_no_rest() -> None:
    full = make_gpu("GPU-1", 1, A100, ["4g.40gb", "3g.40gb"])
    assert len(lay_out(full, []).shares) == 2


def test_a_shared_instance_is_divided_and_adds_up_to_the_instance() -> None:
    instance = MIG.mig[0].uuid
    layout = lay_out(MIG, [sliced("a", 1, 2, instance)])
    shared = [c for s, c in zip(layout.shares, layout.capacities(60_000), strict=True) if s.mig_uuid == instance]
    assert shared == [12_857_143, 12_857_143]
    assert layout.shares[0].sharing == Sharing("time-slicing", 2)


def test_an_allocation_of_an_unknown_instance_stands_on_what_no_instance_owns() -> None:
    layout = lay_out(MIG, [Allocation("GPU-1", pod("a"), "MIG-gone")])
    assert layout.shares[-1].holder == pod("a")
    assert layout.capacities(60_000)[-1] == 8_571_428


@given(st.permutations([sliced("a"), sliced("b", 2), fraction("c", 100_000), sliced("d", 1, 8)]))
def test_a_layout_does_not_depend_on_the_order_of_its_allocations(allocations: list[Allocation]) -> None:
    expected = lay_out(GPU, [sliced("a"), sliced("b", 2), fraction("c", 100_000), sliced("d", 1, 8)])
    assert lay_out(GPU, allocations) == expected


shares = st.lists(
    st.one_of(
        st.builds(sliced, st.sampled_from("abcdef"), st.integers(0, 9), st.integers(1, 9)),
        st.builds(fraction, st.sampled_from("abcdef"), st.none() | st.integers(0, 2_000_000)),
    ),
    max_size=8,
)


@given(shares, st.integers(1, 3_600_000))
def test_capacities_always_add_up_to_the_span(allocations: list[Allocation], span_ms: int) -> None:
    capacities = lay_out(GPU, allocations).capacities(span_ms)
    assert sum(capacities) == span_ms * 1_000
    assert min(capacities) >= 0


amounts = st.integers(0, 10**9)


@given(amounts, st.lists(amounts, min_size=4, max_size=4), amounts)
def test_busy_shares_and_the_unattributed_rest_add_up_to_the_device(
    device: int, claims: list[int], stranger: int
) -> None:
    layout = lay_out(GPU, [sliced(n) for n in "abcd"])
    busy, rest = attribute_busy(layout, device, [device], claims, [stranger])
    assert sum(busy) + rest == device
    assert min(*busy, rest) >= 0
    if sum(claims) + stranger <= device:
        assert busy == claims


def test_claims_beyond_the_device_are_scaled_down_together_with_strangers() -> None:
    layout = lay_out(GPU, [sliced("a"), sliced("b")])
    assert attribute_busy(layout, 100, [100], [100, 60, 0], [40]) == ([50, 30, 0], 20)
    assert attribute_busy(layout, 100, [100], [50, 25, 0], [50]) == ([40, 20, 0], 40)


def test_mig_instances_are_fitted_to_the_device_first() -> None:
    layout = lay_out(MIG, [Allocation("GPU-1", pod("a"), MIG.mig[0].uuid)])
    busy, rest = attribute_busy(layout, 60, [80, 40, 0, 0], [80, 0, 0, 0], [0, 0, 0, 0])
    assert (busy, rest) == ([40, 0, 0, 0], 20)


@given(amounts, st.lists(amounts, min_size=3, max_size=3), st.lists(st.integers(0, 9), min_size=3, max_size=3))
def test_energy_shares_add_up(energy: int, busy: list[int], capacities: list[int]) -> None:
    parts = attribute_energy(energy, energy // 3, busy, capacities)
    assert sum(parts) == energy
    assert min(parts) >= 0


def test_idle_energy_goes_by_allocation_and_active_energy_by_busy_time() -> None:
    assert attribute_energy(1_000, 600, [30, 0], [1, 3]) == [700, 300]


@pytest.mark.parametrize(
    ("busy_us", "idle_power_mw", "expected"),
    [
        (0, 100, 0),  # nothing ran: all of it is idle energy
        (500_000, 100, 900_000),  # 1 J less 100 mW over a second
        (500_000, 2_000, 0),  # never negative
        (500_000, None, 500_000),  # power unknown: by the time it was busy
        (2_000_000, None, 1_000_000),
    ],
)
def test_active_energy_is_what_exceeds_the_idle_power(busy_us: int, idle_power_mw: int | None, expected: int) -> None:
    assert active_energy(1_000_000, 1_000, busy_us, idle_power_mw) == expected


@given(amounts, st.lists(amounts, min_size=4, max_size=4), amounts)
def test_activity_shares_and_nobodys_add_up_to_the_part(activity: int, busy: list[int], rest: int) -> None:
    layout = lay_out(GPU, [sliced(n) for n in "abcd"])
    parts = attribute_activity(layout.parts[0], activity, busy, rest, layout.capacities(1_000))
    assert sum(parts) == activity
    assert len(parts) == 5
    assert min(parts) >= 0


def test_activity_goes_by_busy_time_then_by_allocation_then_to_nobody() -> None:
    layout = lay_out(GPU, [sliced("a"), sliced("b", 2)])
    part, capacities = layout.parts[0], layout.capacities(1_000)
    assert attribute_activity(part, 100, [30, 10, 0], 10, capacities) == [60, 20, 0, 20]
    assert attribute_activity(part, 90, [0, 0, 0], 0, capacities) == [30, 60, 0, 0]
    free = lay_out(GPU, [])
    assert attribute_activity(free.parts[0], 7, [0], 0, free.capacities(1_000)) == [0, 7]
