"""Runs `gputally agent smoke`: puts a known load on a GPU through CUDA and checks that the agent sees it.

It holds device memory and keeps the GPU busy through the CUDA driver, and reads NVML like the agent. Run in several
pods that share a GPU, it shows whether the agent assigns to each pod the memory that this pod allocated. It prints the
expected and the measured value of each check. A value that this process may not read is unknown and not a failure. Exit
codes: 0 all values are as expected, 1 some value is not, 2 wrong call, 3 no GPU.

The driver's library is loaded on first use. Metering does not use this module. Not thread-safe.

Source of the calls: cuda.h (CUDA driver API); the kernel is PTX, which the driver compiles for its GPU."""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol

from agent.core.readings import (
    DeviceReading,
    InstanceReading,
    ProcessReading,
    Reading,
    Snapshot,
    Source,
    Unavailable,
    sum_readings,
)
from agent.devices.nvml_library import DriverReplaced
from agent.wire import Holder
from gputally.base.clock import Clock, SystemClock
from gputally.base.command_output import OUTPUTS, Output, show
from gputally.base.errors import AgentError
from gputally.base.units import MS_PER_SECOND, US_PER_MS
from gputally.base.untrusted_text import for_terminal

LIBRARY = "libcuda.so.1"
_NO_DEVICE = 100
_BLOCKS_PER_MULTIPROCESSOR, _THREADS = 1, 64
_MULTIPROCESSORS = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT

# Every thread reads the GPU's nanosecond clock until its time is over. Runs on any GPU since Maxwell.
_KERNEL = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry spin(.param .u64 nanoseconds)
{
    .reg .pred %again;
    .reg .b64 %limit, %start, %now, %spent;
    ld.param.u64 %limit, [nanoseconds];
    mov.u64 %start, %globaltimer;
loop:
    mov.u64 %now, %globaltimer;
    sub.u64 %spent, %now, %start;
    setp.lt.u64 %again, %spent, %limit;
    @%again bra loop;
    ret;
}
\0"""


class CudaFault(AgentError):
    """A call of the CUDA driver failed."""


class NoCuda(CudaFault):
    """There is no CUDA driver, or no GPU that this process may use."""


class Cuda:
    """A CUDA device, used as a context manager that holds a CUDA context. Raises NoCuda, CudaFault.

    ordinal: the index among the devices that this process may use. library: path of libcuda, if not the system's."""

    def __init__(self, ordinal: int = 0, library: str = LIBRARY) -> None:
        try:
            self._driver = ctypes.CDLL(library)
        except OSError as error:
            raise NoCuda(f"{library} cannot be loaded: {error}") from error
        self._context = ctypes.c_void_p()
        self._memory = ctypes.c_uint64()
        self._kernel = ctypes.c_void_p()
        self._device = ctypes.c_int()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(self._device), ordinal)
        count = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(count), _MULTIPROCESSORS, self._device)
        self._blocks = max(count.value, 1) * _BLOCKS_PER_MULTIPROCESSOR

    def __enter__(self) -> Cuda:
        self._call("cuCtxCreate_v2", ctypes.byref(self._context), 0, self._device)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._context.value is not None:
            self._driver.cuCtxDestroy_v2(self._context)
            self._context = ctypes.c_void_p()

    def uuid(self) -> str:
        """Return `8-4-4-4-12` hex digits of the GPU, or of the MIG instance if the process was given one."""
        raw = (ctypes.c_ubyte * 16)()
        self._call("cuDeviceGetUuid_v2", raw, self._device)
        digits = bytes(raw).hex()
        return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))

    def allocate(self, size: int) -> None:
        """Allocate `size` bytes of device memory and write to them. They stay allocated until the context ends."""
        self._call("cuMemAlloc_v2", ctypes.byref(self._memory), ctypes.c_size_t(size))
        self._call("cuMemsetD8_v2", self._memory, ctypes.c_ubyte(0xA5), ctypes.c_size_t(size))
        self._call("cuCtxSynchronize")

    def spin(self, milliseconds: int) -> None:
        """Start work that keeps every multiprocessor busy for that long, after earlier work. Return at once."""
        if self._kernel.value is None:
            module = ctypes.c_void_p()
            self._call("cuModuleLoadData", ctypes.byref(module), _KERNEL)
            self._call("cuModuleGetFunction", ctypes.byref(self._kernel), module, b"spin")
        limit = ctypes.c_uint64(milliseconds * 1_000_000)
        parameters = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(limit), ctypes.c_void_p))
        grid = (self._blocks, 1, 1, _THREADS, 1, 1, 0)
        self._call("cuLaunchKernel", self._kernel, *grid, None, parameters, None)

    def finish(self) -> None:
        """Wait for all started work."""
        self._call("cuCtxSynchronize")

    def _call(self, name: str, *arguments: object) -> None:
        try:
            function = getattr(self._driver, name)
        except AttributeError as error:
            raise CudaFault(f"{name}: the CUDA driver has no such function") from error
        code = function(*arguments)
        if code == _NO_DEVICE:
            raise NoCuda("no GPU that this process may use")
        if code:
            raise CudaFault(f"{name}: {self._reason(code)}")

    def _reason(self, code: int) -> str:
        text = ctypes.c_char_p()
        self._driver.cuGetErrorString(code, ctypes.byref(text))
        return text.value.decode("ascii", "replace") if text.value else f"CUDA error {code}"


