"""Turns the utilization samples and the energy of a GPU into counters, and reads the busy time of its processes.

Busy time of a device: a driver keeps a short ring of samples (timestamp, percent) for 10 to 14 seconds. A gauge that
is read periodically misses most of the use. Here every sample represents the time since the previous sample. For
example, a sample of 50 % that is 200 ms after the previous one adds 100 ms. Missed samples are a gap, in which the
counter does not change. Between two calls of `BusyCounter.take` the counter grows by at most the time between them,
plus earlier time whose samples had not arrived yet.

Busy time of processes has two sources. The per-process sampler has one ring for all processes, whose entries are
overwritten. Accounting mode is exact if it is on. Both figures are returned, and agent.node_reader chooses
one of them.

A process is returned one more time in the reading after its end, so that its last use is counted. The driver lists
compute and graphics processes separately, and a process may be in both lists. If the driver refuses a list for the GPU
(or a MIG instance), its processes are unknown until the list can be read again. Of the sampler's error codes only
NVML_ERROR_NOT_FOUND means that no process was busy; any other one leaves the busy time unknown. This module does not
know the holder of a process.

Accounting mode loses nothing between two readings. It also keeps the last 128 ended processes, so a process that lived
only between two readings is found as well. nvmlDeviceGetAccountingStats_v2 gives running sums. The older
nvmlDeviceGetAccountingStats gives only the average utilisation of an ended process over its whole life, in whole
percents. It is used only for processes that were never seen alive. Source: open-gpu-kernel-modules, gpu_acct.c:
sumGpuUtil adds a sample's utilisation (hundredths of a percent) to the process it names. The driver lists ended
processes only if the agent runs in the host's PID namespace.

The two counters use integers only, and have neither a clock nor I/O. The energy counter starts again when the driver's
does."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import msgspec

from agent.core.readings import ProcessReading, Reading, Unavailable
from agent.gpu_readers.nvml.mig_layout import MigLayout
from agent.gpu_readers.nvml.nvml_library import MOST_PID, Driver, NvmlRefused
from gputally.base.apportionment import apportion
from gputally.base.units import MS_PER_MINUTE, MS_PER_SECOND, US_PER_MS

LATE_US = 3_000_000
"""How late the samples of a busy device may arrive. Source: open-gpu-kernel-modules, kernel_gsp.c: once a second."""
RATE_HOLDS_US = 5_000_000
"""Longest time between two readings that a utilisation rate may represent, if a driver keeps no samples."""
_PERIODS_BEFORE_GAP = 3
_FALLBACK_PERIOD_US = 1_000_000  # slowest sampling NVML documents; used until a period was seen
_PERCENT = 100


class BusyCounter:
    """The busy time of one device since it was first read. The driver's timestamps may have any origin.

    gaps: how often samples were missing before."""

    def __init__(self, *, gaps: int = 0) -> None:
        self.last_seen_us = 0
        """Newest timestamp that the driver returned, 0 before the first. The next call requests later samples."""
        self.gaps = gaps
        """How often samples were missing."""
        self.period_us: int | None = None
        """Time between two samples of the driver; None until it is known."""
        self._void: frozenset[int] = frozenset()
        """Timestamps later than `last_seen_us` that must not be counted again."""
        self._percent_us = 0
        self._reported_us = 0
        self._covered_us: int | None = None
        self._waiting_us = 0
        self._at_ms: int | None = None

    @property
    def value_us(self) -> int:
        """The last result of `take` in microseconds."""
        return self._reported_us

    def take(self, at_ms: int, samples: Sequence[tuple[int, int]] | None, rate: int) -> int:
        """Count the time since the last call and return the counter in microseconds.

        samples: (timestamp in microseconds, percent) newer than `last_seen_us`, in any order. Empty: the driver has no
            new samples. None: this driver keeps no samples.
        rate: percent at this moment. It distinguishes an idle device from late samples, and replaces the samples if the
            driver keeps none."""
        elapsed_us = 0 if self._at_ms is None else (at_ms - self._at_ms) * US_PER_MS
        limit_us = self._reported_us + elapsed_us + self._waiting_us
        if samples is None:
            self._by_rate(elapsed_us, rate)
        else:
            ordered = sorted(
                s for s in samples if 0 <= s[1] <= _PERCENT and s[0] > self.last_seen_us and s[0] not in self._void
            )
            if not ordered:
                self._without_samples(elapsed_us, rate)
            else:
                if self._at_ms is not None:
                    self._integrate(ordered, elapsed_us + self._waiting_us)
                self.last_seen_us = self._covered_us = ordered[-1][0]
                self._waiting_us = 0
        self._at_ms = at_ms
        # The newest sample may be a little older or younger than the last call. The part ahead of the call is counted
        # in the next one.
        self._reported_us = min(self._percent_us // _PERCENT, limit_us)
        return self._reported_us

    def lose(self, at_ms: int) -> None:
        """Record that the busy time since the last call is unknown. The next `take` counts from here."""
        self._at_ms, self._covered_us, self._waiting_us = at_ms, None, 0

    def start_over(self, at_ms: int, known: Iterable[int]) -> None:
        """Record that the clock of the samples was set back. The time since the last call is a gap, and the next `take`
        counts from here.

        known: the timestamps of all samples that the driver has now."""
        self.lose(at_ms)
        self._void, self.last_seen_us = frozenset(known), 0
        self.gaps += 1

    def _by_rate(self, elapsed_us: int, rate: int) -> None:
        if elapsed_us > RATE_HOLDS_US:
            self.gaps += 1
        else:
            self._percent_us += rate * elapsed_us

    def _without_samples(self, elapsed_us: int, rate: int) -> None:
        """Count a time without new samples. An idle device has none; the samples of a busy device are late or lost."""
        if not rate and not self._waiting_us:
            if self._covered_us is not None:
                self._covered_us += elapsed_us
            return
        self._waiting_us += elapsed_us
        if self._waiting_us > LATE_US:
            self.gaps += 1
            if self._covered_us is not None:
                self._covered_us += self._waiting_us
            self._waiting_us = 0

    def _integrate(self, ordered: Sequence[tuple[int, int]], elapsed_us: int) -> None:
        covered = self._covered_us
        if covered is None:  # idle since the first reading: older samples belong to the time before it
            covered = ordered[-1][0] - elapsed_us
        steps = [b[0] - a[0] for a, b in pairwise(ordered)]
        if steps:
            self.period_us = sorted(steps)[(len(steps) - 1) // 2]  # the lower median
        period_us = self.period_us or _FALLBACK_PERIOD_US
        missed = False
        for timestamp, percent in ordered:
            step = timestamp - covered
            if step <= 0:
                continue
            if step > _PERIODS_BEFORE_GAP * period_us:
                missed = True
                step = period_us
            self._percent_us += percent * step
            covered = timestamp
        self.gaps += missed


RANGE_MJ = 1 << 32
"""Where a counter of 32 bits wraps. NVML's type is wider, but its counter may have only 32 bits."""
MAX_POWER_MW = 4_000_000
"""More power than any GPU draws. A smaller figure counts as a wrap only if this power explains it."""
_SHORTEST_MS = 1_000
"""Shortest time that is assumed between two figures. The driver renews its figure periodically, so two figures read
shortly after each other may differ by the energy of a longer time."""
_MICROJOULES_PER_MILLIJOULE = 1_000


