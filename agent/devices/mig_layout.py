"""Lists the MIG instances of a GPU, notices when the layout changes, and reads the activity of each.

A lookup takes 50 to 100 ms on some machines, so the list is read when MIG is switched, when the driver reports a
change, soon after a caller named an instance that is not in it, and once a minute. A lookup that fails changes nothing
and is repeated: if an instance were removed by mistake, its holder would get the whole GPU. Instances are distinguished
by uuid in any form, because numbers are reused after a repartitioning. This module does not know what runs on them.

NVML's GPM samples of a GPU and of its MIG instances become activity as a part of the physical GPU. GPM returns the
exact average between two samples, so each engine keeps two and swaps them; nothing between two readings is missed.
Samples have times of their own, because a sample can be taken some time after its reading began, behind slow lookups.
GPM is the only source of activity inside a MIG instance, and exists from Hopper on. The percentages become counters of
microseconds that never decrease. Source: nvml.h, nvmlGpmMetricsGet; two samples need at least 100 ms between them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from agent.core.errors import DriverReplaced
from agent.core.readings import MigInstance, Unavailable
from agent.devices.nvml_library import Driver, Fault, Refused
from gputally.base.clock import Clock
from gputally.base.units import MS_PER_MINUTE, MS_PER_SECOND, US_PER_MS

RESCAN_MS = MS_PER_MINUTE
LOOK_MS = 10 * MS_PER_SECOND
"""Time until the next lookup if an instance is missing that may not exist."""
DEFAULT_SLICES = 7


@dataclass(frozen=True, slots=True)
class Instance:
    """One MIG device with its handle. gi_slices: compute slices of its GPU instance; alone: whether it is the only
    compute instance there, so that its activity is that of the GPU instance.
    """

    handle: Any
    facts: MigInstance
    gi_slices: int
    alone: bool


class MigLayout:
    """The MIG instances of one GPU."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._scanned_ms: int | None = None
        self.known = False
        """Whether a lookup has succeeded."""
        self.enabled = False
        self.slices = DEFAULT_SLICES
        self.instances: tuple[Instance, ...] = ()
        self.missed = False
        """Whether a caller named an instance that was not found since the last lookup."""

    @property
    def facts(self) -> tuple[MigInstance, ...]:
        return tuple(instance.facts for instance in self.instances)

    def void(self) -> None:
        """Drop the handles; the next reading looks them up again."""
        self.instances = ()
        self._scanned_ms = None

    def refresh(self, handle: Any, at_ms: int, *, changed: bool = False) -> bool:
        """Look up the layout if that is due; returns whether it was. A GPU that refuses to report its mode keeps the
        former layout. If it never reported one, it is not known to be whole, unless it does not support modes.
        """
        try:
            enabled = int(self._driver.call("nvmlDeviceGetMigMode", handle)[0]) == 1
        except Refused as fault:
            if not (self.known or fault.unsupported):
                return False
            enabled = self.enabled
        holds_ms = LOOK_MS if self.missed and enabled else RESCAN_MS
        due = changed or self._scanned_ms is None or at_ms - self._scanned_ms >= holds_ms
        if enabled == self.enabled and not due:
            return False
        try:
            count = self._driver.call("nvmlDeviceGetMaxMigDeviceCount", handle) if enabled else 0
            found = tuple(self._look_up(handle, count))
        except Refused:
            self._scanned_ms = None
            return False
        self._scanned_ms, self.missed = at_ms, False
        inside = Counter(instance.facts.gi for instance in found)
        self.known, self.enabled, self.slices = True, enabled, count or DEFAULT_SLICES
        self.instances = tuple(
            Instance(i.handle, i.facts, i.gi_slices, inside[i.facts.gi] == 1 and i.facts.compute == i.gi_slices)
            for i in found
        )
        return True

    def _look_up(self, parent: Any, count: int) -> Iterator[Instance]:
        """Yield the instances. Raises Refused if an instance exists and cannot be identified."""
        for index in range(count):
            try:
                handle = self._driver.call("nvmlDeviceGetMigDeviceHandleByIndex", parent, index)
            except Refused as fault:
                if fault.nothing_there:  # a hole in the numbering
                    continue
                raise
            attributes = self._driver.call("nvmlDeviceGetAttributes", handle)
            instance = MigInstance(
                uuid=str(self._driver.call("nvmlDeviceGetUUID", handle)),
                profile=_profile(str(self._driver.call("nvmlDeviceGetName", handle)), attributes),
                gi=self._driver.call("nvmlDeviceGetGpuInstanceId", handle),
                ci=self._driver.call("nvmlDeviceGetComputeInstanceId", handle),
                compute=attributes.computeInstanceSliceCount,
                memory_mib=attributes.memorySizeMB,
            )
            yield Instance(handle, instance, attributes.gpuInstanceSliceCount, alone=False)


def _profile(name: str, attributes: Any) -> str:
    """Return `1g.10gb` from the instance's name, or from its slices if the driver gives no name."""
    named = re.search(r"\bMIG (\S+)$", name)
    if named:
        return named.group(1)
    return f"{attributes.gpuInstanceSliceCount}g.{round(attributes.memorySizeMB / 1024)}gb"


MIN_SPAN_MS = 100
_GRAPHICS, _SM, _ANY_TENSOR = (
    "NVML_GPM_METRIC_GRAPHICS_UTIL",
    "NVML_GPM_METRIC_SM_UTIL",
    "NVML_GPM_METRIC_ANY_TENSOR_UTIL",
)
_METRICS = (_GRAPHICS, _SM, _ANY_TENSOR)
_UNSUPPORTED = Unavailable("no GPM on this GPU")
_SUCCESS = 0


