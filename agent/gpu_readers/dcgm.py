"""Reads figures that NVML does not give on a GPU from the dcgm-exporter on the same node.

These figures are, on GPUs older than Hopper, multiprocessor and tensor activity and the busy time of MIG instances. A
figure that NVML has given at least once, or refuses at the moment, never comes from the exporter
(`agent.gpu_readers.chosen`). The exporter's figures are averages that it renews periodically (every 30 s by default).
They are integrated over time like any gauge, and unknown once they are too old. A separate thread fetches them. It
limits the size and the time of a request, and pauses after repeated failures.

It also reads errors: XID errors, memory errors since the driver was loaded, and why clocks are slowed down. The
exporter has two series of XID errors. `DCGM_EXP_XID_ERRORS_COUNT` is the number of errors in a sliding window, whose
rises are counted. `DCGM_FI_DEV_XID_ERRORS` is the number of the last XID error and never goes back to 0, so a change is
one error, and the same error again is not seen. What a page has when it is first read happened at an unknown time and
is not counted.

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
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from agent.core.lean_http_client import PAGE_TIMEOUT_S, page_reader
from agent.core.readings import DeviceCondition, DeviceReading, Gpu, InstanceReading, Reading, Unavailable, XidCount
from agent.gpu_readers.protocol import GpuReaderPlugin, GpuReadings, Surroundings
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

ErrorField = Literal["last_xid", "ecc_corrected", "ecc_uncorrected", "throttle_reasons"]
_ERROR_FIELDS: Mapping[str, ErrorField] = {
    "DCGM_FI_DEV_XID_ERRORS": "last_xid",
    "DCGM_FI_DEV_XID_ERROR": "last_xid",
    "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL": "ecc_corrected",
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": "ecc_uncorrected",
    "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": "throttle_reasons",
    "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": "throttle_reasons",
}
"""Names in DCGM before and after their change. The bits of the reasons are NVML's."""
_XID_COUNT: Final = "DCGM_EXP_XID_ERRORS_COUNT"
_BLANK: Final = 0x7FFF_FFF0
"""The least of DCGM's codes for "no value"."""
_MOST_XIDS: Final = 64
_XID = re.compile(r"[1-9][0-9]{0,3}")


@dataclass(frozen=True, slots=True)
class GpuErrors:
    """What a page has of the errors of one GPU.

    values: the exporter's figures.
    xids: the number of errors by XID in the exporter's sliding window; None if it does not count them."""

    values: Mapping[ErrorField, int]
    xids: Mapping[int, int] | None


@dataclass(frozen=True, slots=True)
class ExporterPage:
    """The figures of an exporter's page, and the errors by the uuid of the GPU."""

    ratios: Ratios
    errors: Mapping[str, GpuErrors]


def read(text: str) -> ExporterPage:
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
    return ExporterPage(found, _errors(samples))


def _errors(samples: Iterable[Sample]) -> dict[str, GpuErrors]:
    values: dict[str, dict[ErrorField, int]] = defaultdict(dict)
    xids: dict[str, dict[int, int]] = {}
    for sample in samples:
        uuid = _uuid(sample)
        name = _ERROR_FIELDS.get(sample.name)
        if not uuid or not 0 <= sample.value < _BLANK or (name is None and sample.name != _XID_COUNT):
            continue
        value = int(sample.value)
        if name is not None:
            values[uuid][name] = max(values[uuid].get(name, 0), value)
            continue
        counts = xids.setdefault(uuid, {})  # a GPU without errors has one sample without a number
        if _XID.fullmatch(number := sample.labels.get("xid", "")):
            counts[int(number)] = max(counts.get(int(number), 0), value)
    return {uuid: GpuErrors(values.get(uuid, {}), xids.get(uuid)) for uuid in {*values, *xids}}


def _uuid(sample: Sample) -> str:
    return sample.labels.get("UUID") or sample.labels.get("uuid") or ""


def _ratios(samples: Iterable[Sample]) -> Iterable[tuple[Place, Field, float]]:
    for sample in samples:
        field = _FIELDS.get(sample.name)
        uuid = _uuid(sample)
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
    return page_reader(url, 80, "gpu_readers: dcgm")


class Exporter:
    """The newest figures of one dcgm-exporter. `refresh` scrapes once, and `start` repeats it on a thread."""

    def __init__(self, fetch: Fetch, clock: Clock) -> None:
        self._fetch = fetch
        self._clock = clock
        self._lock = threading.Lock()
        self._page: ExporterPage | None = None
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
            page = read(self._fetch())
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._failures += 1
            failure = f"{type(error).__name__}: {error}"[:200]
            if self._failures == 1:
                log.warning("dcgm-exporter does not answer", extra={"reason": failure})
            with self._lock:
                self._failure = failure
            return PAUSE_MS if self._failures >= FAILURES_BEFORE_PAUSE else PERIOD_MS
        with self._lock:
            self._page, self._read_ms, self._failure = page, self._clock.monotonic_ms(), ""
            self._took_ms = self._read_ms - began_ms
        self._failures = 0
        return PERIOD_MS

    def latest(self) -> tuple[ExporterPage | None, str, int]:
        """Return the exporter's last page (None once it is too old), why the last scrape failed ("" if it
        succeeded), and the duration of the last successful scrape in milliseconds."""
        with self._lock:
            fresh = self._read_ms is not None and self._clock.monotonic_ms() - self._read_ms <= MAX_AGE_MS
            return (self._page if fresh else None), self._failure, self._took_ms

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


