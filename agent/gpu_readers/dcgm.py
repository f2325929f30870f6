"""Reads figures that NVML does not give on a GPU from the dcgm-exporter on the same node.

These figures are, on GPUs older than Hopper, multiprocessor and tensor activity and the busy time of MIG instances. A
figure that NVML has given at least once never comes from the exporter, because the two counters have different origins.
A figure that NVML supports but refuses at the moment does not come from it either. The exporter's figures are averages
that it renews periodically (every 30 s by default). They are integrated over time like any gauge, and unknown once they
are too old. A separate thread fetches them. It limits the size and the time of a request, and pauses after repeated
failures.

The exporter's pod labels are ignored, because they name the holder at another moment. A device that several pods share
is listed several times. Some of these samples have the device's whole value and others only a part of it, so the
largest value is the device's.

Source of names and units: dcgm-exporter, etc/default-counters.csv; DCGM 4.6, dcgm_fields.h (renames)."""

from __future__ import annotations

import http.client
import logging
import math
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Literal

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from agent.core.lean_http_client import PAGE_TIMEOUT_S, page_reader
from agent.core.readings import DeviceReading, InstanceReading, Reading, Snapshot, Source, Unavailable
from gputally.base.background_tasks import BackgroundTask, BackgroundTasks, error_summary
from gputally.base.clock import Clock
from gputally.base.units import MS_PER_SECOND, US_PER_MS

Field = Literal["busy", "sm_active", "tensor_active"]
Place = tuple[str, int | None]
"""(GPU uuid, id of the GPU instance or None for the whole device)."""
Ratios = Mapping[Place, Mapping[Field, float]]
"""Ratios from 0 to 1 of the device or of the instance itself."""

_FIELDS: Mapping[str, Field] = {
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": "busy",
    "DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO": "busy",
    "DCGM_FI_DEV_GPU_UTIL": "busy",
    "DCGM_FI_DEV_GPU_UTIL_RATIO": "busy",
    "DCGM_FI_PROF_SM_ACTIVE": "sm_active",
    "DCGM_FI_PROF_SM_UTIL_RATIO": "sm_active",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "tensor_active",
    "DCGM_FI_PROF_TENSOR_UTIL_RATIO": "tensor_active",
}
_PERCENT_FIELDS = frozenset({"DCGM_FI_DEV_GPU_UTIL"})
_OVERSHOOT = 2.0
"""Highest plausible ratio. The ratio of an instance can read up to 1.3 (NVIDIA/DCGM issue 152); a larger value is a
percentage."""
_PERCENT = 100
_INSTANCE = re.compile(r"[0-9]{1,4}")


def read(text: str) -> Ratios:
    """Parse an exporter's metrics page, and leave out implausible samples. Raises ValueError if the text is no metrics
    page."""
    found: dict[Place, dict[Field, float]] = {}
    try:
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    except Exception as error:  # the parser raises the errors of its string functions
        raise ValueError(f"not a Prometheus exposition: {error}") from error
    for place, field, ratio in _ratios(samples):
        values = found.setdefault(place, {})
        values[field] = max(values.get(field, 0.0), ratio)
    return found


def _ratios(samples: Iterable[Sample]) -> Iterable[tuple[Place, Field, float]]:
    for sample in samples:
        field = _FIELDS.get(sample.name)
        uuid = sample.labels.get("UUID") or sample.labels.get("uuid")
        if field is None or not uuid:
            continue
        value = sample.value
        if not math.isfinite(value) or value < 0:
            continue
        percent = sample.name in _PERCENT_FIELDS or value > _OVERSHOOT
        ratio = value / _PERCENT if percent else value
        if ratio > _OVERSHOOT:  # one of DCGM's codes for "no value", which are huge numbers
            continue
        instance = sample.labels.get("GPU_I_ID", "")
        if not instance:
            yield (uuid, None), field, min(ratio, 1.0)
        elif _INSTANCE.fullmatch(instance):
            yield (uuid, int(instance)), field, min(ratio, 1.0)


