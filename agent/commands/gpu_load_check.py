"""Runs `gputally agent smoke`: puts a known load on a GPU through CUDA and checks that the agent sees it.

It holds device memory and keeps the GPU busy through the CUDA driver, and reads NVML like the agent. Run in several
pods that share a GPU, it shows whether the agent assigns to each pod the memory that this pod allocated. It prints the
expected and the measured value of each check. A value that this process may not read is unknown and not a failure.

Metering does not use this module. Not thread-safe.

Source of the calls: cuda.h (CUDA driver API); the kernel is PTX, which the driver compiles for its GPU."""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from rich.console import Group, RenderableType

from agent.core.readings import (
    DeviceReading,
    DriverReplaced,
    InstanceReading,
    MigInstance,
    NodeSnapshot,
    ProcessReading,
    Reading,
    Source,
    Unavailable,
    sum_readings,
)
from agent.wire import Holder
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import Clock, SystemClock
from gputally.base.command_output import OUTPUTS, Output, show
from gputally.base.errors import AgentError
from gputally.base.terminal import table
from gputally.base.units import MS_PER_SECOND, US_PER_MS
from gputally.base.untrusted_text import for_terminal

LIBRARY = "libcuda.so.1"
_NO_DEVICE = 100
_THREADS = 64
"""Threads of a block; each multiprocessor runs one block."""
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
    """A CUDA device, which is used as a context manager: it holds a CUDA context until the end of the block. Every
    method raises NoCuda or CudaFault for a failed call.

    ordinal: the index among the devices that this process may use.
    library: the name or path of libcuda."""

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
        self._blocks = max(count.value, 1)

    def __enter__(self) -> Cuda:
        self._call("cuCtxCreate_v2", ctypes.byref(self._context), 0, self._device)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._context.value is not None:
            self._driver.cuCtxDestroy_v2(self._context)
            self._context = ctypes.c_void_p()

    def uuid(self) -> str:
        """Return the uuid of the GPU, or of the MIG instance if the process has one, without the prefix `GPU-` or
        `MIG-`."""
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
        """Queue work that keeps every multiprocessor busy for this time, and return at once."""
        if self._kernel.value is None:
            module = ctypes.c_void_p()
            self._call("cuModuleLoadData", ctypes.byref(module), _KERNEL)
            self._call("cuModuleGetFunction", ctypes.byref(self._kernel), module, b"spin")
        limit = ctypes.c_uint64(milliseconds * 1_000_000)
        parameters = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(limit), ctypes.c_void_p))
        grid = (self._blocks, 1, 1, _THREADS, 1, 1, 0)
        self._call("cuLaunchKernel", self._kernel, *grid, None, parameters, None)

    def finish(self) -> None:
        """Wait until all queued work is done."""
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
"""Lowest accepted busy time of an unshared device. It is below 100 % because the driver's samples begin and end a
little later than the load."""
_CHUNK_MS = 250  # a display's watchdog ends kernels that run for seconds
_SETTLE_MS = 1_000  # about how often the driver renews its readings
_SIZE = re.compile(r"(\d+)(MiB|GiB)")
_TIME = re.compile(r"(\d+)(ms|s|m)")
_SIZES = {"MiB": MIB, "GiB": 1024 * MIB}
_TIMES = {"ms": 1, "s": 1_000, "m": 60_000}

Verdict = Literal["ok", "FAILED", "unknown"]


@dataclass(frozen=True, slots=True)
class LoadCheck:
    """One check: its subject, the expected and the measured value, and whether they agree (`unknown` if the value may
    not be read)."""

    name: str
    expected: str
    seen: str
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class _View:
    """The part of a snapshot about this process and its device.

    device: None if the agent does not list the device.
    mig, instance: the MIG instance and its reading, if the process has one.
    process: None if the agent does not list this process.
    pids, holders: all processes and holders on the device or instance."""

    at_ms: int
    device: DeviceReading | None = None
    mig: MigInstance | None = None
    instance: InstanceReading | None = None
    process: ProcessReading | None = None
    pids: tuple[int, ...] = ()
    holders: tuple[Holder, ...] = ()


def size(text: str) -> int:
    """Parse a size above 0 such as `512MiB` or `2GiB`, and return the bytes. Raises ValueError."""
    match = _SIZE.fullmatch(text)
    if match is None or int(match[1]) == 0:
        raise ValueError(f"--memory: expected a size above 0 such as 512MiB or 2GiB, not {text!r}")
    return int(match[1]) * _SIZES[match[2]]


