"""Per-process busy time by the driver's accounting mode: every device sample is counted for one process.

Unlike the per-process sampler it forgets nothing between two readings, and it keeps a process a while after
its end (128 of them), so that one that lived between two readings is found as well. Version 2 gives running sums;
version 1 only says after a process ended how busy it was over its whole life, in whole percents: that is used
for those that were never seen alive and for nobody else.
Source: open-gpu-kernel-modules, gpu_acct.c: sumGpuUtil adds a sample's utilisation (hundredths of a percent)
to the process it names; ended processes are listed only where the agent shares the host's process numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from agent.model import Reading, Unavailable
from agent.nvml import Driver, Refused
from agent.units import MS_PER_MINUTE, MS_PER_SECOND, US_PER_MS

log = logging.getLogger("agent.driver.accounting")

SWEEP_MS = 5 * MS_PER_SECOND
"""How often ended processes are looked through: the driver forgets them by number, not by age."""
ASK_AGAIN_MS = MS_PER_MINUTE
"""How often an accounting mode that is off is asked for again: somebody may have switched it on."""
_OFF = Unavailable("accounting mode is off")
_ONLY_AT_THE_END = Unavailable("accounting: this driver tells only after the end")
_LEFT_NO_TRACE = Unavailable("accounting: ended processes are not shown to this agent")
_NO_PERIOD = Unavailable("accounting: the time between two samples is not known yet")
_COUNTS_FROM_HERE = Unavailable("accounting: counts from this reading on")
_FULL_SCALE = 10_000


@dataclass(slots=True)
class Accounted:
    """What accounting says of the time since the previous reading.

    times: busy microseconds per process; ended: those that were never seen alive."""

    times: dict[int, Reading] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)
    otherwise: Unavailable = _OFF
    """Of a process that is in neither."""


class Accounting:
    """One GPU's accounting. enable: switch it on where it is off; it stays on, for the whole host."""

    def __init__(self, driver: Driver, *, enable: bool = False) -> None:
        self._driver = driver
        self._enable = enable
        self._on = False
        self._version_2 = True
        self._asked_ms: int | None = None
        self._swept_ms: int | None = None
        self._sums: dict[int, tuple[int, int]] = {}
        """Per process its start and the sum already counted."""
        self._refused: set[int] = set()
        """The processes whose sums the driver refused when they were asked for last."""

    def forget(self) -> None:
        """The driver was let go: the mode may have changed, and what ran meanwhile is not ours to count."""
        self._on, self._version_2 = False, True
        self._asked_ms = None
        self.skip()

    def skip(self) -> None:
        """Who runs is not known: what was counted up to the next reading is nobody's."""
        self._swept_ms = None
        self._sums.clear()
        self._refused.clear()

    def read(
        self, handle: Any, at_ms: int, alive: Collection[int], gone: Collection[int], period_us: int | None
    ) -> Accounted:
        """alive, gone: processes running now, and those that ran at the previous reading but not now.
        period_us: time between two of the device's samples, where it is known."""
        if not self._is_on(handle, at_ms):
            return Accounted()
        found = Accounted(otherwise=_ONLY_AT_THE_END if not self._version_2 else _LEFT_NO_TRACE)
        first = self._swept_ms is None
        if self._version_2:
            for pid in (*alive, *gone):
                self._count(handle, pid, period_us, found.times, first)
        if first or at_ms - (self._swept_ms or 0) >= SWEEP_MS:
            self._swept_ms = at_ms
            self._sweep(handle, period_us, {*alive, *gone}, found, first)
        return found

    def _is_on(self, handle: Any, at_ms: int) -> bool:
        if not self._on and (self._asked_ms is None or at_ms - self._asked_ms >= ASK_AGAIN_MS):
            self._asked_ms = at_ms
            mode = self._driver.figure("nvmlDeviceGetAccountingMode", handle)
            if mode == 0 and self._enable:
                try:
                    self._driver.call("nvmlDeviceSetAccountingMode", handle, 1)
                    log.info("accounting mode was switched on")
                    mode = 1
                except Refused as fault:
                    log.warning("accounting mode cannot be switched on; the driver lets CAP_SYS_ADMIN do it",
                                extra={"reason": str(fault)})  # fmt: skip
                    self._enable = False
            self._on = mode == 1
        return self._on

    def _count(self, handle: Any, pid: int, period_us: int | None, times: dict[int, Reading], first: bool) -> None:
        try:
            stats = self._driver.call("nvmlDeviceGetAccountingStats_v2", handle, pid)
        except Refused as fault:
            if fault.missing and not self._sums:
                self._version_2 = False
            elif not fault.empty:
                self._refused.add(pid)
                times[pid] = Unavailable(str(fault))
            return
        start, total = int(stats.startTime), int(stats.sumGpuUtil)
        known = self._sums.get(pid)
        # The sum has grown over more than this step: it was refused, or this is the first reading.
        if pid in self._refused or (first and known is None):
            self._refused.discard(pid)
            self._sums[pid], times[pid] = (start, total), _COUNTS_FROM_HERE
            return
        # Another start is another process with the same number.
        before = known[1] if known is not None and known[0] == start else 0
        self._sums[pid] = start, total
        gained = max(total - before, 0)
        times[pid] = _NO_PERIOD if gained and period_us is None else gained * (period_us or 0) // _FULL_SCALE

    def _sweep(self, handle: Any, period_us: int | None, seen: set[int], found: Accounted, first: bool) -> None:
        """Those that began and ended between two readings."""
        try:
            listed = set(self._driver.call("nvmlDeviceGetAccountingPids", handle))
        except Refused as fault:
            self._on = not fault.unsupported  # MIG forces it off
            self.skip()
            return
        for pid in sorted(listed - seen):
            if self._version_2:
                times: dict[int, Reading] = {}
                self._count(handle, pid, period_us, times, first)
                busy = times.get(pid, 0)
                if isinstance(busy, int) and busy:
                    found.ended[pid] = busy
            else:
                self._whole_life(handle, pid, found, first)
        if not self._version_2:
            for pid in seen:  # seen alive: the sampler's figures are finer than whole percents of a life
                self._sums[pid] = 0, 0
        self._sums = {pid: known for pid, known in self._sums.items() if pid in listed or pid in seen}

    def _whole_life(self, handle: Any, pid: int, found: Accounted, first: bool) -> None:
        try:
            stats = self._driver.call("nvmlDeviceGetAccountingStats", handle, pid)
        except Refused:
            return
        if stats.isRunning or (pid in self._sums and self._sums[pid][0] in (0, int(stats.startTime))):
            return
        self._sums[pid] = int(stats.startTime), 0
        busy = int(stats.gpuUtilization) * int(stats.time) * US_PER_MS // 100
        if busy and not first:
            found.ended[pid] = busy