class EnergyCounter:
    """The energy of one device in microjoules, from NVML's counter of millijoules since the driver was loaded.

    value_uj: the energy since the driver was loaded; 0 before the first call of `take`."""

    def __init__(self) -> None:
        self.value_uj = 0
        self._last: tuple[int, int] | None = None

    def take(self, at_ms: int, millijoules: int) -> bool:
        """Update `value_uj` with a figure of the driver. Return False if the driver's counter, and so `value_uj`,
        started again."""
        before, self._last = self._last, (at_ms, millijoules)
        gained_mj = self._gained(before, at_ms, millijoules)
        if gained_mj is None:
            self.value_uj = millijoules * _MICROJOULES_PER_MILLIJOULE
            return before is None
        self.value_uj += gained_mj * _MICROJOULES_PER_MILLIJOULE
        return True

    @staticmethod
    def _gained(before: tuple[int, int] | None, at_ms: int, millijoules: int) -> int | None:
        if before is None:
            return None
        gained_mj = millijoules - before[1]
        if gained_mj < 0:
            gained_mj += RANGE_MJ
        plausible_uj = MAX_POWER_MW * max(at_ms - before[0], _SHORTEST_MS)  # mW x ms = uJ
        return gained_mj if 0 <= gained_mj * _MICROJOULES_PER_MILLIJOULE <= plausible_uj else None


