"""The kubelet's names of devices find the GPUs and instances that the driver lists."""

from __future__ import annotations

from typing import Any

import pytest

from agent.holders.kubelet.device_allocations import DeviceNames, DeviceRef
from tests.agent.sample_values import GIB


@pytest.mark.parametrize("refused", ["", "nvmlDeviceGetGpuInstanceById", "nvmlGpuInstanceGetInfo"])
def test_two_instances_of_one_profile_are_told_apart_by_their_placement(new_rig: Any, refused: str) -> None:
    instances = [f"mig MIG-{i} {i + 7} 0 1 1g.10gb {10 * GIB} 0 1 19 {i}" for i in (0, 1)]
    rig = new_rig(setup=["migmode 1", *instances, *([f"fail {refused} 4"] if refused else [])])
    (gpu,) = (device.gpu for device in rig.look().devices)
    names = DeviceNames([gpu])
    found = [names.find_claimed("node-1", f"gpu-0-mig-{name}") for name in ("1g10gb-19-0", "1g10gb-19-1", "19-1-1")]
    assert found == [None if refused else DeviceRef("GPU-0", mig) for mig in ("MIG-0", "MIG-1", "MIG-1")]
    assert names.possible("gpu-0-mig-1g10gb-19-0", "node-1") == {"GPU-0"}