def duration_ms(text: str) -> int:
    """Parse a time such as `10s`, `500ms` or `2m`, and return the milliseconds. Raises ValueError."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"--busy: expected a time such as 10s, 500ms or 2m, not {text!r}")
    return int(match[1]) * _TIMES[match[2]]


def examine(
    cuda: Cuda, source: Source, clock: Clock, pid: int, holder: Holder | None, memory: int, busy_ms: int
) -> tuple[LoadCheck, ...]:
    """Put load on the GPU and check the agent's readings. Raises CudaFault.

    pid: this process.
    holder: the expected holder; None checks no holder.
    memory: bytes to allocate.
    busy_ms: how long to keep the GPU busy; 0 checks no busy time."""
    uuid = cuda.uuid()

    def look() -> _View:
        return _view(source.snapshot(clock.wall_ms()), uuid, pid)

    def pause(milliseconds: int) -> None:
        clock.wait(milliseconds / MS_PER_SECOND, threading.Event())

    pause(_SETTLE_MS)
    before = look()
    cuda.allocate(memory)
    pause(_SETTLE_MS)
    after = look()
    checks = [*_device(uuid, after), _pid(pid, after), _memory(memory, before, after)]
    if holder is not None:
        checks.append(_holder(holder, after))
    if busy_ms:
        checks.append(_busy([after, *_keep_busy(cuda, look, pause, busy_ms)]))
    return tuple(checks)


def _keep_busy(cuda: Cuda, look: Callable[[], _View], pause: Callable[[int], None], busy_ms: int) -> list[_View]:
    """Keep the GPU busy for `busy_ms`, read the agent's view several times, so that no driver sample is lost, and
    return the views."""
    spent = 0
    views: list[_View] = []
    while spent < busy_ms or not views:
        chunk = max(min(_CHUNK_MS, busy_ms - spent), 1)
        cuda.spin(chunk)
        pause(chunk)
        spent += chunk
        views.append(look())
    cuda.finish()
    return views


def _view(snapshot: NodeSnapshot, uuid: str, pid: int) -> _View:
    for device in snapshot.devices:
        mig = next((m for m in device.gpu.mig if _digits(m.uuid) == uuid), None)
        if mig is None and _digits(device.gpu.uuid) != uuid:
            continue
        place = mig.uuid if mig else ""
        instance = next((i for i in device.instances if i.mig_uuid == place), None)
        here = [p for p in device.processes if p.mig_uuid == place and p.running]
        process = next((p for p in here if p.pid == pid), None)
        holders = tuple(r.holder for r in device.holders if r.mig_uuid == place)
        return _View(snapshot.at_ms, device, mig, instance, process, tuple(p.pid for p in here), holders)
    return _View(snapshot.at_ms)


def _device(uuid: str, view: _View) -> list[LoadCheck]:
    """Check the device, and the MIG instance if the process has one."""
    if view.device is None:
        return [LoadCheck("device", uuid, "not listed by NVML", "FAILED")]
    gpu, mig = view.device.gpu, view.mig
    checks = [LoadCheck("device", uuid, f"GPU {gpu.index}, {gpu.model}", "ok")]
    return checks + ([LoadCheck("MIG instance", uuid, f"{mig.profile}, GPU instance {mig.gi}", "ok")] if mig else [])


def _pid(pid: int, view: _View) -> LoadCheck:
    if view.process is not None:
        return LoadCheck("process", str(pid), str(pid), "ok")
    return LoadCheck("process", str(pid), ", ".join(map(str, view.pids)) or "none", "FAILED")


def _memory(wanted: int, before: _View, after: _View) -> LoadCheck:
    """Check the memory that the process has gained since `before`. What its CUDA context uses does not count."""
    low, high = wanted // MIB, -(-wanted // (GRANULE_MIB * MIB)) * GRANULE_MIB + 1  # NVML's bytes are cut to MiB
    expected = f"{low} MiB more"
    had = before.process.memory_mib if before.process else Unavailable("process not seen")
    has = after.process.memory_mib if after.process else Unavailable("process not seen")
    if isinstance(has, Unavailable) or isinstance(had, Unavailable):
        reason = has if isinstance(has, Unavailable) else had
        hidden = after.process is not None and before.process is not None
        return LoadCheck("memory", expected, str(getattr(reason, "reason", reason)), "unknown" if hidden else "FAILED")
    more = has - had
    return LoadCheck("memory", expected, f"{more} MiB more", "ok" if low - 1 <= more <= high else "FAILED")


def _holder(expected: Holder, view: _View) -> LoadCheck:
    seen = ", ".join(_called(holder) for holder in view.holders) or "no holder"
    found = any((h.kind, h.uid) == (expected.kind, expected.uid) for h in view.holders)
    if found:
        return LoadCheck("holder", _called(expected), _called(expected), "ok")
    private = expected.kind != "process" and any(h.kind == "process" for h in view.holders)
    if private and view.process is not None:
        return LoadCheck(
            "holder", _called(expected), "a process: this container has a private cgroup namespace", "unknown"
        )
    return LoadCheck("holder", _called(expected), seen, "FAILED")


def _busy(views: Sequence[_View]) -> LoadCheck:
    """Check the busy time from the first view to the last: the device's if this process has the device alone, else the
    process's own, which may be any value above 0."""
    span_us = (views[-1].at_ms - views[0].at_ms) * US_PER_MS
    alone = all(len(view.pids) <= 1 for view in views)
    expected = f"{MIN_BUSY_PERCENT} % or more" if alone else "more than 0 %"
    busy_us = _busy_of_device(views[0], views[-1]) if alone else _busy_of_process(views[1:])
    if isinstance(busy_us, Unavailable):
        return LoadCheck("busy", expected, busy_us.reason, "unknown")
    percent = min(max(busy_us, 0) * 100 // max(span_us, 1), 100)
    enough = percent >= MIN_BUSY_PERCENT if alone else percent > 0
    return LoadCheck("busy", expected, f"{percent} %", "ok" if enough else "FAILED")


def _busy_of_process(views: Sequence[_View]) -> Reading:
    """Add up the busy times of the process. Each view has the time since the previous view."""
    return sum_readings(view.process.busy_us if view.process else Unavailable("process not seen") for view in views)


def _busy_of_device(before: _View, after: _View) -> Reading:
    first, last = _device_counter(before), _device_counter(after)
    if isinstance(first, Unavailable):
        return first
    return last if isinstance(last, Unavailable) else last - first


def _device_counter(view: _View) -> Reading:
    if view.device is None:
        return Unavailable("device not listed")
    if view.mig is None or view.instance is None:
        return view.device.busy_us
    if isinstance(view.instance.busy_us, Unavailable):
        return view.instance.busy_us
    return view.instance.busy_us * view.device.gpu.compute_slices // view.mig.compute


def _called(holder: Holder) -> str:
    name = holder.name or holder.uid
    return f"{holder.kind} {holder.namespace}/{name}" if holder.namespace else f"{holder.kind} {name}"


def _digits(uuid: str) -> str:
    return uuid.removeprefix("GPU-").removeprefix("MIG-")


def _table(checks: Sequence[LoadCheck]) -> RenderableType:
    """Return the checks as a table, followed by a line with the number of each verdict."""
    rows = [(check.name, check.expected, check.seen, check.verdict) for check in checks]
    counts = Counter(check.verdict for check in checks)
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("ok", "FAILED", "unknown") if counts[verdict])
    result = "FAILED" if counts["FAILED"] else "passed"
    return Group(table("", ("check", "expected", "seen", "result"), rows), f"{result}: {summary}")


