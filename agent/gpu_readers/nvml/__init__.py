"""Reads the GPU driver: devices, processes, MIG instances, power and errors, through NVML, GPM and accounting mode.

Read in this order: `driver_lifecycle.Gpus`, which finds the GPUs again after faults; `nvml_device`, one GPU;
`utilization`, which makes counters of samples; `nvml_library`, which alone calls the library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from agent.gpu_readers.protocol import DriverCheck, GpuReaderPlugin, Surroundings

if TYPE_CHECKING:
    from agent.gpu_readers.nvml.driver_lifecycle import Gpus


def _open(_: str, surroundings: Surroundings) -> Gpus:
    from agent.gpu_readers.nvml.driver_lifecycle import Gpus
    from agent.gpu_readers.nvml.nvml_device import Access
    from agent.gpu_readers.nvml.nvml_library import Driver
    from gputally.base.clock import SystemClock

    return Gpus(
        Driver(),
        surroundings.release_file,
        access=Access(processes=surroundings.sees_processes, enable_accounting=surroundings.accounting),
        restarted=surroundings.restarted,
        clock=SystemClock(),  # the driver's times are the system clock's
    )


def _check() -> DriverCheck:
    from agent.gpu_readers.nvml.driver_lifecycle import Gpus
    from agent.gpu_readers.nvml.nvml_library import NO_GPUS_REMEDY, Driver, NvmlFault, remedy

    driver = Driver()

    def count() -> int | None:
        try:
            return int(driver.call("nvmlDeviceGetCount"))
        except NvmlFault:  # the driver did not start, or was lost meanwhile
            return None

    return DriverCheck(Gpus(driver), count, remedy, NO_GPUS_REMEDY)


READER: Final = GpuReaderPlugin(
    name="nvml",
    place="",
    open=_open,
    fills=False,
    reaches="reads NVIDIA GPUs through libnvidia-ml.so.1; with `accounting` it switches accounting mode on",
    page="docs/attribution.md",
    check=_check,
)