log = logging.getLogger("agent.gpu_readers.dcgm")

PERIOD_MS = 10 * MS_PER_SECOND
PAUSE_MS = 30 * MS_PER_SECOND
FAILURES_BEFORE_PAUSE = 3
MAX_AGE_MS = 90 * MS_PER_SECOND
"""Three of the exporter's own default periods."""
_PPM = 1_000_000
_BOUNDS: tuple[Field, ...] = ("busy", "sm_active")

Fetch = Callable[[], str]
"""Scrapes the exporter once. Raises OSError, http.client.HTTPException or ValueError."""


def fetch_from(url: str) -> Fetch:
    """Return a function that scrapes an exporter. Raises SettingsError for an address that is not http://."""
    return page_reader(url, 80, "dcgm_url")


class Exporter:
    """The newest figures of one dcgm-exporter. `refresh` scrapes once, and `start` repeats it on a thread."""

    def __init__(self, fetch: Fetch, clock: Clock) -> None:
        self._fetch = fetch
        self._clock = clock
        self._lock = threading.Lock()
        self._ratios: Ratios = {}
        self._read_ms: int | None = None
        self._failure = "not read yet"
        self._took_ms = 0
        self._failures = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def refresh(self) -> int:
        """Scrape once. Return the milliseconds to wait before the next scrape."""
        began_ms = self._clock.monotonic_ms()
        try:
            ratios = read(self._fetch())
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._failures += 1
            failure = f"{type(error).__name__}: {error}"[:200]
            if self._failures == 1:
                log.warning("dcgm-exporter does not answer", extra={"reason": failure})
            with self._lock:
                self._failure = failure
            return PAUSE_MS if self._failures >= FAILURES_BEFORE_PAUSE else PERIOD_MS
        with self._lock:
            self._ratios, self._read_ms, self._failure = ratios, self._clock.monotonic_ms(), ""
            self._took_ms = self._read_ms - began_ms
        self._failures = 0
        return PERIOD_MS

    def latest(self) -> tuple[Ratios, str, int]:
        """Return the exporter's last figures (empty once they are too old), why the last scrape failed ("" if it
        succeeded), and the duration of the last successful scrape in milliseconds."""
        with self._lock:
            fresh = self._read_ms is not None and self._clock.monotonic_ms() - self._read_ms <= MAX_AGE_MS
            return (self._ratios if fresh else {}), self._failure, self._took_ms

    def start(self, tasks: BackgroundTasks) -> None:
        """Scrape on a thread until `close`."""
        self._thread = tasks.start("dcgm", self._run, self._stop, self._tell)

    def close(self) -> None:
        """Stop the thread. A scrape that has begun may still go on for a short time."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=PAGE_TIMEOUT_S)

    def _run(self, stop: threading.Event, task: BackgroundTask) -> None:
        while not stop.is_set():
            task.begin()
            pause_ms = self.refresh()
            task.succeed()
            self._clock.wait(pause_ms / MS_PER_SECOND, stop)

    def _tell(self, error: Exception) -> None:
        log.error("scraping dcgm-exporter failed and restarts", exc_info=error)
        with self._lock:
            self._failure = error_summary(error)


class WithDcgm:
    """An `agent.core.readings.Source` that adds the exporter's figures to the snapshots of another source."""

    def __init__(self, inner: Source, exporter: Exporter) -> None:
        self._inner = inner
        self._exporter = exporter
        self._sums: dict[tuple[Place, Field], int] = {}
        self._shown: set[tuple[Place, Field]] = set()
        """Figures that NVML has given at least once."""
        self._at_ms: int | None = None

    def snapshot(self, at_ms: int) -> Snapshot:
        """Take a snapshot. Raises the exceptions of the inner source."""
        snapshot = self._inner.snapshot(at_ms)
        ratios, failure, took_ms = self._exporter.latest()
        elapsed_us = 0 if self._at_ms is None else max(at_ms - self._at_ms, 0) * US_PER_MS
        self._at_ms = at_ms
        ratios = {place: _bounded(place, values) for place, values in ratios.items()}
        for place, values in ratios.items():
            for field, ratio in values.items():
                key = place, field
                self._sums[key] = self._sums.get(key, 0) + round(ratio * _PPM) * elapsed_us
        devices = tuple(self._filled(device, ratios) for device in snapshot.devices)
        sources, took = (*snapshot.sources, ("dcgm", failure)), (*snapshot.took_ms, ("dcgm", took_ms))
        return replace(snapshot, devices=devices, sources=sources, took_ms=took)

    def close(self) -> None:
        """Close the exporter and the inner source."""
        self._exporter.close()
        self._inner.close()

    def _filled(self, device: DeviceReading, ratios: Ratios) -> DeviceReading:
        gpu = device.gpu
        if device.health != "ok" or not any(uuid == gpu.uuid for uuid, _ in ratios):
            return device
        if not gpu.mig_enabled:
            place = gpu.uuid, None
            by_dcgm = self._is_missing(device.busy_us, place, "busy", ratios)
            return msgspec.structs.replace(
                device,
                busy_us=self._or(device.busy_us, place, "busy", ratios),
                sm_active_us=self._or(device.sm_active_us, place, "sm_active", ratios),
                tensor_active_us=self._or(device.tensor_active_us, place, "tensor_active", ratios),
                method="dcgm" if by_dcgm and device.method == "device" else device.method,
            )
        return msgspec.structs.replace(
            device, instances=tuple(self._instance(device, i, ratios) for i in device.instances)
        )

    def _instance(self, device: DeviceReading, instance: InstanceReading, ratios: Ratios) -> InstanceReading:
        """Return the reading of an instance with the figures that NVML lacks. If a GPU instance has several compute
        instances, the exporter has only one figure for all of them, which is not used."""
        gpu = device.gpu
        mig = next((m for m in gpu.mig if m.uuid == instance.mig_uuid), None)
        if mig is None or sum(m.gi == mig.gi for m in gpu.mig) > 1:
            return instance
        place = gpu.uuid, mig.gi
        part = mig.compute, gpu.compute_slices
        filled = instance
        if self._is_missing(instance.busy_us, place, "busy", ratios):
            filled = msgspec.structs.replace(instance, busy_us=self._sum(place, "busy", *part), method="dcgm")
        return msgspec.structs.replace(
            filled,
            sm_active_us=self._or(instance.sm_active_us, place, "sm_active", ratios, *part),
            tensor_active_us=self._or(instance.tensor_active_us, place, "tensor_active", ratios, *part),
        )

    def _or(self, known: Reading, place: Place, field: Field, ratios: Ratios, compute: int = 1, of: int = 1) -> Reading:
        return self._sum(place, field, compute, of) if self._is_missing(known, place, field, ratios) else known

    def _is_missing(self, known: Reading, place: Place, field: Field, ratios: Ratios) -> bool:
        """Return True if NVML has never given the figure and the exporter has it. A figure that NVML supports and
        refuses stays unknown, because the exporter uses the same driver and may repeat an old value."""
        if isinstance(known, Unavailable):
            if known.refused:
                return False
        else:
            self._shown.add((place, field))
        return (place, field) not in self._shown and field in ratios.get(place, {})

    def _sum(self, place: Place, field: Field, compute: int, of: int) -> int:
        return self._sums[place, field] * compute // (_PPM * of)


def _bounded(place: Place, values: Mapping[Field, float]) -> Mapping[Field, float]:
    """Return the ratios of a device or an instance, with a corrected busy ratio for a MIG instance.

    DCGM's busy ratio of an instance never exceeds 1/slices (NVIDIA/DCGM issue 138). The ratio of active multiprocessors
    is also a lower bound of the true ratio, so the larger of the known ones becomes the busy ratio."""
    known = [values[field] for field in _BOUNDS if field in values]
    return {**values, "busy": max(known)} if place[1] is not None and known else values
