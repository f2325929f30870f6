"""Stand-ins of fraction schedulers are replaced by who runs in their place."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.readings import Allocation
from agent.holders.device_allocations import limited_ppm, replace_reservations
from agent.simulation.simulated_node import H100, make_gpu
from agent.wire import Holder, SharingMode
from tests.agent_core.metering import pod

GPU = make_gpu("GPU-0", 0, H100)
GPUS = {"GPU-0": GPU}
RESERVATION = Holder(kind="pod", uid="r", namespace="kai-resource-reservation", name="gpu-reservation-1")


def shares(found: tuple[Allocation, ...]) -> list[tuple[str, str | None, int | None]]:
    return [(a.holder.name, a.sharing, a.fraction_ppm) for a in found]


def test_a_reservation_is_held_by_who_runs_there() -> None:
    seen = [("GPU-0", "", pod("a")), ("GPU-0", "", pod("b")), ("GPU-1", "", pod("c"))]
    requests = {"a": {"gpu-fraction": "0.25"}, "b": {"gpu-memory": "20390"}}
    found = replace_reservations([Allocation("GPU-0", RESERVATION)], seen, requests, GPUS)
    assert shares(found) == [("a", "fraction", 250_000), ("b", "fraction", 250_003)]


def test_a_reservation_nobody_uses_yet_stays_a_reservation() -> None:
    assert replace_reservations([Allocation("GPU-0", RESERVATION)], [], {}, GPUS) == (Allocation("GPU-0", RESERVATION),)


def test_who_is_listed_by_the_kubelet_too_is_not_counted_twice() -> None:
    listed = [Allocation("GPU-0", RESERVATION), Allocation("GPU-0", pod("a"), sharing="fraction", fraction_ppm=500_000)]
    assert shares(replace_reservations(listed, [("GPU-0", "", pod("a"))], {}, GPUS)) == [("a", "fraction", 500_000)]


def test_two_reservations_of_one_gpu_make_one_set_of_tenants() -> None:
    other = Holder(kind="pod", uid="r2", namespace="runai-reservation", name="x")
    reservations = [Allocation("GPU-0", RESERVATION), Allocation("GPU-0", other)]
    found = replace_reservations(reservations, [("GPU-0", "", pod("a"))], {}, GPUS)
    assert shares(found) == [("a", "fraction", None)]


@pytest.mark.parametrize("sharing", [None, "time-slicing"])
def test_a_part_that_a_pod_declares_takes_nothing_off_what_it_was_given(sharing: SharingMode | None) -> None:
    """It reduced a whole GPU to one per cent."""
    given = Allocation("GPU-0", pod("a"), sharing=sharing, sharing_replicas=10 if sharing else 0)
    forged = {"gpu-fraction": "0.01", "gpu-memory": "1", "nvidia.com/gpucores": "1", "nvidia.com/gpumem": "1"}
    assert replace_reservations([given], [("GPU-0", "", pod("a"))], {"a": forged}, GPUS) == (given,)


def test_without_kai_a_reservation_is_held_by_whom_the_kubelet_names() -> None:
    reserved = (Allocation("GPU-0", RESERVATION),)
    assert replace_reservations(reserved, [("GPU-0", "", pod("a"))], {}, GPUS, frozenset()) == reserved


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"nvidia.com/gpucores": "30", "nvidia.com/gpumem": "1024"}, 300_000),
        ({"nvidia.com/gpucores": "0", "nvidia.com/gpumem": "8156"}, 100_001),
        ({"nvidia.com/gpucores": "many"}, 1_000_000),
        ({"nvidia.com/gpucores": "200"}, 1_000_000),
        ({}, 1_000_000),
    ],
)
def test_what_limits_leave_is_the_greater_of_cores_and_memory(limits: dict[str, str], expected: int) -> None:
    assert limited_ppm(limits, GPU.memory_mib) == expected


def test_a_part_declared_of_a_size_that_was_not_read_is_unknown() -> None:
    assert limited_ppm({"nvidia.com/gpumem": "20390"}, None) is None, "not all of the GPU"
    assert limited_ppm({"nvidia.com/gpumem-percentage": "25"}, None) == 250_000
    unsized = {"GPU-0": replace(GPU, memory_mib=None)}
    requests = {"a": {"gpu-memory": "20390"}}
    found = replace_reservations([Allocation("GPU-0", RESERVATION)], [("GPU-0", "", pod("a"))], requests, unsized)
    assert shares(found) == [("a", "fraction", None)]


@given(st.dictionaries(st.sampled_from(["gpu-fraction", "gpu-memory", "nvidia.com/gpucores"]), st.text(max_size=12)))
def test_no_request_text_is_too_strange(requests: dict[str, str]) -> None:
    replace_reservations([Allocation("GPU-0", RESERVATION)], [("GPU-0", "", pod("a"))], {"a": requests}, GPUS)
    replace_reservations([Allocation("GPU-9", RESERVATION)], [("GPU-9", "", pod("a"))], {"a": requests}, {})
    part = limited_ppm(requests, GPU.memory_mib)
    assert part is not None
    assert 0 < part <= 1_000_000
