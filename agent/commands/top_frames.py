"""Computes one frame of the live table: GPUs, holders, and cost from a price file.

Figures only, no drawing. None is unknown and never zero. Pure; the exposition's parser may raise ValueError.

One price for everything, or a file:

    currency: USD
    per_hour:
      H100: 2.49
      H100 NVL: 2.29        # the entry with the most words of a GPU's name wins

A GPU that no entry names has no price: None, never 0. Nothing is guessed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from agent.core.errors import SettingsError
from agent.core.readings import DeviceReading, Reading, Snapshot, Unavailable
from agent.metering.busy_time_attribution import Layout, Share, lay_out
from agent.metrics.metric_families import PREFIX
from gputally.base import yaml_file

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


_WORD = re.compile(r"[A-Za-z0-9.]+")
_CURRENCY = re.compile(r"[A-Z]{3}")
_MOST = Decimal(10**6)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    per_hour: dict[str, int | float | str]
    currency: str = ""


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices per GPU-hour by words of the model's name; `everything` where one price holds for all."""

    currency: str = ""
    by_words: tuple[tuple[frozenset[str], Decimal], ...] = ()
    everything: Decimal | None = None

    def of(self, model: str) -> Decimal | None:
        """The price of a GPU of this model."""
        words = frozenset(_WORD.findall(model.lower()))
        best = max(
            (entry for entry in self.by_words if entry[0] <= words), key=lambda entry: len(entry[0]), default=None
        )
        return best[1] if best else self.everything


def price(text: str) -> Decimal:
    """A price as it was written. Raises ValueError."""
    try:
        value = Decimal(text.strip())
    except InvalidOperation as error:
        raise ValueError(f"not a price: {text!r}") from error
    if not value.is_finite() or not 0 <= value <= _MOST:
        raise ValueError(f"not a price: {text!r}")
    return value


def uniform_price(text: str) -> Prices:
    """The same price for every GPU. Raises SettingsError."""
    try:
        return Prices(everything=price(text))
    except ValueError as error:
        raise SettingsError(f"--price-per-hour: {error}") from error


def load(path: Path) -> Prices:
    """A price file. Raises FileFault with the line of the fault."""
    return parse(yaml_file.read(path))


def parse(document: yaml_file.Document) -> Prices:
    """Raises FileFault."""
    file = yaml_file.convert(document, _File)
    entries: dict[frozenset[str], Decimal] = {}
    faults: list[str] = []
    if file.currency and not _CURRENCY.fullmatch(file.currency):
        faults.append(f"{document.place(('currency',))}: currency: three capital letters, not {file.currency!r}")
    for name, value in file.per_hour.items():
        place = document.place(("per_hour", name))
        words = frozenset(_WORD.findall(name.lower()))
        if not words:
            faults.append(f"{place}: names no GPU: {name!r}")
        elif words in entries:
            faults.append(f"{place}: {name!r} names the same GPUs as an earlier entry")
        try:
            entries[words] = price(str(value))
        except ValueError as error:
            faults.append(f"{place}: {error}")
    if faults:
        raise yaml_file.FileFault(faults)
    return Prices(file.currency, tuple(entries.items()))