@dataclass(frozen=True, slots=True)
class EngineActivity:
    """Cumulative microseconds of one engine: any work, multiprocessors working, tensor cores working.

    If all multiprocessors of a GPU are busy for a second, `sm_active_us` grows by 1,000,000, if half of them are busy,
    by 500,000. busy_us is not smaller, because an engine works while any of its multiprocessors works."""

    busy_us: int
    sm_active_us: int
    tensor_active_us: int


class _Engine:
    """Two sample buffers (None: not allocated) and the sums of their differences."""

    __slots__ = ("at_ms", "counted", "last", "spare")

    def __init__(self) -> None:
        self.last: Any = None
        self.spare: Any = None
        self.at_ms: int | None = None
        self.counted = EngineActivity(0, 0, 0)


class Gpm:
    """The engines of one GPU by name: "" for the GPU itself, or a MIG instance's uuid.

    clock: gives the samples their times (None: they have the reading's time)."""

    def __init__(self, driver: Driver, clock: Clock | None = None) -> None:
        self._driver = driver
        self._clock = clock
        self._engines: dict[str, _Engine] = {}
        self._query: Any = None
        self._metrics: Sequence[Any] = ()
        self._supported: bool | None = None
        self._unsupported = _UNSUPPORTED

    def read(self, handle: Any, at_ms: int, name: str = "", gi: int | None = None) -> EngineActivity | Unavailable:
        """Return an engine's activity since it was first read. handle: the GPU's; gi: the instance's, in MIG.

        Raises Lost, Restart, DriverReplaced.
        """
        try:
            if not self._is_supported(handle):
                return self._unsupported
            engine = self._engines.setdefault(name, _Engine())
            if engine.spare is None:
                engine.last = self._driver.call("nvmlGpmSampleAlloc")
                engine.spare = self._driver.call("nvmlGpmSampleAlloc")
            began_ms = self._now_ms(at_ms)
            if engine.at_ms is not None and began_ms - engine.at_ms < MIN_SPAN_MS:
                return engine.counted
            if gi is None:
                self._driver.call("nvmlGpmSampleGet", handle, engine.spare)
            else:
                self._driver.call("nvmlGpmMigSampleGet", handle, gi, engine.spare)
            sampled_ms = (began_ms + self._now_ms(at_ms)) // 2
            if engine.at_ms is not None:
                engine.counted = self._since(engine, sampled_ms - engine.at_ms)
        except Refused as fault:
            return Unavailable(f"GPM: {fault}", refused=not (fault.unsupported or fault.denied))
        engine.last, engine.spare, engine.at_ms = engine.spare, engine.last, sampled_ms
        return engine.counted

    def _now_ms(self, at_ms: int) -> int:
        return at_ms if self._clock is None else self._clock.monotonic_ms()

    def keep(self, names: set[str]) -> None:
        """Forget engines that no longer exist after a change of the MIG layout."""
        for name in self._engines.keys() - names:
            self._free(self._engines.pop(name))

    def close(self, *, forget: bool) -> None:
        """Release the buffers while the library is still loaded. forget: count from zero afterwards."""
        for engine in self._engines.values():
            self._free(engine)
        if forget:
            self._engines.clear()
        self._supported = None

    def _is_supported(self, handle: Any) -> bool:
        if self._supported is None:
            try:
                self._supported = bool(self._driver.call("nvmlGpmQueryDeviceSupport", handle).isSupportedDevice)
            except Refused as fault:
                if not fault.unsupported:
                    raise
                self._supported, self._unsupported = False, Unavailable(f"{_UNSUPPORTED.reason}: {fault}")
        return self._supported

    def _since(self, engine: _Engine, span_ms: int) -> EngineActivity:
        query = self._prepared(engine)
        self._driver.call("nvmlGpmMetricsGet", query)
        times = []
        for metric in self._metrics:
            code, percent = self._driver.fields(metric, "nvmlReturn", "value")
            if code != _SUCCESS or not 0 <= percent <= 100.5:  # NaN fails both bounds
                raise Refused(code, "nvmlGpmMetricsGet")
            times.append(min(round(percent * 10 * span_ms), span_ms * US_PER_MS))
        graphics, sm, tensor = times
        past = engine.counted
        return EngineActivity(
            past.busy_us + max(graphics, sm), past.sm_active_us + sm, past.tensor_active_us + min(tensor, sm)
        )

    def _prepared(self, engine: _Engine) -> Any:
        if self._query is None:  # 19 KiB: made once
            self._query = self._driver.structure("c_nvmlGpmMetricsGet_t")
            self._query.version = self._driver.constant("NVML_GPM_METRICS_GET_VERSION")
            self._query.numMetrics = len(_METRICS)
            for i, name in enumerate(_METRICS):
                self._query.metrics[i].metricId = self._driver.constant(name)
            self._metrics = self._query.metrics[: len(_METRICS)]
        self._query.sample1, self._query.sample2 = engine.last, engine.spare
        return self._query

    def _free(self, engine: _Engine) -> None:
        buffers = [sample for sample in (engine.last, engine.spare) if sample is not None]
        engine.last = engine.spare = engine.at_ms = None
        for sample in buffers:
            with suppress(Fault, DriverReplaced):  # the library may be gone, and the buffer with it
                self._driver.call("nvmlGpmSampleFree", sample)