log = logging.getLogger("agent.gpu_readers.nvml.utilization")

SWEEP_MS = 5 * MS_PER_SECOND
"""How often ended processes are listed. The driver keeps only a fixed number of them."""
ASK_AGAIN_MS = MS_PER_MINUTE
"""How often accounting mode is checked again while it is off, because it may have been switched on."""
_OFF = Unavailable("accounting mode is off")
_ONLY_AT_THE_END = Unavailable("accounting: this driver reports a process only after its end")
_LEFT_NO_TRACE = Unavailable("accounting: ended processes are not shown to this agent")
_NO_PERIOD = Unavailable("accounting: the time between two samples is not known yet")
_COUNTS_FROM_HERE = Unavailable("accounting: counts from this reading on")
_FULL_SCALE = 10_000


class Accounted(msgspec.Struct):
    """Busy microseconds from accounting mode since the previous reading, by process number.

    times: processes that run now or ran at the previous reading.
    ended: processes that began and ended between the two readings.
    otherwise: why the time of all other processes is unknown."""

    times: dict[int, Reading] = msgspec.field(default_factory=dict)
    ended: dict[int, int] = msgspec.field(default_factory=dict)
    otherwise: Unavailable = _OFF


class Accounting:
    """Reads accounting mode on one GPU.

    enable: True to switch the mode on if it is off. It then stays on for the whole host."""

    def __init__(self, driver: Driver, *, enable: bool = False) -> None:
        self._driver = driver
        self._enable = enable
        self._on = False
        self._version_2 = True
        self._asked_ms: int | None = None
        self._swept_ms: int | None = None
        self._sums: dict[int, tuple[int, int]] = {}
        """(start time, sum of utilisation that is counted already) of each process, by process number."""
        self._refused: set[int] = set()
        """Processes whose sums the driver refused at the last reading."""

    def forget(self) -> None:
        """Start again after the driver was closed, because the mode may have changed. The time since the last reading
        is not counted."""
        self._on, self._version_2 = False, True
        self._asked_ms = None
        self.skip()

    def skip(self) -> None:
        """Skip a reading in which the processes are unknown. Their busy time until the next reading is not counted."""
        self._swept_ms = None
        self._sums.clear()
        self._refused.clear()

    def read(
        self, handle: Any, at_ms: int, alive: Collection[int], gone: Collection[int], period_us: int | None
    ) -> Accounted:
        """Return the busy time of processes since the previous call.

        alive: processes that run now.
        gone: processes that ran at the previous reading but not now.
        period_us: time between two of the device's samples; None if unknown."""
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
                except NvmlRefused as fault:
                    log.warning("accounting mode cannot be switched on: this needs CAP_SYS_ADMIN",
                                extra={"reason": str(fault)})  # fmt: skip
                    self._enable = False
            self._on = mode == 1
        return self._on

    def _count(self, handle: Any, pid: int, period_us: int | None, times: dict[int, Reading], first: bool) -> None:
        try:
            stats = self._driver.call("nvmlDeviceGetAccountingStats_v2", handle, pid)
        except NvmlRefused as fault:
            if fault.missing and not self._sums:
                self._version_2 = False
            elif not fault.empty:
                self._refused.add(pid)
                times[pid] = Unavailable(str(fault))
            return
        start, total = int(stats.startTime), int(stats.sumGpuUtil)
        known = self._sums.get(pid)
        # The sum has grown over more than this step, because it was refused before or this is the first reading.
        if pid in self._refused or (first and known is None):
            self._refused.discard(pid)
            self._sums[pid], times[pid] = (start, total), _COUNTS_FROM_HERE
            return
        # A different start time means another process with the same number.
        before = known[1] if known is not None and known[0] == start else 0
        self._sums[pid] = start, total
        gained = max(total - before, 0)
        times[pid] = _NO_PERIOD if gained and period_us is None else gained * (period_us or 0) // _FULL_SCALE

    def _sweep(self, handle: Any, period_us: int | None, seen: set[int], found: Accounted, first: bool) -> None:
        """Find processes that began and ended between two readings."""
        try:
            listed = set(self._driver.call("nvmlDeviceGetAccountingPids", handle))
        except NvmlRefused as fault:
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
            for pid in seen:  # the sampler's figures are finer than percents
                self._sums[pid] = 0, 0
        self._sums = {pid: known for pid, known in self._sums.items() if pid in listed or pid in seen}

    def _whole_life(self, handle: Any, pid: int, found: Accounted, first: bool) -> None:
        try:
            stats = self._driver.call("nvmlDeviceGetAccountingStats", handle, pid)
        except NvmlRefused:
            return
        if stats.isRunning or (pid in self._sums and self._sums[pid][0] in (0, int(stats.startTime))):
            return
        self._sums[pid] = int(stats.startTime), 0
        busy = int(stats.gpuUtilization) * int(stats.time) * US_PER_MS // 100
        if busy and not first:
            found.ended[pid] = busy