PASS, FAIL, NO_GPU = 0, 1, 3
MIB = 1024 * 1024
GRANULE_MIB = 2
"""Unit in which the driver allocates memory."""
MIN_BUSY_PERCENT = 80
"""Lowest accepted busy part of an unshared device; the sampler sees the start and end a little late."""
_CHUNK_MS = 250  # a display's watchdog ends kernels that run for seconds
_SETTLE_MS = 1_000  # about how often the driver renews its readings
_SIZE = re.compile(r"(\d+)(MiB|GiB)")
_TIME = re.compile(r"(\d+)(ms|s|m)")
_SIZES = {"MiB": MIB, "GiB": 1024 * MIB}
_TIMES = {"ms": 1, "s": 1_000, "m": 60_000}

Verdict = Literal["ok", "FAILED", "unknown"]


@dataclass(frozen=True, slots=True)
class Check:
    """One check of the test."""

    name: str
    expected: str
    seen: str
    verdict: Verdict


class Load(Protocol):
    """Puts load on a GPU. `Cuda` is the implementation."""

    def uuid(self) -> str: ...

    def allocate(self, size: int) -> None: ...

    def spin(self, milliseconds: int) -> None: ...

    def finish(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _View:
    """The part of a snapshot about this process and its device."""

    at_ms: int
    device: DeviceReading | None
    instance: InstanceReading | None
    process: ProcessReading | None
    pids: tuple[int, ...]
    holders: tuple[Holder, ...]


def size(text: str) -> int:
    """Return the bytes of a text such as `512MiB` or `2GiB`. Raises ValueError."""
    match = _SIZE.fullmatch(text)
    if match is None or int(match[1]) == 0:
        raise ValueError(f"expected a size like 512MiB or 2GiB, got {text!r}")
    return int(match[1]) * _SIZES[match[2]]


def duration_ms(text: str) -> int:
    """Return the milliseconds of a text such as `10s`, `500ms` or `2m`. Raises ValueError."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"expected a time like 10s, 500ms or 2m, got {text!r}")
    return int(match[1]) * _TIMES[match[2]]


def examine(
    load: Load, source: Source, clock: Clock, pid: int, holder: Holder | None, memory: int, busy_ms: int
) -> tuple[Check, ...]:
    """Put the load on the GPU and check the agent's readings. holder: the holder of this process, None if unknown.

    Raises CudaFault."""
    uuid = load.uuid()

    def look() -> _View:
        return _view(source.snapshot(clock.wall_ms()), uuid, pid)

    def pause(milliseconds: int) -> None:
        clock.wait(milliseconds / MS_PER_SECOND, threading.Event())

    pause(_SETTLE_MS)
    before = look()
    load.allocate(memory)
    pause(_SETTLE_MS)
    after = look()
    checks = [_device(uuid, after), *_mig(uuid, after), _pid(pid, after), _memory(memory, before, after)]
    if holder is not None:
        checks.append(_holder(holder, after))
    if busy_ms:
        checks.append(_busy([after, *_keep_busy(load, look, pause, busy_ms)]))
    return tuple(checks)


def _keep_busy(load: Load, look: Callable[[], _View], pause: Callable[[int], None], busy_ms: int) -> list[_View]:
    """Keep the GPU busy for that long and return the views taken meanwhile, so that no driver sample is lost."""
    spent = 0
    views: list[_View] = []
    while spent < busy_ms or not views:
        chunk = max(min(_CHUNK_MS, busy_ms - spent), 1)
        load.spin(chunk)
        pause(chunk)
        spent += chunk
        views.append(look())
    load.finish()
    return views


def _view(snapshot: Snapshot, uuid: str, pid: int) -> _View:
    for device in snapshot.devices:
        mig = next((m for m in device.gpu.mig if _digits(m.uuid) == uuid), None)
        if mig is None and _digits(device.gpu.uuid) != uuid:
            continue
        place = mig.uuid if mig else ""
        instance = next((i for i in device.instances if i.mig_uuid == place), None)
        here = [p for p in device.processes if p.mig_uuid == place and p.running]
        process = next((p for p in here if p.pid == pid), None)
        holders = tuple(r.holder for r in device.holders if r.mig_uuid == place)
        return _View(snapshot.at_ms, device, instance, process, tuple(p.pid for p in here), holders)
    return _View(snapshot.at_ms, None, None, None, (), ())


def _device(uuid: str, view: _View) -> Check:
    if view.device is None:
        return Check("device", uuid, "not listed by NVML", "FAILED")
    gpu = view.device.gpu
    return Check("device", uuid, f"GPU {gpu.index}, {gpu.model}", "ok")


def _mig(uuid: str, view: _View) -> tuple[Check, ...]:
    """Check the MIG instance, if the process was given one."""
    if view.device is None or view.instance is None:
        return ()
    mig = next(m for m in view.device.gpu.mig if m.uuid == view.instance.mig_uuid)
    return (Check("MIG instance", uuid, f"{mig.profile}, GPU instance {mig.gi}", "ok"),)


def _pid(pid: int, view: _View) -> Check:
    if view.process is not None:
        return Check("process", str(pid), str(pid), "ok")
    return Check("process", str(pid), ", ".join(map(str, view.pids)) or "none", "FAILED")


def _memory(wanted: int, before: _View, after: _View) -> Check:
    """Check the process's additional memory since `before`, so that its context does not count."""
    low, high = wanted // MIB, -(-wanted // (GRANULE_MIB * MIB)) * GRANULE_MIB + 1  # NVML's bytes are cut to MiB
    expected = f"{low} MiB more"
    had = before.process.memory_mib if before.process else Unavailable("process not seen")
    has = after.process.memory_mib if after.process else Unavailable("process not seen")
    if isinstance(has, Unavailable) or isinstance(had, Unavailable):
        reason = has if isinstance(has, Unavailable) else had
        hidden = after.process is not None and before.process is not None
        return Check("memory", expected, str(getattr(reason, "reason", reason)), "unknown" if hidden else "FAILED")
    more = has - had
    return Check("memory", expected, f"{more} MiB more", "ok" if low - 1 <= more <= high else "FAILED")


def _holder(expected: Holder, view: _View) -> Check:
    seen = ", ".join(_called(holder) for holder in view.holders) or "no holder"
    found = any((h.kind, h.uid) == (expected.kind, expected.uid) for h in view.holders)
    if found:
        return Check("holder", _called(expected), _called(expected), "ok")
    private = expected.kind != "process" and any(h.kind == "process" for h in view.holders)
    if private and view.process is not None:
        return Check("holder", _called(expected), "a process: this container has a private cgroup namespace", "unknown")
    return Check("holder", _called(expected), seen, "FAILED")


def _busy(views: Sequence[_View]) -> Check:
    """Check busy time from the first view to the last. On an unshared device it is the device's busy time; on a shared
    one the process's own, which may be any value above 0."""
    span_us = (views[-1].at_ms - views[0].at_ms) * US_PER_MS
    alone = all(len(view.pids) <= 1 for view in views)
    expected = f"{MIN_BUSY_PERCENT} % or more" if alone else "more than 0 %"
    busy_us = _busy_of_device(views[0], views[-1]) if alone else _busy_of_process(views[1:])
    if isinstance(busy_us, Unavailable):
        return Check("busy", expected, busy_us.reason, "unknown")
    percent = min(max(busy_us, 0) * 100 // max(span_us, 1), 100)
    enough = percent >= MIN_BUSY_PERCENT if alone else percent > 0
    return Check("busy", expected, f"{percent} %", "ok" if enough else "FAILED")


def _busy_of_process(views: Sequence[_View]) -> Reading:
    """Return the sum of the process's busy times. Each view has only the time since the previous view."""
    return sum_readings(view.process.busy_us if view.process else Unavailable("process not seen") for view in views)


def _busy_of_device(before: _View, after: _View) -> Reading:
    first, last = _device_counter(before), _device_counter(after)
    if isinstance(first, Unavailable):
        return first
    return last if isinstance(last, Unavailable) else last - first


def _device_counter(view: _View) -> Reading:
    if view.device is None:
        return Unavailable("device not listed")
    if view.instance is None:
        return view.device.busy_us
    if isinstance(view.instance.busy_us, Unavailable):
        return view.instance.busy_us
    mig = next(m for m in view.device.gpu.mig if m.uuid == view.instance.mig_uuid)
    return view.instance.busy_us * view.device.gpu.compute_slices // mig.compute


def _called(holder: Holder) -> str:
    name = holder.name or holder.uid
    return f"{holder.kind} {holder.namespace}/{name}" if holder.namespace else f"{holder.kind} {name}"


def _digits(uuid: str) -> str:
    return uuid.removeprefix("GPU-").removeprefix("MIG-")


def table(checks: Sequence[Check]) -> str:
    """Return the checks as an aligned table, followed by a summary line."""
    head = Check("CHECK", "EXPECTED", "SEEN", "ok")
    widths = [max(len(getattr(check, column)) for check in (head, *checks)) for column in ("name", "expected", "seen")]
    lines = []
    for check in (head, *checks):
        verdict = "RESULT" if check is head else check.verdict
        cells = (check.name, check.expected, check.seen)
        lines.append("  ".join([*(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)), verdict]))
    counts = {verdict: sum(check.verdict == verdict for check in checks) for verdict in ("ok", "FAILED", "unknown")}
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    return "\n".join([*lines, "", f"{'FAILED' if counts['FAILED'] else 'passed'}: {summary}"])


def print_checks(checks: Sequence[Check], output: Output) -> None:
    """Print the checks. The table needs no library, because the agent's image has none."""
    if output == "table":
        sys.stdout.write(table(checks) + "\n")
    else:
        show(output, lambda: "", [asdict(check) for check in checks])


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the arguments of `gputally agent smoke`."""
    parser = commands.add_parser(
        "smoke",
        help="make a known load and check that it is seen",
        description="Hold GPU memory, keep the GPU busy, and check that the agent's reading of NVML shows it. "
        "Exit code 0: it does; 1: it does not; 2: wrong call; 3: no GPU.",
    )
    parser.add_argument("--memory", default="512MiB", metavar="SIZE", help="Memory to hold (default 512MiB).")
    parser.add_argument("--busy", default="0s", metavar="TIME", help="Keep the GPU busy that long (default: not).")
    parser.add_argument("--device", type=int, default=0, metavar="N", help="Which of the visible GPUs (default 0).")
    parser.add_argument(
        "--pod-uid",
        default=os.environ.get("POD_UID", ""),
        metavar="UID",
        help="The pod this runs in; default: the variable POD_UID, else what the control group says.",
    )
    parser.add_argument("--proc", default="/proc", help="The process table (default /proc).")
    parser.add_argument("--output", choices=OUTPUTS, default="table", help="How to print the checks.")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from agent.devices.driver_lifecycle import Gpus
    from agent.devices.nvml_library import Driver
    from agent.holders.node_reader import NodeSource
    from agent.holders.process_cgroups import ProcessTable

    try:
        memory, busy_ms = size(arguments.memory), duration_ms(arguments.busy)
    except ValueError as error:
        sys.stderr.write(for_terminal(f"gputally agent smoke: {error}\n"))
        return 2
    logging.basicConfig(level=logging.ERROR)
    processes = ProcessTable(Path(arguments.proc))
    source = NodeSource(Gpus(Driver()), processes)
    holder = processes.holder(os.getpid())
    if arguments.pod_uid:
        holder = Holder(kind="pod", uid=arguments.pod_uid)
    try:
        return report(Cuda(arguments.device), source, SystemClock(), holder, memory, busy_ms, arguments.output)
    except NoCuda as error:
        sys.stderr.write(for_terminal(f"gputally agent smoke: {error}\n"))
        return NO_GPU
    except (CudaFault, DriverReplaced) as error:
        sys.stderr.write(for_terminal(f"gputally agent smoke: {error}\n"))
        return FAIL
    finally:
        source.close()


def report(
    cuda: Cuda, source: Source, clock: Clock, holder: Holder | None, memory: int, busy_ms: int, output: Output = "table"
) -> int:
    """Run the test, print the checks, and return the exit code. Raises NoCuda, CudaFault."""
    source.snapshot(clock.wall_ms())  # so that the counters have begun before the load does
    with cuda:
        checks = examine(cuda, source, clock, os.getpid(), holder, memory, busy_ms)
    print_checks(checks, output)
    return FAIL if any(check.verdict == "FAILED" for check in checks) else PASS
