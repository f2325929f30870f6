"""Declares the Prometheus metric families of GPUs, MIG instances, holders and the agent, and writes them in the text
format.

Metrics use base units, and a help text ends in a full stop. Device and pod series have different names, so that no
query adds them up by mistake. Only a pod's `_info` series has its uid. The method of busy time (`method`) and the kind
of sharing (`sharing`) are labels of the holder's series, and both change at times while the holder runs. A counter with
the new labels then starts and the old one stops, so a PromQL sum() over both counts no microsecond twice. A gauge has a
series only for the newest labels.

Device families have one series per device (and per error code, for example), never one per pod. A missing reading gives
no series, and never 0.

A node with a hundred pods has a thousand series, most of which have the same labels in every scrape. `TextFormat`
caches the text of the labels and formats only the numbers again. The client library creates an object for every label
set: with it, a scrape takes several times as long, and the agent's start a third longer. Tests read the output with the
library's parser. Source: Prometheus exposition formats, text format 0.0.4."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf, isnan
from operator import attrgetter
from typing import Literal

import msgspec

from agent.core.readings import DeviceReading, HolderReading, NodeSnapshot, Reading, Unavailable
from agent.wire import Holder, PodFacts, UsageInterval
from gputally.base.background_tasks import FAILURES_HELP, STOPPED_HELP, TaskState
from gputally.base.units import MS_PER_SECOND

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_REMEMBERED = 5_000
"""Largest number of cached label sets of one family."""

Kind = Literal["counter", "gauge", "untyped"]


class Family(msgspec.Struct):
    """A metric family: its name, its help text and its series.

    name: the full name, with the `_total` of a counter.
    text: the help text.
    labels: the label names of every series.
    series: (label values, value) of each series."""

    name: str
    text: str
    kind: Kind
    labels: Sequence[str] = ()
    series: list[tuple[tuple[str, ...], float]] = msgspec.field(default_factory=list)

    def add(self, labels: tuple[str, ...], value: float) -> None:
        """Add a series. labels: the values of the labels, in the order of the label names."""
        self.series.append((labels, value))


class TextFormat:
    """Writes families in the text format and caches the text of their labels. Several threads may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._texts: dict[str, dict[tuple[str, ...], str]] = {}

    def render(self, families: Iterable[Family]) -> bytes:
        """Return the text of one scrape."""
        lines: list[str] = []
        for family in families:
            name = family.name
            text = family.text.replace("\\", r"\\").replace("\n", r"\n")
            lines.append(f"# HELP {name} {text}\n# TYPE {name} {family.kind}\n")
            known = self._texts.setdefault(name, {})
            for labels, value in family.series:
                series = known.get(labels) or self._remember(known, family, labels)
                number = float(value)
                lines.append(f"{series} {number!r}\n" if -inf < number < inf else f"{series} {_non_finite(number)}\n")
        return "".join(lines).encode()

    def _remember(self, known: dict[tuple[str, ...], str], family: Family, labels: tuple[str, ...]) -> str:
        named = sorted(zip(family.labels, labels, strict=True))
        pairs = ",".join(f'{name}="{_escaped(value)}"' for name, value in named)
        text = f"{family.name}{{{pairs}}}" if named else family.name
        with self._lock:
            if len(known) >= MAX_REMEMBERED:
                known.clear()  # the labels of present pods are cached again at the next scrape
            known[labels] = text
        return text


def _non_finite(value: float) -> str:
    return "NaN" if isnan(value) else "+Inf" if value > 0 else "-Inf"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


PREFIX = "gputally_"
MIB = 1_048_576
MICRO = 1_000_000
_POD = ("gpu_uuid", "mig_uuid", "namespace", "pod", "container", "sharing", "method")
_UNREAD = Unavailable("not read")
PodKey = tuple[str, str, str, str, str, str, str]
"""Labels of one holder on one device: (GPU uuid, MIG uuid, namespace, pod, container, sharing, method)."""
Place = tuple[str, ...]
"""The first five labels of a `PodKey`: a holder on a device, independent of sharing and method."""


