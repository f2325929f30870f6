"""One picture of a node for the live table: from the agent's own snapshot, or from a running agent's /metrics.

Figures only, no drawing. None is unknown and never zero. Pure; the exposition's parser may raise ValueError.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from agent.attribution import Layout, Share, lay_out
from agent.metrics.families import PREFIX
from agent.model import DeviceReading, Reading, Snapshot, Unavailable

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

_MIB = 1_048_576
_MICRO = 1_000_000


@dataclass(frozen=True, slots=True)
class HolderFrame:
    """One holder on one device. key: the same in every picture. share: its part of the GPU, None where it
    cannot be told. busy_us counts up, in time of the whole GPU."""

    key: str
    name: str
    share: Fraction | None
    busy_us: int | None
    memory_mib: int | None


@dataclass(frozen=True, slots=True)
class DeviceFrame:
    """One GPU. origin: where its counters began; two pictures with different ones cannot be compared."""

    uuid: str
    index: int
    model: str
    note: str
    origin: str
    busy_us: int | None
    memory_mib: int | None
    memory_of_mib: int | None
    power_mw: int | None
    holders: tuple[HolderFrame, ...]


@dataclass(frozen=True, slots=True)
class Frame:
    """A node at `at_ms`. message: what failed, "" where nothing did.

    serial: None where the counters are of this instant; else a number that grows when they are closed."""

    at_ms: int
    devices: tuple[DeviceFrame, ...]
    message: str = ""
    serial: int | None = None


def from_snapshot(snapshot: Snapshot) -> Frame:
    """The picture of a snapshot of our own source."""
    failures = [f"{name}: {failure}" for name, failure in snapshot.sources if failure]
    unknown = snapshot.allocations
    if isinstance(unknown, Unavailable) and not failures:
        failures.append(f"holders: {unknown.reason}")
    allocations = () if isinstance(unknown, Unavailable) else unknown
    devices = tuple(
        _device(device, lay_out(device.gpu, [a for a in allocations if a.gpu_uuid == device.gpu.uuid]))
        for device in snapshot.devices
    )
    return Frame(snapshot.at_ms, devices, "; ".join(failures))


def _device(device: DeviceReading, layout: Layout) -> DeviceFrame:
    gpu = device.gpu
    busy = [_known(instance.busy_us) for instance in device.instances]
    whole = _known(device.busy_us)
    if whole is None and busy and None not in busy:
        whole = sum(value for value in busy if value is not None)
    parts = sum(part.weight for part in layout.parts)
    shares = [
        (share, Fraction(part.weight * weight, parts * sum(part.weights)))
        for part in layout.parts
        for share, weight in zip(part.shares, part.weights, strict=True)
    ]
    note = "lost" if device.health == "lost" else ""
    if device.silent and isinstance(device.memory_used_mib, Unavailable):
        note = device.memory_used_mib.reason
    return DeviceFrame(
        uuid=gpu.uuid,
        index=gpu.index,
        model=gpu.model,
        note=note,
        origin=device.counter_epoch,
        busy_us=whole,
        memory_mib=_known(device.memory_used_mib),
        memory_of_mib=gpu.memory_mib,
        power_mw=_known(device.power_mw),
        holders=tuple(_holder(device, share, part, whole) for share, part in shares if share.holder is not None),
    )


def _holder(device: DeviceReading, share: Share, part: Fraction, whole_us: int | None) -> HolderFrame:
    """A holder without a reading of its own has all of what it has to itself."""
    holder = share.holder
    assert holder is not None
    own = next((r for r in device.holders if (r.holder.uid, r.holder.container, r.mig_uuid) == share.key), None)
    instance = next((i for i in device.instances if i.mig_uuid == share.mig_uuid), None)
    busy = _known(own.busy_us) if own else None
    memory = _known(own.memory_mib) if own else None
    alone = share.exclusive and (instance is not None or not device.gpu.mig_enabled)
    if alone and busy is None:
        busy = _known(instance.busy_us) if instance else whole_us
    if alone and memory is None:
        memory = _known(instance.memory_mib if instance else device.memory_used_mib)
    name = holder.name or holder.uid
    if holder.namespace:
        name = f"{holder.namespace}/{name}"
    if share.slice is not None:
        name = f"{share.slice.profile} {name}"
    return HolderFrame("|".join(share.key), name, part, busy, memory)


def _known(reading: Reading) -> int | None:
    return None if isinstance(reading, Unavailable) else reading


def from_exposition(text: str, at_ms: int) -> Frame:
    """The picture of a running agent's page. Raises ValueError where that is none."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    except Exception as error:  # the parser raises whatever its string handling runs into
        raise ValueError(f"not a Prometheus exposition: {error}") from error
    devices: dict[str, DeviceFrame] = {}
    for sample in samples:
        if sample.name == f"{PREFIX}gpu_info":
            labels = sample.labels
            uuid, index = labels.get("gpu_uuid", ""), labels.get("gpu_index", "")
            number = int(index) if index.isascii() and index.isdigit() else 0
            devices[uuid] = DeviceFrame(uuid, number, labels.get("gpu_model", ""), "", "", None, None, 0, None, ())
    down: list[str] = []
    closed = 0
    holders: dict[tuple[str, str], HolderFrame] = {}
    for sample in samples:
        name, uuid = sample.name.removeprefix(PREFIX), sample.labels.get("gpu_uuid", "")
        if name == "collector_success" and not sample.value:
            down.append(f"{sample.labels.get('collector', '')}: does not answer")
        elif name == "agent_intervals_closed_total" and abs(sample.value) < 1e18:
            closed = round(sample.value)
        elif uuid not in devices or not abs(sample.value) < 1e18:  # NaN is not less either
            continue
        elif name.startswith("pod_gpu_"):
            _add_holder(holders, name, uuid, sample)
        else:
            devices[uuid] = _with(devices[uuid], name, sample.value)
    frames = [
        replace(device, holders=tuple(h for (gpu, _), h in sorted(holders.items()) if gpu == device.uuid))
        for device in devices.values()
    ]
    frames.sort(key=lambda device: (device.index, device.uuid))
    return Frame(at_ms, tuple(frames), "; ".join(down), closed)


