"""What the agent tells of the errors of its GPUs, from the conditions that readers read."""

from __future__ import annotations

from agent.core.readings import DeviceCondition, DeviceReading, Gpu, Unavailable, XidCount
from agent.metering.gpu_errors import ECC, MOST_GPUS, MOST_KINDS, GpuErrorLog
from agent.wire import GpuError
from tests.agent.sample_values import T0

FINE = DeviceCondition(throttle_reasons=0, ecc_uncorrected=0, xids_unread="")


def device(uuid: str = "GPU-0", condition: DeviceCondition = FINE) -> DeviceReading:
    return DeviceReading(Gpu(uuid, 0, "H100", 81_920), condition=condition)


def test_a_reader_that_reads_no_errors_says_so() -> None:
    log = GpuErrorLog()
    log.observe(T0, [device(condition=DeviceCondition())])
    (gpu,) = log.gpus
    assert gpu.unread.keys() == {"xid", ECC, "slowdowns"}
    assert all(gpu.unread.values())


def test_a_slowdown_counts_once_however_long_it_lasts() -> None:
    log = GpuErrorLog()
    for number, reasons in enumerate((0x80, 0x80 | 0x04, 0, 0x80, Unavailable("refused"), 0x80)):
        condition = DeviceCondition(number, throttle_reasons=reasons, ecc_uncorrected=0, xids_unread="")
        log.observe(T0 + number, [device(condition=condition)])
    (gpu,) = log.gpus
    assert gpu.errors == (GpuError("hardware power brake", 2, T0, T0 + 3),)


def test_what_is_told_is_bounded_and_a_gpu_that_is_gone_is_not_told() -> None:
    xids = tuple(XidCount(number, 1, T0 + number) for number in range(40))
    log = GpuErrorLog()
    log.observe(T0, [device(f"GPU-{n}", DeviceCondition(xids=xids, xids_unread="")) for n in range(MOST_GPUS + 9)])
    assert len(log.gpus) == MOST_GPUS
    assert [error.kind for error in log.gpus[0].errors] == [f"xid {n}" for n in range(39, 39 - MOST_KINDS, -1)]
    log.observe(T0 + 1, [device("GPU-1")])
    assert [gpu.gpu_uuid for gpu in log.gpus] == ["GPU-1"]
