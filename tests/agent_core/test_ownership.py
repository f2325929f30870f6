"""Stand-ins of fraction schedulers are replaced by who runs in their place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.model import Allocation
from agent.ownership import settle
from agent.simulation.simulated_gpu import H100, make_gpu
from agent.wire import Holder

GPU = make_gpu("GPU-0", 0, H100)
GPUS = {"GPU-0": GPU}
RESERVATION = Holder(kind="pod", uid="r", namespace="kai-resource-reservation", name="gpu-reservation-1")


def pod(name: str) -> Holder:
    return Holder(kind="pod", uid=name, namespace="ns", name=name, container="main")


def shares(found: tuple[Allocation, ...]) -> list[tuple[str, str | None, int | None]]:
    return [(a.holder.name, a.sharing, a.fraction_ppm) for a in found]


def test_a_reservation_is_held_by_who_runs_there() -> None:
    seen = [("GPU-0", "", pod("a")), ("GPU-0", "", pod("b")), ("GPU-1", "", pod("c"))]
    requests = {"a": {"gpu-fraction": "0.25"}, "b": {"gpu-memory": "20390"}}
    found = settle([Allocation("GPU-0", RESERVATION)], seen, requests, GPUS)
    assert shares(found) == [("a", "fraction", 250_000), ("b", "fraction", 250_003)]


def test_a_reservation_nobody_uses_yet_stays_a_reservation() -> None:
    assert settle([Allocation("GPU-0", RESERVATION)], [], {}, GPUS) == (Allocation("GPU-0", RESERVATION),)


def test_who_is_listed_by_the_kubelet_too_is_not_counted_twice() -> None:
    listed = [Allocation("GPU-0", RESERVATION), Allocation("GPU-0", pod("a"), sharing="fraction", fraction_ppm=500_000)]
    assert shares(settle(listed, [("GPU-0", "", pod("a"))], {}, GPUS)) == [("a", "fraction", 500_000)]


def test_two_reservations_of_one_gpu_make_one_set_of_tenants() -> None:
    other = Holder(kind="pod", uid="r2", namespace="runai-reservation", name="x")
    found = settle([Allocation("GPU-0", RESERVATION), Allocation("GPU-0", other)], [("GPU-0", "", pod("a"))], {}, GPUS)
    assert shares(found) == [("a", "fraction", None)]


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ({"nvidia.com/gpucores": "30", "nvidia.com/gpumem": "1024"}, 300_000),
        ({"nvidia.com/gpucores": "0", "nvidia.com/gpumem": "8156"}, 100_001),
        ({"nvidia.com/gpucores": "many"}, None),
        ({"nvidia.com/gpucores": "200"}, None),
        ({"gpu-fraction": "nan"}, None),
        ({}, None),
    ],
)
def test_a_declared_fraction_is_read_and_nonsense_is_none(requests: dict[str, str], expected: int | None) -> None:
    replica = Allocation("GPU-0", pod("a"), sharing="time-slicing", sharing_replicas=10)
    (found,) = settle([replica], [], {"a": requests}, GPUS)
    assert found.fraction_ppm == expected
    assert found.sharing == ("fraction" if expected else "time-slicing")


@given(st.dictionaries(st.sampled_from(["gpu-fraction", "gpu-memory", "nvidia.com/gpucores"]), st.text(max_size=12)))
def test_no_request_text_is_too_strange(requests: dict[str, str]) -> None:
    settle([Allocation("GPU-0", pod("a"))], [], {"a": requests}, GPUS)
    settle([Allocation("GPU-9", pod("a"))], [], {"a": requests}, {})