class Operations(msgspec.Struct, frozen=True):
    """The state of the agent itself, which the main loop updates after every sample.

    nvml_up: True if the driver answers; None for a source without NVML, such as a simulated node.
    outbox_rows, outbox_bytes: number and size of the records that the accountant has not stored yet.
    uploads: number of uploads by outcome.
    parked: number of records that never reach the ledger, by reason.
    collectors: for each source its success (None if it is a part of another source) and the duration of its last
        reading in seconds (None if it is not timed).
    sample_s: duration of the last reading of all sources.
    intervals_closed: number of rows that the meter has closed.
    unspooled_rows: rows in memory while the spool cannot be written.
    unspooled_lost_rows: rows that were lost because the memory was full.
    privilege: the privilege level on Kubernetes; "" elsewhere.
    unseen: labels of the figures that the agent cannot see (`agent.core.settings.unseen`)."""

    nvml_up: bool | None = None
    outbox_rows: int = 0
    outbox_bytes: int = 0
    outbox_oldest_age_s: float = 0.0
    uploads: Mapping[str, int] = msgspec.field(default_factory=dict)
    parked: Mapping[str, int] = msgspec.field(default_factory=dict)
    collectors: Mapping[str, tuple[bool | None, float | None]] = msgspec.field(default_factory=dict)
    sample_s: float = 0.0
    intervals_closed: int = 0
    unspooled_rows: int = 0
    unspooled_lost_rows: int = 0
    privilege: str = ""
    unseen: tuple[str, ...] = ()


class DeviceTotals(msgspec.Struct):
    """The sums of the rows of one device, or of one holder on it; None if no row had the figure. Units are those of
    `agent.wire.UsageInterval`.

    unheld_us: capacity without a holder.
    unattributed_us: busy time without a known holder.
    unheld_uj: energy of unheld and unattributed rows.
    share_ppm: part of the GPU that is allocated in the last row, in millionths."""

    allocated_us: int = 0
    unheld_us: int = 0
    unattributed_us: int = 0
    unheld_uj: int = 0
    share_ppm: int = 0
    busy_us: int | None = None
    sm_active_us: int | None = None
    tensor_active_us: int | None = None
    memory_mib_s: int | None = None
    energy_uj: int | None = None

    def add(self, row: UsageInterval) -> None:
        """Add a row of a holder."""
        self.allocated_us += row.allocated_us
        self.share_ppm = row.allocated_us * MS_PER_SECOND // max(row.end_ms - row.start_ms, 1)
        self.busy_us = plus(self.busy_us, row.busy_us)
        self.sm_active_us = plus(self.sm_active_us, row.sm_active_us)
        self.tensor_active_us = plus(self.tensor_active_us, row.tensor_active_us)
        self.memory_mib_s = plus(self.memory_mib_s, row.memory_mib_s)
        self.energy_uj = plus(self.energy_uj, row.energy_uj)

    def add_device(self, row: UsageInterval) -> None:
        """Add a row of a device, whichever its holder is."""
        self.add(row)
        if row.holder is None:
            self.unheld_us += row.capacity_us
        elif row.holder.kind == "unattributed":
            self.unattributed_us += row.busy_us or 0
        if row.holder is None or row.holder.kind == "unattributed":
            self.unheld_uj += row.energy_uj or 0


def names(holder: Holder) -> tuple[str, str, str]:
    """Return the labels (namespace, pod, container) of a holder. If the holder has no name, `pod` is its uid."""
    return holder.namespace, holder.name or holder.uid, holder.container