def _with(device: DeviceFrame, name: str, value: float) -> DeviceFrame:
    if name == "gpu_busy_seconds_total":
        return replace(device, busy_us=round(value * _MICRO))
    if name == "gpu_memory_used_bytes":
        return replace(device, memory_mib=round(value / _MIB))
    if name == "gpu_memory_total_bytes":
        return replace(device, memory_of_mib=round(value / _MIB))
    if name == "gpu_power_watts":
        return replace(device, power_mw=round(value * 1_000))
    if name in ("gpu_lost", "gpu_silent") and value:
        return replace(device, note=name.removeprefix("gpu_"))
    return device


def _add_holder(holders: dict[tuple[str, str], HolderFrame], name: str, uuid: str, sample: Sample) -> None:
    labels = sample.labels
    key = "|".join(labels.get(part, "") for part in ("mig_uuid", "namespace", "pod", "container"))
    called = "/".join(part for part in (labels.get("namespace", ""), labels.get("pod", "")) if part)
    holder = holders.get((uuid, key)) or HolderFrame(key, called, None, None, None)
    if name == "pod_gpu_busy_seconds_total":
        holder = replace(holder, busy_us=round(sample.value * _MICRO))
    elif name == "pod_gpu_memory_used_bytes":
        holder = replace(holder, memory_mib=round(sample.value / _MIB))
    elif name == "pod_gpu_share_ratio":
        holder = replace(holder, share=Fraction(round(sample.value * _MICRO), _MICRO))
    holders[uuid, key] = holder
