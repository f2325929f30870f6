"""Reads the activity of a GPU and of its MIG instances from NVML's GPM samples.

GPM returns the exact average between two samples, so no activity between two readings is missed. An engine is the GPU
or one of its instances. `Gpm` keeps two sample buffers per engine, and swaps them. It dates each sample separately,
because slow lookups can delay a sample after the reading has begun. It turns the percentages into counters of
microseconds that never decrease. GPM is NVML's only source of activity inside a MIG instance, and exists from Hopper
on. Source: nvml.h, nvmlGpmMetricsGet; two samples need at least 100 ms between them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from agent.core.readings import DriverReplaced, Unavailable
from agent.gpu_readers.nvml.nvml_library import Driver, NvmlFault, NvmlRefused
from gputally.base.clock import Clock
from gputally.base.units import US_PER_MS

MIN_SPAN_MS = 100
_GRAPHICS, _SM, _ANY_TENSOR = (
    "NVML_GPM_METRIC_GRAPHICS_UTIL",
    "NVML_GPM_METRIC_SM_UTIL",
    "NVML_GPM_METRIC_ANY_TENSOR_UTIL",
)
_METRICS = (_GRAPHICS, _SM, _ANY_TENSOR)
_UNSUPPORTED = Unavailable("no GPM on this GPU")
_SUCCESS = 0


class EngineActivity(msgspec.Struct, frozen=True, gc=False):
    """Cumulative activity of one engine in microseconds.

    busy_us: time in which the engine did any work. It is not smaller than sm_active_us, because an engine works while
        any of its multiprocessors works.
    sm_active_us, tensor_active_us: activity of the multiprocessors and of the tensor cores. It grows by 1,000,000 per
        second if all of them are busy, and by 500,000 if half of them are."""

    busy_us: int
    sm_active_us: int
    tensor_active_us: int

    def of_gpu(self, slices: int, of_slices: int) -> EngineActivity:
        """Convert the activity of a GPU instance to time of the whole GPU.

        slices, of_slices: the compute slices of the instance and of the GPU."""
        busy_us, sm_us, tensor_us = self.busy_us * slices, self.sm_active_us * slices, self.tensor_active_us * slices
        return EngineActivity(busy_us // of_slices, sm_us // of_slices, tensor_us // of_slices)


class _Engine:
    """Two sample buffers and the activity so far.

    last, spare: the buffer of the last sample, and the one for the next sample; None if they are not allocated.
    at_ms: time of the last sample; None before the first."""

    __slots__ = ("at_ms", "counted", "last", "spare")

    def __init__(self) -> None:
        self.last: Any = None
        self.spare: Any = None
        self.at_ms: int | None = None
        self.counted = EngineActivity(0, 0, 0)


class Gpm:
    """Reads the activity of the engines of one GPU. The name of an engine is "" for the GPU itself, or the uuid of a
    MIG instance.

    clock: dates the samples; None dates them with the time of the reading."""

    def __init__(self, driver: Driver, clock: Clock | None = None) -> None:
        self._driver = driver
        self._clock = clock
        self._engines: dict[str, _Engine] = {}
        self._query: Any = None
        self._metrics: Sequence[Any] = ()
        self._supported: bool | None = None
        self._unsupported = _UNSUPPORTED

    def read(self, handle: Any, at_ms: int, name: str = "", gi: int | None = None) -> EngineActivity | Unavailable:
        """Return an engine's activity since it was first read; Unavailable if the GPU does not give it.

        handle: the handle of the GPU.
        gi: the id of the GPU instance; None for the whole GPU.

        Raises Lost, Restart, DriverReplaced."""
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
        except NvmlRefused as fault:
            return Unavailable(f"GPM: {fault}", refused=not (fault.unsupported or fault.denied))
        engine.last, engine.spare, engine.at_ms = engine.spare, engine.last, sampled_ms
        return engine.counted

    def _now_ms(self, at_ms: int) -> int:
        return at_ms if self._clock is None else self._clock.monotonic_ms()

    def keep(self, names: set[str]) -> None:
        """Forget all engines but these, after a change of the MIG layout."""
        for name in self._engines.keys() - names:
            self._free(self._engines.pop(name))

    def close(self, *, forget: bool) -> None:
        """Release the buffers while the library is still loaded. forget: start again from zero at the next reading."""
        for engine in self._engines.values():
            self._free(engine)
        if forget:
            self._engines.clear()
        self._supported = None

    def _is_supported(self, handle: Any) -> bool:
        if self._supported is None:
            try:
                self._supported = bool(self._driver.call("nvmlGpmQueryDeviceSupport", handle).isSupportedDevice)
            except NvmlRefused as fault:
                if not fault.unsupported:
                    raise
                self._supported, self._unsupported = False, Unavailable(f"{_UNSUPPORTED.reason}: {fault}")
        return self._supported

    def _since(self, engine: _Engine, span_ms: int) -> EngineActivity:
        query = self._prepared(engine)
        self._driver.call("nvmlGpmMetricsGet", query)
        times = []
        for code, percent in self._driver.fields(self._metrics, "nvmlReturn", "value"):
            if code != _SUCCESS or not 0 <= percent <= 100.5:  # NaN fails both bounds
                raise NvmlRefused(code, "nvmlGpmMetricsGet")
            times.append(min(round(percent * 10 * span_ms), span_ms * US_PER_MS))
        graphics, sm, tensor = times
        past = engine.counted
        return EngineActivity(
            past.busy_us + max(graphics, sm), past.sm_active_us + sm, past.tensor_active_us + min(tensor, sm)
        )

    def _prepared(self, engine: _Engine) -> Any:
        if self._query is None:  # the structure has 19 KiB, so it is created once
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
            with suppress(NvmlFault, DriverReplaced):  # the library may be closed already, and the buffer with it
                self._driver.call("nvmlGpmSampleFree", sample)
