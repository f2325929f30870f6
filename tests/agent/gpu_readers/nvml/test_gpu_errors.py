"""What the agent tells of the errors of its GPUs, from the driver's events and counters on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agent.gpu_readers.nvml.nvml_device import CONDITION_EVERY_MS
from agent.metering.gpu_errors import ECC, GpuErrorLog
from agent.wire import GpuError, GpuReport
from tests.agent.gpu_readers.nvml.rig import T0, Rig


def test_the_drivers_events_and_counters_are_told_with_when_and_what_to_do(new_rig: Callable[..., Any]) -> None:
    rig: Rig = new_rig(gpus=2)
    log = GpuErrorLog()
    rig.fake.tell("on 0", "ecc 7 2", "throttle 0", "on 1", "ecc 0 0", "throttle 0")
    log.observe(rig.now_ms, rig.look().devices)
    assert log.gpus == (GpuReport("GPU-0", (GpuError(ECC, 2),)), GpuReport("GPU-1")), "when they were is unknown"
    rig.fake.tell("on 0", "ecc 9 3", f"throttle {0x40 | 0x08}", "on 1", "xid 31", "xid 79", "remap 1 0")
    snapshot = rig.tick(CONDITION_EVERY_MS)
    log.observe(rig.now_ms, snapshot.devices)
    at_ms = rig.now_ms
    first, second = log.gpus
    assert first.errors == (GpuError(ECC, 3, None, at_ms), GpuError("hardware thermal slowdown", 1, T0, at_ms))
    assert second.errors == (GpuError("xid 31", 1, T0, at_ms), GpuError("xid 79", 1, T0, at_ms))
    assert second.needs == ("drain_node: xid 79", "reset_gpu: remapped memory rows wait for it")
    before = log.gpus
    log.observe(rig.now_ms, rig.tick().devices)
    assert log.gpus is before, "nothing new is nothing to do"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("nvmlEventSetCreate 3", "does not report the XID errors"), ("nvmlDeviceRegisterEvents 4", "no permission")],
    ids=["no events", "refused"],
)
def test_a_gpu_of_which_no_event_comes_is_unknown_and_not_without_errors(
    new_rig: Callable[..., Any], fault: str, reason: str
) -> None:
    rig: Rig = new_rig()
    rig.fake.tell("machine", f"fail {fault}")
    log = GpuErrorLog()
    log.observe(rig.now_ms, rig.look().devices)
    (gpu,) = log.gpus
    assert gpu.errors == ()
    assert reason in gpu.unread["xid"]