_MIB = 1024 * 1024
_SAMPLERS = ("nvmlDeviceGetProcessUtilization", "nvmlDeviceGetProcessesUtilizationInfo")
"""The two functions that sample processes. The second is newer, and on some drivers the only one that answers."""
_SILENT_READINGS = 5
"""Number of readings in a row in which a busy device may have no busy process, before the other function is used."""
RING_MS = 15 * MS_PER_SECOND
"""Longest time that a driver keeps samples. Source: 71 samples in 14.2 s on an H200 with driver 580, others 10 s."""
_COMPUTE, _MPS = "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v3"
_GRAPHICS = "nvmlDeviceGetGraphicsRunningProcesses_v3"
_ASK_EVERY = 5
"""Number of readings after which an empty list of graphics processes or MPS clients is read again. It is also read when
a compute process starts or ends."""
_NO_MIG_RATE = Unavailable("MIG: no per-process utilisation")
_CLOCK_SET_BACK = Unavailable("the system clock was set back", refused=True)
_ENDED = Unavailable("ended")
_NOT_REPORTED = Unavailable("not reported")
_HIDDEN = "processes outside the agent's process namespace"


class Processes(msgspec.Struct, frozen=True):
    """The processes of one GPU. unlisted: as in `agent.core.readings.DeviceReading`."""

    readings: tuple[ProcessReading, ...] = ()
    unlisted: tuple[tuple[str, str], ...] = ()


class _Running(msgspec.Struct, frozen=True):
    """A running process. place: the uuid of its MIG instance; "" for the whole GPU."""

    place: str
    memory: Reading
    mps_client: bool
    graphics: bool


