"""Every way a device of this node may be called."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.holders.device_allocations import DeviceNames, DeviceRef, like_a_gpu
from tests.agent_cluster.conftest import gpu, uuid

A, B = uuid(0), uuid(1)
B1, B2, B3 = (uuid(16 + i, "MIG") for i in (1, 2, 3))
NAMES = DeviceNames([gpu(0), gpu(1, "1g.18gb", "1g.18gb", "3g.71gb")])


@pytest.mark.parametrize(("name", "place"), [
    (A, DeviceRef(A)),
    (f"{A}::0", DeviceRef(A, replica="0")),
    (f"{A}::12", DeviceRef(A, replica="12")),
    (B1, DeviceRef(B, B1)),
    (f"{B1}::3", DeviceRef(B, B1, "3")),
    (f"MIG-{B}/2/0", DeviceRef(B, B2)),
    (f"MIG-{B}/2/0::1", DeviceRef(B, B2, "1")),
    ("nvidia0", DeviceRef(A)),
    ("nvidia0/vgpu2", DeviceRef(A, replica="2")),
    ("nvidia1/gi3", DeviceRef(B, B3)),
    ("nvidia1/gi3/vgpu1", DeviceRef(B, B3, "1")),
    (f"{A}-7", DeviceRef(A, replica="7", virtual=True)),
])  # fmt: skip
def test_a_device_plugins_id_points_to_its_device(name: str, place: DeviceRef) -> None:
    assert NAMES.find(name) == place
    assert like_a_gpu(name)


@pytest.mark.parametrize(
    "name",
    ["", "::1", "GPU-", uuid(9), f"{uuid(9)}::1", f"MIG-{B}/9/0", f"MIG-{A}/1/0", f"MIG-{uuid(9)}/1/0", "nvidia7",
     "nvidia0/gi1", "nvidia1/gi9/vgpu0", "nvidiactl", "mlx5_0", f"{A}::", f"{A}::x", f"{A}-x", f" {A}", f"{A}\n"],
)  # fmt: skip
def test_what_names_no_device_of_this_node_points_nowhere(name: str) -> None:
    assert NAMES.find(name) is None


@pytest.mark.parametrize(("name", "place"), [
    ("gpu-0", DeviceRef(A)),
    ("gpu-1-mig-3g71gb-9-4", DeviceRef(B, B3)),
    ("gpu-1-mig-3g.71gb-9-4", DeviceRef(B, B3)),
    ("gpu-1-mig-1g18gb-19-0", None),   # two of that profile
    ("gpu-1-mig-7g141gb-0-0", None),
    ("gpu-5", None),
    ("gpu-x", None),
    ("", None),
])  # fmt: skip
def test_a_device_of_the_dra_driver(name: str, place: DeviceRef | None) -> None:
    assert NAMES.find_claimed("node-1", name) == place


def test_a_published_uuid_comes_before_what_the_name_says() -> None:
    claimable = {("node-1", "gpu-1-mig-9-0-4"): B3, ("node-1", "gpu-0"): B, ("node-1", "gpu-7"): uuid(9)}
    names = DeviceNames([gpu(0), gpu(1, "1g.18gb", "1g.18gb", "3g.71gb")], claimable)
    assert names.find_claimed("node-1", "gpu-1-mig-9-0-4") == DeviceRef(B, B3)
    assert names.find_claimed("node-1", "gpu-0") == DeviceRef(B)
    assert names.find_claimed("node-2", "gpu-0") == DeviceRef(A)
    assert names.find_claimed("node-1", "gpu-7") is None


def test_a_minor_number_that_was_not_read_is_the_only_one_left_or_unknown() -> None:
    from dataclasses import replace

    assert DeviceNames([replace(gpu(0), minor=None)]).find("nvidia0") == DeviceRef(A)
    crossed = DeviceNames([replace(gpu(0), minor=1), replace(gpu(1), minor=None)])
    found = crossed.find("nvidia0"), crossed.find("nvidia1")
    assert found == (DeviceRef(B), DeviceRef(A)), "the index is no minor number"
    blind = DeviceNames([replace(gpu(0), minor=None), replace(gpu(1), minor=None)])
    assert (blind.find("nvidia0"), blind.find("nvidia1")) == (None, None), "reported, not guessed"
    swapped = DeviceNames([replace(gpu(0), minor=1), replace(gpu(1), minor=0)])
    assert swapped.find("nvidia0") == DeviceRef(B)


def test_other_plugins_devices_are_not_taken_for_gpus() -> None:
    assert not any(like_a_gpu(name) for name in ("mlx5_0", "rdma-1", "/dev/fuse", "0000:1a:00.0", ""))


@given(st.one_of(st.text(), st.from_regex(r"(MIG-|GPU-|nvidia|gpu-)[0-9a-z:/.+-]{0,40}", fullmatch=True)))
def test_no_name_makes_it_fail(name: str) -> None:
    for place in (NAMES.find(name), NAMES.find_claimed("node-1", name)):
        assert place is None or place.gpu_uuid in (A, B)
    like_a_gpu(name)