def of_pods(
    snapshot: NodeSnapshot,
    sums: Mapping[PodKey, DeviceTotals],
    newest: Mapping[Place, PodKey],
    facts: Iterable[PodFacts],
) -> Iterator[Family]:
    """Yield the families of the holders, and the family with the facts of the pods.

    sums: the totals of each label set.
    newest: the newest label set of each holder on a device."""
    ordered = sorted(sums.items())
    now = [(key, total) for key, total in ordered if newest.get(key[:5]) == key]
    for name, text, attribute, per in (
        ("pod_gpu_allocated_seconds", "GPU time allocated to the holder.", "allocated_us", MICRO),
        ("pod_gpu_busy_seconds", "Time for which the holder was busy, as time of the whole GPU.", "busy_us", MICRO),
        ("pod_gpu_sm_active_seconds", "Multiprocessor activity of the holder; on a shared GPU divided by busy time.",
         "sm_active_us", MICRO),
        ("pod_gpu_tensor_active_seconds", "Tensor core activity of the holder; on a shared GPU divided by busy time.",
         "tensor_active_us", MICRO),
        ("pod_gpu_energy_joules", "Energy of the holder: active energy is divided by busy time, idle by allocation.",
         "energy_uj", MICRO),
    ):  # fmt: skip
        yield totals(counter(name, text, _POD), ordered, attribute, per)
    byte_seconds = counter(
        "pod_gpu_memory_byte_seconds", "Device memory that the holder used, times its duration.", _POD
    )
    for labels, total in ordered:
        if total.memory_mib_s is not None:
            byte_seconds.add(labels, total.memory_mib_s * MIB)
    yield byte_seconds
    share = gauge("pod_gpu_share_ratio", "Part of the GPU allocated to the holder in the last interval, 0 to 1.", _POD)
    for labels, total in now:
        share.add(labels, total.share_ppm / MICRO)
    yield share
    memory = gauge("pod_gpu_memory_used_bytes", "Device memory that the holder uses.", _POD)
    current = {_place(d, r): r.memory_mib for d in snapshot.devices for r in d.holders}
    for labels, _ in now:
        put(memory, labels, current.get(labels[:5], _UNREAD), MIB)
    yield memory
    info = gauge(
        "pod_info",
        "A pod that holds a GPU of this node, with its workload and queue; always 1.",
        ("namespace", "pod", "uid", "node", "workload", "queue"),
    )
    for fact in sorted(facts, key=lambda fact: fact.uid):
        info.add((fact.namespace, fact.name, fact.uid, fact.node, fact.workload, fact.queue_ref), 1)
    yield info


def _place(device: DeviceReading, reading: HolderReading) -> Place:
    return device.gpu.uuid, reading.mig_uuid, *names(reading.holder)


def of_the_agent(ops: Operations, version: str, node: str) -> Iterator[Family]:
    """Yield the families of the agent itself and of its sources."""
    uploads = counter("agent_uploads", "Uploads by result.", ("result",))
    parked = counter("agent_rows_parked", "Records that never reach the ledger, by reason.", ("reason",))
    yield _single(counter("agent_intervals_closed", "Usage rows closed by the meter."), ops.intervals_closed)
    for family, values in ((uploads, ops.uploads), (parked, ops.parked)):
        family.series = [((name,), value) for name, value in sorted(values.items())]
        yield family
    if ops.nvml_up is not None:
        yield _single(gauge("nvml_up", "1 while the NVIDIA driver answers."), ops.nvml_up)
    for name, text, value in (
        ("agent_outbox_rows", "Records that the accountant has not stored yet.", ops.outbox_rows),
        ("agent_outbox_bytes", "Size of the outbox.", ops.outbox_bytes),
        ("agent_outbox_oldest_age_seconds", "Age of the oldest record that the accountant has not stored yet.",
         ops.outbox_oldest_age_s),
        ("agent_unspooled_rows", "Rows in memory because the spool cannot be written.", ops.unspooled_rows),
    ):  # fmt: skip
        yield _single(gauge(name, text), value)
    lost = counter(
        "agent_unspooled_lost_rows", "Rows that were lost because the spool could not be written and memory was full."
    )
    yield _single(lost, ops.unspooled_lost_rows)
    if ops.privilege:
        level = gauge("agent_privilege_info", "The agent's privilege level; always 1.", ("level",))
        level.add((ops.privilege,), 1)
        unseen = gauge(
            "agent_unseen",
            "A figure that the agent cannot see, because a privilege is missing or the driver refuses it; always 1.",
            ("what",),
        )
        unseen.series = [((what,), 1) for what in ops.unseen]
        yield from (level, unseen)
    yield _single(gauge("agent_sample_duration_seconds", "Duration of the last reading of all sources."), ops.sample_s)
    success = gauge("collector_success", "1 if the source answered at the last reading.", ("collector",))
    duration = gauge("collector_duration_seconds", "Duration of the last reading of the source.", ("collector",))
    for name, (succeeded, seconds) in sorted(ops.collectors.items()):
        if succeeded is not None:
            success.add((name,), succeeded)
        if seconds is not None:
            duration.add((name,), seconds)
    yield from (success, duration)
    build = gauge("agent_build_info", "Version and node of the running agent; always 1.", ("version", "node"))
    build.add((version, node), 1)
    yield build