class ProcessSampler:
    """Reads the processes of one GPU and their busy times. enable_accounting: see `Accounting`."""

    def __init__(self, driver: Driver, uuid: str, *, enable_accounting: bool = False) -> None:
        self._driver = driver
        self._uuid = uuid
        self._accounting = Accounting(driver, enable=enable_accounting)
        self._alive: dict[int, str] = {}
        self._samplers = list(_SAMPLERS)
        self._no_rate = Unavailable("no per-process utilisation")
        self._answered = False
        """True if the sampler in use has answered once. A later refusal then does not mean that the GPU lacks it."""
        self._seen_us = 0
        self._at_ms: int | None = None
        self._unknown_until_ms = 0
        self._void: frozenset[tuple[int, int]] = frozenset()
        """(pid, timestamp) of the driver's samples from before the clock was set back."""
        self._silent = 0
        self._readings = -1
        self._filled: set[tuple[str, str]] = set()
        """(function, place) of the lists that are read every time, because they had processes or were refused."""
        self._answering: set[str] = set()
        """Places whose list of graphics processes could be read once. A later refusal does not mean that it is
        empty."""
        self._listed: dict[str, set[int]] = {}
        self._last_rates: dict[int, int] = {}
        """Busy microseconds by pid at the last reading."""
        self._unlisted: dict[str, str] = {}
        """Why the processes of a device could not be listed at the last reading, by MIG uuid."""
        self._unlisted_workers: set[int] = set()
        """Processes in the last samples that are in no list."""
        self._hidden = False

    def forget(self) -> None:
        """Start again after the driver was closed."""
        self._accounting.forget()
        self._alive.clear()
        self._filled.clear()
        self._answering.clear()
        self._listed.clear()
        self._readings = -1
        self._samplers, self._answered = list(_SAMPLERS), False
        self._seen_us, self._at_ms, self._silent = 0, None, 0
        self._last_rates, self._unlisted_workers, self._hidden = {}, set(), False

    def clock_set_back(self, handle: Any, at_ms: int) -> None:
        """Record that the clock of the samples was set back. Until the driver has overwritten its samples, old ones
        have later dates than new ones, and the busy times of processes are unknown."""
        listed: list[Any] = []
        if self._samplers:
            with suppress(NvmlRefused):
                listed = self._driver.call(self._samplers[0], handle, 0)
        self._void = frozenset(self._driver.fields(listed, "pid", "timeStamp"))
        self._seen_us, self._unknown_until_ms = 0, at_ms + RING_MS

    def read(
        self, handle: Any, mig: MigLayout, at_ms: int, *, period_us: int | None, since_us: int, device_busy_us: int
    ) -> Processes:
        """Return the processes of the GPU, or of its MIG instances.

        period_us: time between two samples of the device; None if unknown.
        since_us: timestamp of the newest device sample at the last reading, 0 if there was none. Older samples do not
            count, because a process that begins inherits the samples of one that ended (measured on an H200 with driver
            580).
        device_busy_us: busy time of the device since the last reading, 0 if unknown."""
        running: dict[int, _Running] = {}
        unlisted: dict[str, str] = {}
        self._readings += 1
        places = [(i.handle, i.facts.uuid) for i in mig.instances] if mig.enabled else [(handle, "")]
        for place, uuid in places:
            try:
                running.update(self._running(place, uuid))
            except NvmlRefused as fault:
                unlisted[uuid] = str(fault)
        self._log_unlisted(unlisted)
        self._seen_us = max(self._seen_us, since_us)
        expected = bool(running) and device_busy_us > 0
        rates = _NO_MIG_RATE if mig.enabled else self._rates(handle, at_ms, expected)
        if isinstance(rates, dict) and "" not in unlisted and self._finds_hidden(rates, running):
            unlisted[""] = _HIDDEN
        if "" in unlisted:  # the owners of these figures cannot be found later either
            self._accounting.skip()
            return Processes((), tuple(unlisted.items()))
        before = {pid: uuid for pid, uuid in self._alive.items() if uuid not in unlisted}
        gone = sorted(before.keys() - running.keys())
        accounted = self._accounting.read(handle, at_ms, sorted(running), gone, period_us)
        if isinstance(rates, dict):
            self._add_ended(rates, gone, device_busy_us)
        processes = {pid: (running[pid], True) for pid in sorted(running)}
        processes |= {pid: (_Running(before[pid], 0, False, False), False) for pid in gone}
        readings = []
        for pid, (one, runs) in processes.items():
            busy = rates if isinstance(rates, Unavailable) else rates.get(pid, 0)
            exact = accounted.times.get(pid, accounted.otherwise)
            readings.append(ProcessReading(pid, one.place, one.memory, busy, exact, runs, one.mps_client, one.graphics))
        for pid, exact in sorted(accounted.ended.items()):
            readings.append(ProcessReading(pid, "", _ENDED, _ENDED, exact, running=False))
        self._alive = {pid: uuid for pid, uuid in self._alive.items() if uuid in unlisted}
        self._alive.update({pid: one.place for pid, one in running.items()})
        return Processes(tuple(readings), tuple(unlisted.items()))

    def _log_unlisted(self, unlisted: dict[str, str]) -> None:
        """Log why the processes of a device cannot be listed, once for each new reason."""
        for mig_uuid, reason in unlisted.items() - self._unlisted.items():
            log.warning("the driver does not list the processes of a device: the busy time of its holders is unknown",
                        extra={"uuid": mig_uuid or self._uuid, "reason": reason})  # fmt: skip
        self._unlisted = dict(unlisted)

    def _add_ended(self, rates: dict[int, int], gone: Sequence[int], device_busy_us: int) -> None:
        """Add the busy times of processes that ended to `rates`. The driver does not report the samples of an ended
        process (measured on an H200 with driver 580), so these processes get the device's busy time that no other
        process has, in proportion to their last busy times."""
        unread = [pid for pid in gone if pid not in rates]
        rest_us = device_busy_us - sum(rates.values())
        last = [self._last_rates.get(pid, 0) for pid in unread]
        if rest_us > 0 and any(last):
            rates.update(zip(unread, apportion(rest_us, last), strict=True))
        self._last_rates = rates

    def _finds_hidden(self, rates: dict[int, int], running: dict[int, _Running]) -> bool:
        """Return True if busy processes are missing in the lists, because the agent is outside the host's process
        namespace.

        A process can begin between the call for the lists and the call for the samples, so a process counts as missing
        only at its second reading. The result stays True until all busy processes are listed again."""
        unlisted = {pid for pid in rates if pid <= MOST_PID and pid not in running and pid not in self._alive}
        if unlisted & self._unlisted_workers:
            if not self._hidden:
                log.warning("busy processes of a GPU are not listed: the agent needs the host's process namespace "
                            "(hostPID: true, docker run --pid=host)", extra={"uuid": self._uuid})  # fmt: skip
            self._hidden = True
        elif rates and not unlisted:
            self._hidden = False
        if rates:
            self._unlisted_workers = unlisted
        return self._hidden

    def _running(self, handle: Any, place: str) -> dict[int, _Running]:
        """Return the processes of a GPU or MIG instance by process number. Raises NvmlRefused if a list cannot be read.

        place: the uuid of the instance; "" for the whole GPU."""
        used = self._driver.processes(_COMPUTE, handle)
        pids = set(used)
        due = self._listed.get(place) != pids or self._readings % _ASK_EVERY == 0
        drawing = self._also(_GRAPHICS, handle, place, due, lacks=place not in self._answering)
        clients = self._also(_MPS, handle, place, due, lacks=(_MPS, place) not in self._filled)
        self._listed[place] = pids
        for pid, memory in (*drawing.items(), *clients.items()):  # each list reports all memory of a process
            known = used.get(pid)
            used[pid] = memory if known is None else max(known, memory or 0)
        return {
            pid: _Running(place, _NOT_REPORTED if memory is None else memory // _MIB, pid in clients, pid in drawing)
            for pid, memory in used.items()
        }

    def _also(self, name: str, handle: Any, place: str, due: bool, *, lacks: bool) -> dict[int, int | None]:
        """Return the processes in a list that is usually empty. Raises NvmlRefused if the list cannot be read.

        name: the function that returns the list.
        due: True to read a list again that was empty.
        lacks: True if the error "not supported" means that there are no such processes."""
        key = name, place
        if not due and key not in self._filled:
            return {}
        try:
            found = self._driver.processes(name, handle)
        except NvmlRefused as fault:
            if not (fault.empty or (fault.unsupported and lacks)):
                self._filled.add(key)  # it is read every time until it answers
                raise
            found = {}
        else:
            if name == _GRAPHICS:
                self._answering.add(place)
        (self._filled.add if found else self._filled.discard)(key)
        return found

    def _rates(self, handle: Any, at_ms: int, expected: bool) -> dict[int, int] | Unavailable:
        """Return busy microseconds since the previous reading by process number, from sampled percentages; Unavailable
        if the driver does not give them.

        A value above 100 is invalid and is left out. expected: True if a busy process must be among the samples."""
        if not self._samplers:
            return self._no_rate
        if at_ms <= self._unknown_until_ms:
            self._at_ms = at_ms
            return _CLOCK_SET_BACK
        elapsed_ms = 0 if self._at_ms is None else at_ms - self._at_ms
        listed = []
        try:
            listed = self._driver.call(self._samplers[0], handle, self._seen_us)
        except NvmlRefused as fault:
            if fault.unsupported and not self._answered:
                self._lack(str(fault))
                return self._rates(handle, at_ms, expected)
            if not fault.empty:
                self._at_ms = at_ms
                return Unavailable(str(fault), refused=True)
        self._answered = True
        found = self._driver.fields(listed, "pid", "timeStamp", "smUtil")
        if self._void:
            found = [each for each in found if each[:2] not in self._void]
        self._silent = self._silent + 1 if expected and not found else 0
        if self._silent > _SILENT_READINGS and len(self._samplers) > 1:
            self._lack("no process was seen at work")
        self._seen_us = max([self._seen_us, *(at_us for _, at_us, _ in found)])
        self._at_ms = at_ms
        return {pid: busy * elapsed_ms * US_PER_MS // _PERCENT for pid, _, busy in found if busy <= _PERCENT}

    def _lack(self, reason: str) -> None:
        """Use the next sampling function until the driver is closed. reason: why the present one is of no use."""
        lacking = self._samplers.pop(0)
        self._answered = False
        self._no_rate = Unavailable(f"no per-process utilisation: {reason}")
        log.warning(
            "the driver does not report how busy each process of a GPU is; the next method is tried",
            extra={"uuid": self._uuid, "function": lacking, "reason": reason, "methods_left": len(self._samplers)},
        )
