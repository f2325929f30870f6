"""HAMi's virtual devices as the kubelet lists them: the part of a GPU that the limits of a container leave."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.settings import AgentSettings, SettingsError
from agent.holders.chosen import open_holders
from agent.holders.installed import virtual_devices
from agent.holders.kubelet.device_allocations import DeviceNames, DeviceRef, like_a_gpu
from agent.holders.protocol import NodeSurroundings
from agent.holders.virtual_parts import limited_ppm
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import VirtualClock
from gputally.testing.holders import NODE
from tests.agent.holders.kubelet.kubelet_lists import FORGED, GPUS, MEMORY_MIB, A, box, given_pod, join, offered
from tests.agent.holders.kubelet.pods import view
from tests.agent.sample_values import T0
from tests.fake_scheduler import fake_scheduler as fake_scheduler


def test_a_device_plugins_id_points_to_its_device() -> None:
    name = f"{A}-7"
    assert DeviceNames(GPUS).find(name) == DeviceRef(A, replica="7", virtual="-")
    assert like_a_gpu(name)


def limited(**limits: object) -> dict[str, object]:
    named = {f"nvidia.com/{key.replace('_', '-')}": str(value) for key, value in limits.items()}
    return {"containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1", **named}}}]}


@pytest.mark.parametrize(
    ("limits", "ppm"),
    [
        ({"gpucores": 30, "gpumem": MEMORY_MIB // 5}, 300_000),
        ({"gpucores": 10, "gpumem": MEMORY_MIB}, 1_000_000),  # nobody else can have the memory
        ({"gpucores": 0, "gpumem": 14_378}, 100_006),
        ({"gpucores": 1}, 1_000_000),  # memory without a limit is all of it
        ({"gpucores": 200}, 1_000_000),
        ({"gpumem_percentage": 25}, 250_000),
        ({"gpumem": "8k"}, 55_644),  # as an API server writes 8000
        ({"gpumem": "8Ki", "gpucores": "1e0"}, 56_979),
        ({"gpumem_percentage": "25000m"}, 250_000),
        ({"gpucores": "many"}, 1_000_000),
        ({"gpucores": "nan", "gpumem": "much"}, 1_000_000),
        ({}, 1_000_000),
    ],
)
def test_a_virtual_device_of_hami_is_the_part_that_its_limits_leave(limits: dict[str, object], ppm: int) -> None:
    """The limits of a container cannot be changed once its pod is bound; its annotations can."""
    told = view(spec=limited(**limits), annotations=FORGED)
    (found,) = join([given_pod("train-0", box("main", f"{A}-3"))], [told], systems=frozenset({"hami"})).allocations
    assert (found.gpu_uuid, found.sharing, found.fraction_ppm) == (A, "fraction", ppm)


def test_a_part_declared_of_a_size_that_was_not_read_is_unknown() -> None:
    assert limited_ppm({"nvidia.com/gpumem": "20390"}, virtual_devices()["hami"], None) is None, "not all of the GPU"
    assert limited_ppm({"nvidia.com/gpumem-percentage": "25"}, virtual_devices()["hami"], None) == 250_000


def test_where_hami_is_not_switched_on_its_devices_are_equal_parts_and_said_to_be_unread() -> None:
    ids = [f"{A}-{k}" for k in range(10)]
    views = [view(spec=limited(gpucores=1, gpumem=1))]
    found = join([given_pod("train-0", box("main", ids[3]))], views, offered=offered(*ids))
    (part,) = found.allocations
    assert (part.sharing, part.replicas, part.sharing_replicas, part.fraction_ppm) == ("time-slicing", 1, 10, None)
    assert found.unnamed == {"hami"}


limit_names = st.sampled_from(["gpu-memory", "nvidia.com/gpucores", "nvidia.com/gpumem-percentage"])


@given(st.dictionaries(limit_names, st.text(max_size=12)))
def test_no_limit_is_too_strange(limits: dict[str, str]) -> None:
    part = limited_ppm(limits, virtual_devices()["hami"], MEMORY_MIB)
    assert part is not None
    assert 0 < part <= 1_000_000


def surroundings(gpu_sharing: str = "") -> NodeSurroundings:
    clock = VirtualClock(T0)
    return NodeSurroundings(NODE, clock, BackgroundTasks(clock), AgentSettings(gpu_sharing=gpu_sharing))


def test_it_is_no_source_of_holders() -> None:
    with pytest.raises(SettingsError, match="no source"):
        open_holders("hami", surroundings())


@pytest.mark.usefixtures("fake_scheduler")
def test_it_can_be_switched_on_beside_a_scheduler_that_reserves_gpus() -> None:
    assert open_holders("processes", surroundings("fake, hami")) == ("processes", None)