def gauge(name: str, text: str, labels: Sequence[str] = ()) -> Family:
    """Return a gauge with gputally's prefix."""
    return Family(PREFIX + name, text, "gauge", labels)


def counter(name: str, text: str, labels: Sequence[str] = ()) -> Family:
    """Return a counter with gputally's prefix. name: without `_total`."""
    return Family(f"{PREFIX}{name}_total", text, "counter", labels)


def of_tasks(states: Mapping[str, TaskState]) -> Iterator[Family]:
    """Yield the families of the agent's background tasks, under the names that all programs use."""
    stopped = gauge("task_stopped", STOPPED_HELP, ("task",))
    failures = counter("task_failures", FAILURES_HELP, ("task",))
    for name, state in states.items():
        stopped.add((name,), state.stopped)
        failures.add((name,), state.failures)
    yield from (stopped, failures)


def _single(family: Family, value: float) -> Family:
    family.add((), value)
    return family


def totals(family: Family, sums: Iterable[tuple[tuple[str, ...], DeviceTotals]], attribute: str, per: int) -> Family:
    """Add a series to the family for each total that is known, and return the family.

    attribute: the attribute of `DeviceTotals` with the total.
    per: the divisor that converts it to the family's unit."""
    value_of = attrgetter(attribute)
    family.series = [(labels, value / per) for labels, total in sums if (value := value_of(total)) is not None]
    return family


def put(family: Family, labels: tuple[str, ...], value: Reading, times: int = 1, per: int = 1) -> None:
    """Add a series with the value times `times` / `per` if the value is known. An unknown value gives no series."""
    if not isinstance(value, Unavailable):
        family.add(labels, value * times / per if per != 1 else value * times)


def plus(total: int | None, value: int | None) -> int | None:
    """Add a value to a total. An unknown value changes nothing."""
    return total if value is None else (total or 0) + value


_GPU = ("gpu_uuid",)
_MEGAHERTZ = 1_000_000
# Source: nvml.h, nvmlClocksEventReason*. Idleness and configured application clocks are left out: neither is a limit.
_THROTTLE_REASONS = (
    (0x04, "software power cap"),
    (0x08, "hardware slowdown"),
    (0x10, "sync boost"),
    (0x20, "software thermal slowdown"),
    (0x40, "hardware thermal slowdown"),
    (0x80, "hardware power brake"),
)


def of_devices(snapshot: NodeSnapshot, sums: Mapping[str, DeviceTotals], node: str) -> Iterator[Family]:
    """Yield the families of the physical GPUs. They have one series per GPU, or one per GPU and error code, for
    example."""
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
    gaps = counter(
        "gpu_sample_gaps",
        "How often busy-time samples were missing, because the driver discarded them before the agent read them.",
        _GPU,
    )
    for device in readings:
        gaps.add((device.gpu.uuid,), device.sample_gaps)
    yield gaps
    yield from _error_counters(readings)
    yield from _device_gauges(readings)
    yield from _condition(readings)
    yield _disagreements(snapshot)