class DcgmReader:
    """A `GpuReader` that fills: it integrates the exporter's figures, for the devices that other readers list."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self._sums: dict[tuple[Place, Field], int] = {}
        self._errors: dict[str, _ErrorCounts] = defaultdict(_ErrorCounts)
        self._at_ms: int | None = None

    def read(self, at_ms: int, before: Sequence[DeviceReading] = ()) -> GpuReadings:
        """Return the figures of the devices that the exporter knows."""
        page, failure, took_ms = self._exporter.latest()
        elapsed_us = 0 if self._at_ms is None else max(at_ms - self._at_ms, 0) * US_PER_MS
        self._at_ms = at_ms
        ratios = {place: _bounded(place, values) for place, values in (page.ratios.items() if page else ())}
        for place, values in ratios.items():
            for field, ratio in values.items():
                key = place, field
                self._sums[key] = self._sums.get(key, 0) + round(ratio * _PPM) * elapsed_us
        listed = {device.gpu.uuid for device in before}
        for uuid, errors in page.errors.items() if page is not None else ():
            if uuid in listed:
                self._errors[uuid].observe(errors, at_ms)
        known = {uuid for uuid, _ in ratios} | set(self._errors)
        devices = tuple(
            self._device(device.gpu, ratios, self._condition(device.gpu.uuid, page, failure))
            for device in before
            if device.gpu.uuid in known
        )
        return GpuReadings(devices, failure, took_ms=took_ms)

    def _condition(self, uuid: str, page: ExporterPage | None, failure: str) -> DeviceCondition:
        """Return the errors of a GPU. page: None if the exporter does not answer."""
        if page is None:
            return self._errors[uuid].condition(None, f"dcgm-exporter: {failure or 'its page is too old'}")
        return self._errors[uuid].condition(page.errors.get(uuid), "the dcgm-exporter does not export them")

    def close(self) -> None:
        """Close the exporter."""
        self._exporter.close()

    def _device(self, gpu: Gpu, ratios: Ratios, condition: DeviceCondition) -> DeviceReading:
        """Return the figures of a GPU, or of its instances. If a GPU instance has several compute instances, the
        exporter has only one figure for all of them, which is not used."""
        if not gpu.mig_enabled:
            values = self._values((gpu.uuid, None), ratios)
            return DeviceReading(gpu, **values, method="dcgm", condition=condition)
        alone = Counter(mig.gi for mig in gpu.mig)
        instances = tuple(
            InstanceReading(
                mig.uuid, **self._values((gpu.uuid, mig.gi), ratios, mig.compute, gpu.compute_slices), method="dcgm"
            )
            for mig in gpu.mig
            if alone[mig.gi] == 1
        )
        return DeviceReading(gpu, instances=instances, condition=condition)

    def _values(self, place: Place, ratios: Ratios, compute: int = 1, of: int = 1) -> dict[str, Any]:
        """Return the counters of a place that the exporter has at the moment."""
        return {f"{field}_us": self._sums[place, field] * compute // (_PPM * of) for field in ratios.get(place, {})}


class _ErrorCounts:
    """The XID errors of one GPU since the reader began."""

    def __init__(self) -> None:
        self._xids: dict[int, XidCount] = {}
        self._before: GpuErrors | None = None

    def observe(self, now: GpuErrors, at_ms: int) -> None:
        """Count what is new on a page. Reading the same page again changes nothing."""
        before, self._before = self._before, now
        if before is None:
            return
        last = now.values.get("last_xid", 0)
        if now.xids is not None:
            old = before.xids if before.xids is not None else now.xids
            for xid, number in now.xids.items():
                self._count(xid, number - old.get(xid, 0), at_ms)
        elif last and last != before.values.get("last_xid", last):
            self._count(last, 1, at_ms)

    def condition(self, now: GpuErrors | None, missing: str) -> DeviceCondition:
        """Return what is known of the GPU's errors. missing: why what the page does not have is unknown."""
        values = now.values if now is not None else {}
        unread = ""
        if now is None or (now.xids is None and "last_xid" not in values):
            unread = missing
        elif now.xids is None and values["last_xid"]:
            unread = "the dcgm-exporter has the last error alone, so the same one again is not seen"

        def value(name: ErrorField) -> Reading:
            return values[name] if name in values else Unavailable(missing)

        return DeviceCondition(
            throttle_reasons=value("throttle_reasons"),
            ecc_corrected=value("ecc_corrected"),
            ecc_uncorrected=value("ecc_uncorrected"),
            xids=tuple(count for _, count in sorted(self._xids.items())),
            xids_unread=unread,
        )

    def _count(self, xid: int, number: int, at_ms: int) -> None:
        if number > 0 and (xid in self._xids or len(self._xids) < _MOST_XIDS):
            known = self._xids[xid].count if xid in self._xids else 0
            self._xids[xid] = XidCount(xid, known + number, at_ms)


def _bounded(place: Place, values: Mapping[Field, float]) -> Mapping[Field, float]:
    """Return the ratios of a device or an instance, with a corrected busy ratio for a MIG instance.

    DCGM's busy ratio of an instance never exceeds 1/slices (NVIDIA/DCGM issue 138). The ratio of active multiprocessors
    is also a lower bound of the true ratio, so the larger of the known ones becomes the busy ratio."""
    known = [values[field] for field in _BOUNDS if field in values]
    return {**values, "busy": max(known)} if place[1] is not None and known else values


def _open(url: str, surroundings: Surroundings) -> DcgmReader:
    exporter = Exporter(fetch_from(url), surroundings.clock)
    exporter.start(surroundings.tasks)
    return DcgmReader(exporter)


READER: Final = GpuReaderPlugin(
    name="dcgm",
    place="the metrics page of this node's dcgm-exporter, http://HOST:9400/metrics",
    open=_open,
    fills=True,
    reaches="reads the page of a dcgm-exporter every 10 s",
    page="docs/from-dcgm-exporter.md",
)
