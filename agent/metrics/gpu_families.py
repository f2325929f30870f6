"""The Prometheus families of the physical GPUs and their MIG instances.

One series per device (per error code and the like), never one per pod: those are `agent.metrics.families`. A
reading that is not to be had is no series, and never 0. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from agent.metrics.families import MIB, MICRO, Total, counter, gauge, put, totals
from agent.metrics.promtext import Family
from agent.model import DeviceReading, Snapshot, Unavailable

_GPU = ("gpu_uuid",)
_MEGAHERTZ = 1_000_000
# Source: nvml.h, nvmlClocksEventReason*. An idle GPU and one with set application clocks are not held down.
_THROTTLE_REASONS = (
    (0x04, "software power cap"),
    (0x08, "hardware slowdown"),
    (0x10, "sync boost"),
    (0x20, "software thermal slowdown"),
    (0x40, "hardware thermal slowdown"),
    (0x80, "hardware power brake"),
)


def of_devices(snapshot: Snapshot, sums: Mapping[str, Total], node: str) -> Iterator[Family]:
    """Families of the physical GPUs, one series each (per error code and the like)."""
    readings = snapshot.devices
    info = gauge(
        "gpu_info",
        "A GPU of this node; always 1.",
        ("gpu_uuid", "gpu_index", "gpu_model", "pci_bus_id", "driver_version", "node"),
    )
    slices = gauge(
        "gpu_mig_info", "A MIG instance of a GPU; always 1.", ("gpu_uuid", "mig_uuid", "profile", "gi", "ci")
    )
    for device in readings:
        gpu = device.gpu
        info.add((gpu.uuid, str(gpu.index), gpu.model, gpu.pci_bus_id, gpu.driver_version, node), 1)
        for instance in gpu.mig:
            labels = (gpu.uuid, instance.uuid, instance.profile, str(instance.gi), str(instance.ci))
            slices.add(labels, 1)
    yield from (info, slices)
    yield from _device_counters(sums)
    gaps = counter("gpu_sample_gaps", "Stretches the driver's sample buffer had lost before it was read.", _GPU)
    for device in readings:
        gaps.add((device.gpu.uuid,), device.sample_gaps)
    yield gaps
    yield from _error_counters(readings)
    yield from _device_gauges(readings)
    yield from _condition(readings)
    yield _disagreements(snapshot)


def _device_counters(sums: Mapping[str, Total]) -> Iterator[Family]:
    ordered = [((uuid,), total) for uuid, total in sorted(sums.items())]
    for name, text, attribute, per in (
        ("gpu_busy_seconds", "Time the GPU was busy, whoever used it.", "busy_us", MICRO),
        ("gpu_sm_active_seconds", "Time the GPU's multiprocessors were active, averaged over them.", "sm_active_us",
         MICRO),
        ("gpu_tensor_active_seconds", "Time the GPU's tensor cores were active.", "tensor_active_us", MICRO),
        ("gpu_energy_joules", "Energy the GPU used.", "energy_uj", MICRO),
        ("gpu_unattributed_busy_seconds", "Busy time that belongs to no known holder.", "unattributed_us", MICRO),
        ("gpu_allocated_seconds", "GPU time that was given to holders.", "allocated_us", MICRO),
        ("gpu_unallocated_seconds", "GPU time that nobody held.", "unheld_us", MICRO),
        ("gpu_unallocated_energy_joules", "Energy that was put on no holder.", "unheld_uj", MICRO),
    ):  # fmt: skip
        yield totals(counter(name, text, _GPU), ordered, attribute, per)


def _device_gauges(readings: Sequence[DeviceReading]) -> Iterator[Family]:
    used = gauge("gpu_memory_used_bytes", "Device memory in use.", _GPU)
    size = gauge("gpu_memory_total_bytes", "Device memory installed.", _GPU)
    power = gauge("gpu_power_watts", "Power drawn.", _GPU)
    lost = gauge(
        "gpu_lost", "1 while the GPU is listed but cannot be used, or must be reset or its node drained.", _GPU
    )
    silent = gauge("gpu_silent", "1 while the GPU is not lost and answers nothing: what it does is unknown.", _GPU)
    for device in readings:
        labels = (device.gpu.uuid,)
        put(used, labels, device.memory_used_mib, MIB)
        if device.gpu.memory_mib is not None:
            size.add(labels, device.gpu.memory_mib * MIB)
        put(power, labels, device.power_mw, 1, 1_000)
        lost.add(labels, device.health == "lost")
        silent.add(labels, device.silent)
    yield from (used, size, power, lost, silent)


def _error_counters(readings: Sequence[DeviceReading]) -> Iterator[Family]:
    xids = counter("gpu_xid_errors", "XID errors the driver reported, by number.", ("gpu_uuid", "xid"))
    last = gauge("gpu_xid_last_timestamp_seconds", "When the XID was last reported (Unix time).", ("gpu_uuid", "xid"))
    ecc = counter("gpu_ecc_errors", "Memory errors since the driver was loaded, by kind.", ("gpu_uuid", "kind"))
    needs = gauge(
        "gpu_recovery_action",
        "1 while this has to be done after a hardware fault: restart_app, reset_gpu or drain_node.",
        ("gpu_uuid", "action", "cause"),
    )
    remap = gauge("gpu_row_remap_pending", "1 while remapped rows of memory wait for the next reset.", _GPU)
    for device in readings:
        condition = device.condition
        for recovery in condition.recoveries:
            needs.add((device.gpu.uuid, recovery.action, recovery.cause), 1)
        if condition.row_remap_pending is not None:
            remap.add((device.gpu.uuid,), condition.row_remap_pending)
        for error in condition.xids:
            xids.add((device.gpu.uuid, str(error.xid)), error.count)
            last.add((device.gpu.uuid, str(error.xid)), error.last_ms / 1_000)
        put(ecc, (device.gpu.uuid, "corrected"), condition.ecc_corrected)
        put(ecc, (device.gpu.uuid, "uncorrected"), condition.ecc_uncorrected)
    yield from (xids, ecc, last, needs, remap)


def _condition(readings: Sequence[DeviceReading]) -> Iterator[Family]:
    temperature = gauge("gpu_temperature_celsius", "Temperature of the GPU.", _GPU)
    sm_clock = gauge("gpu_sm_clock_hertz", "Clock of the multiprocessors.", _GPU)
    memory_clock = gauge("gpu_memory_clock_hertz", "Clock of the memory.", _GPU)
    throttled = gauge(
        "gpu_throttle_reason", "1 while the clocks are held down for this reason.", ("gpu_uuid", "reason")
    )
    for device in readings:
        labels, condition = (device.gpu.uuid,), device.condition
        put(temperature, labels, condition.temperature_c)
        put(sm_clock, labels, condition.sm_clock_mhz, _MEGAHERTZ)
        put(memory_clock, labels, condition.memory_clock_mhz, _MEGAHERTZ)
        if not isinstance(condition.throttle_reasons, Unavailable):
            for bit, reason in _THROTTLE_REASONS:
                throttled.add((device.gpu.uuid, reason), bool(condition.throttle_reasons & bit))
    yield from (temperature, sm_clock, memory_clock, throttled)


def _disagreements(snapshot: Snapshot) -> Family:
    family = gauge(
        "attribution_disagreements",
        "Pods that run on the GPU without holding it: where control groups and the kubelet disagree.",
        _GPU,
    )
    if not isinstance(snapshot.allocations, Unavailable):
        held = {(a.gpu_uuid, a.holder.uid, a.mig_uuid) for a in snapshot.allocations}
        for device in snapshot.devices:
            family.add((device.gpu.uuid,), len(_strangers(device, held)))
    return family


def _strangers(device: DeviceReading, held: Collection[tuple[str, str, str]]) -> set[str]:
    """Uids of pods whose processes were found on the device (or instance) although nobody gave it to them."""
    return {
        r.holder.uid
        for r in device.holders
        if r.holder.kind == "pod" and (device.gpu.uuid, r.holder.uid, r.mig_uuid) not in held
    }