def _device_counters(sums: Mapping[str, DeviceTotals]) -> Iterator[Family]:
    ordered = [((uuid,), total) for uuid, total in sorted(sums.items())]
    for name, text, attribute, per in (
        ("gpu_busy_seconds", "Time for which the GPU was busy, with or without a holder.", "busy_us", MICRO),
        ("gpu_sm_active_seconds", "Time for which the GPU's multiprocessors were active, averaged over them.",
         "sm_active_us", MICRO),
        ("gpu_tensor_active_seconds", "Time for which the GPU's tensor cores were active.", "tensor_active_us", MICRO),
        ("gpu_energy_joules", "Energy that the GPU used.", "energy_uj", MICRO),
        ("gpu_unattributed_busy_seconds", "Busy time that belongs to no known holder.", "unattributed_us", MICRO),
        ("gpu_allocated_seconds", "GPU time allocated to holders.", "allocated_us", MICRO),
        ("gpu_unallocated_seconds", "GPU time without a holder.", "unheld_us", MICRO),
        ("gpu_unallocated_energy_joules", "Energy attributed to no holder.", "unheld_uj", MICRO),
    ):  # fmt: skip
        yield totals(counter(name, text, _GPU), ordered, attribute, per)


def _device_gauges(readings: Sequence[DeviceReading]) -> Iterator[Family]:
    used = gauge("gpu_memory_used_bytes", "Device memory in use.", _GPU)
    size = gauge("gpu_memory_total_bytes", "Device memory installed.", _GPU)
    power = gauge("gpu_power_watts", "Power drawn.", _GPU)
    lost = gauge("gpu_lost", "1 while the GPU is lost, or needs a reset or a drained node before use.", _GPU)
    silent = gauge("gpu_silent", "1 while the GPU is not lost but no reading succeeds, so its use is unknown.", _GPU)
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
    xids = counter("gpu_xid_errors", "XID errors that the driver reported, by number.", ("gpu_uuid", "xid"))
    last = gauge(
        "gpu_xid_last_timestamp_seconds", "Unix time at which the driver last reported the XID.", ("gpu_uuid", "xid")
    )
    ecc = counter("gpu_ecc_errors", "Memory errors since the driver was loaded, by kind.", ("gpu_uuid", "kind"))
    needs = gauge(
        "gpu_recovery_action",
        "1 while this action is required after a hardware fault: restart_app, reset_gpu or drain_node.",
        ("gpu_uuid", "action", "cause"),
    )
    remap = gauge("gpu_row_remap_pending", "1 while remapped memory rows wait for the next reset of the GPU.", _GPU)
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
    throttled = gauge("gpu_throttle_reason", "1 while this reason reduces the clocks.", ("gpu_uuid", "reason"))
    for device in readings:
        labels, condition = (device.gpu.uuid,), device.condition
        put(temperature, labels, condition.temperature_c)
        put(sm_clock, labels, condition.sm_clock_mhz, _MEGAHERTZ)
        put(memory_clock, labels, condition.memory_clock_mhz, _MEGAHERTZ)
        if not isinstance(condition.throttle_reasons, Unavailable):
            for bit, reason in _THROTTLE_REASONS:
                throttled.add((device.gpu.uuid, reason), bool(condition.throttle_reasons & bit))
    yield from (temperature, sm_clock, memory_clock, throttled)


def _disagreements(snapshot: NodeSnapshot) -> Family:
    family = gauge(
        "attribution_disagreements",
        "Pods whose processes run on the GPU although the kubelet has not allocated it to them.",
        _GPU,
    )
    if not isinstance(snapshot.allocations, Unavailable):
        allocated = {(a.gpu_uuid, a.holder.uid, a.mig_uuid) for a in snapshot.allocations}
        for device in snapshot.devices:
            uuid = device.gpu.uuid
            pods = {(uuid, r.holder.uid, r.mig_uuid) for r in device.holders if r.holder.kind == "pod"}
            family.add((uuid,), len({uid for _, uid, _ in pods - allocated}))
    return family