def print_checks(checks: Sequence[LoadCheck], output: Output) -> None:
    show(output, lambda: _table(checks), [asdict(check) for check in checks])


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the arguments of `gputally agent smoke`."""
    parser = commands.add_parser(
        "smoke",
        help="put a known load on a GPU and check that the agent sees it",
        description="Hold GPU memory, keep the GPU busy, and check that the agent reads this load from NVML. "
        "Exit codes: 0 all values are as expected, 1 some value is not, 2 wrong call, 3 no GPU.",
    )
    parser.add_argument("--memory", default="512MiB", metavar="SIZE", help="GPU memory to hold (default 512MiB).")
    parser.add_argument(
        "--busy",
        default="0s",
        metavar="TIME",
        help="How long to keep the GPU busy (default 0s: busy time is not checked).",
    )
    parser.add_argument(
        "--device", type=int, default=0, metavar="N", help="Number of the GPU among the visible ones (default 0)."
    )
    parser.add_argument(
        "--pod-uid",
        default=os.environ.get("POD_UID", ""),
        metavar="UID",
        help="UID of the pod that the command runs in (default: the variable POD_UID, else the pod in the process's "
        "control group).",
    )
    parser.add_argument("--proc", default="/proc", help="Where the host's process table is mounted (default /proc).")
    parser.add_argument("--output", choices=OUTPUTS, default="table", help="Format of the output.")


def run(arguments: argparse.Namespace) -> int:
    """Run `gputally agent smoke` and return its exit code."""
    from agent.gpu_readers.chosen import open_readers
    from agent.gpu_readers.protocol import Surroundings
    from agent.holders.process_cgroups import ProcessTable
    from agent.node_reader import NodeSource

    try:
        memory, busy_ms = size(arguments.memory), duration_ms(arguments.busy)
    except ValueError as error:
        sys.stderr.write(for_terminal(f"gputally agent smoke: {error}\n"))
        return 2
    logging.basicConfig(level=logging.ERROR)
    processes = ProcessTable(Path(arguments.proc))
    clock = SystemClock()
    source = NodeSource(open_readers("nvml", Surroundings(clock, BackgroundTasks(clock))), processes)
    holder = processes.holder(os.getpid())
    if arguments.pod_uid:
        holder = Holder(kind="pod", uid=arguments.pod_uid)
    try:
        return report(Cuda(arguments.device), source, clock, holder, memory, busy_ms, arguments.output)
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
    """Put load on the GPU, print the checks, and return the exit code: 1 if a check failed, else 0. Raises NoCuda,
    CudaFault."""
    source.snapshot(clock.wall_ms())  # the first reading starts the counters
    with cuda:
        checks = examine(cuda, source, clock, os.getpid(), holder, memory, busy_ms)
    print_checks(checks, output)
    return FAIL if any(check.verdict == "FAILED" for check in checks) else PASS
