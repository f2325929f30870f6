"""Loads NVML, calls it with a time limit and translates its error codes; the only importer of pynvml.

The binding is imported only when the driver is first used, because the import takes time. A call that fails
raises one of four exceptions, and the caller decides only by the type:

- `NvmlRefused` concerns this call.
- `Lost` concerns this GPU.
- `Restart` concerns the whole library.
- `DriverReplaced` concerns the process.

Only the functions that start and stop the library, count the GPUs and open one raise the last three. An error of any
other function concerns that function: a broken power sensor may always answer "unknown error" on a GPU that works. If
the error code could also mean that the GPU or the library is lost, it is stored in `Driver.doubts`; the reader of that
GPU then finds out which.

Source of the codes: nvml.h (NVIDIA Management Library), nvmlReturn_t.

On a hung GPU a call blocks inside the kernel and cannot be interrupted. Calls therefore run on a worker thread. They
are grouped by what may hang together: a group for each GPU, one for starting and stopping the library, and one for its
events. If a call does not return in time, its thread is abandoned, further calls of its group are refused until it
returns, and a new worker serves the other groups. Normally one worker runs all calls of a reading, and no new thread is
needed. While a call of a group hangs, its thread may still write to the group's data. Two groups must therefore not
share data.

A driver may write larger structures than nvml.h of this binding describes; it then writes over the memory behind the
buffer. `_GuardedLibrary` therefore gives each function larger buffers than it asks for, and refuses the answer if the
driver used more than the declared size. The lists of processes are read with the size of entry that the driver uses,
because it is known to differ: drivers 535.43 to 535.86 write 32 bytes for an entry of 24, and one was reported that
writes 16. Source: XuehaiPan/nvitop, pull requests 79 and 226."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from agent.core.readings import DriverReplaced, Reading, Unavailable

_REASONS = {
    -1: "structure of unknown size", -2: "process list with impossible process numbers",
    0: "nothing to read", 1: "nvml uninitialized", 2: "invalid argument", 3: "not supported", 4: "no permission",
    6: "not found", 7: "insufficient size", 8: "insufficient power", 9: "driver not loaded", 10: "timeout",
    11: "interrupt issue", 12: "libnvidia-ml.so.1 not found", 13: "function not found", 15: "gpu is lost",
    16: "gpu needs a reset", 17: "operating system", 18: "driver replaced", 19: "in use", 21: "no data",
    27: "not ready", 28: "gpu not found", 29: "invalid state", 999: "unknown nvml error",
}  # fmt: skip
_REMEDIES = {
    "libnvidia-ml.so.1 not found": "the container has no driver library: set agent.runtimeClassName to the "
    "RuntimeClass of NVIDIA's runtime (kubectl get runtimeclass), or agent.driverHostPath if the driver is in a folder "
    "of the node; a node without a GPU needs no agent (agent.nodeSelector)",
    "driver not loaded": "the node's driver does not run: run nvidia-smi on the node, or read the log of the GPU "
    "Operator's driver pods",
    "no permission": "this program may not open the device files: set agent.runtimeClassName to NVIDIA's RuntimeClass, "
    "or agent.privileged: true",
    "driver replaced": "library and kernel module have different versions: restart this pod; if that does not help, "
    "restart the node",
}
"""Remedies by the reason why the library does not start."""
NO_GPUS_REMEDY = "on Bottlerocket set agent.privileged: true; elsewhere check whether nvidia-smi on the node shows GPUs"
"""Remedy if the driver answers and shows no GPU."""
_SUCCESS, _INVALID_ARGUMENT, _NOT_SUPPORTED, _NOT_FOUND, _FUNCTION_NOT_FOUND, _REPLACED = 0, 2, 3, 6, 13, 18
_NO_PERMISSION, _INSUFFICIENT_SIZE = 4, 7
_UNKNOWN_SIZE, _NOT_PROCESSES = -1, -2
"""Codes of our own for answers that cannot be read. NVML's codes are not negative."""
_EXPECTED, _MOST_PROCESSES = 32, 65_536
_FIRST_FIELDS, _LARGEST_ENTRY = 16, 64
_ENTRIES = {size: struct.Struct(f"=I4xQ{size - _FIRST_FIELDS}x") for size in (24, 32, 16, 40, 48, 56, _LARGEST_ENTRY)}
"""Forms of an entry in a list of processes by its size in bytes, the usual one first. Each begins with the process
number (32 bits) and, after 8 bytes, the memory (64 bits)."""
MOST_PID = 1 << 22
"""Largest process number of Linux."""
_PATTERN = b"\xa5"
"""Fills a buffer before a call. No figure of a driver ends with it: its highest byte would be 0 or 255."""
_NOT_REPORTED = 2**64 - 1
_LOST = frozenset({15, 16, 28})
_RESTART = frozenset({1, 999})
_WIDE_FUNCTIONS = frozenset({"nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"})
"""Functions whose failure concerns more than the call itself."""


def remedy(reason: str) -> str:
    """Return what to do if the driver does not start; "" if no remedy is known. reason: the text of an NvmlFault."""
    return _REMEDIES.get(reason.partition(" (")[0], "")


class NvmlFault(Exception):
    """A failed NVML call. `str()` is the reason and the function, in a few words that can be a label.

    code: the nvmlReturn_t."""

    def __init__(self, code: int, function: str) -> None:
        super().__init__(f"{_REASONS.get(code, 'nvml error')} ({function}, {code})")
        self.code = code


class NvmlRefused(NvmlFault):
    """The driver refused this call, for example because it is not supported or not permitted, or because it found
    nothing."""

    @property
    def missing(self) -> bool:
        """True if the library is too old to have the function."""
        return self.code == _FUNCTION_NOT_FOUND

    @property
    def unsupported(self) -> bool:
        """True if this GPU, in its present state, will never answer the call."""
        return self.code in (_NOT_SUPPORTED, _FUNCTION_NOT_FOUND)

    @property
    def denied(self) -> bool:
        """True if this process lacks the privilege for the call."""
        return self.code == _NO_PERMISSION

    @property
    def empty(self) -> bool:
        """True if the driver has nothing to report."""
        return self.code in (_SUCCESS, _NOT_FOUND)

    @property
    def nothing_there(self) -> bool:
        """True if the requested object does not exist."""
        return self.code in (_INVALID_ARGUMENT, _NOT_FOUND)


class Lost(NvmlFault):
    """This GPU is lost or needs a reset. Other GPUs may work."""


class Restart(NvmlFault):
    """The library must be shut down and started again."""


def _untouched(found: bytes) -> bool:
    """Return True if these bytes behind an answer are the pattern still."""
    return found == _PATTERN * len(found)


def _entries(found: bytes, count: int, room: int, name: str) -> dict[int, int | None]:
    """Decode a list of processes, whose entries have the size that the driver wrote, as `Driver.processes` returns it.
    Raises NvmlRefused if the size is unknown, if an entry is no process or if there are more than `room`, because then
    no entry can be trusted."""
    most = count * _LARGEST_ENTRY
    written = len(found[:most].rstrip(_PATTERN))
    size, more = divmod(written, count)
    if more or size not in _ENTRIES:  # the end of the last entry is like the pattern
        size = next((s for s in _ENTRIES if 0 <= written - (count - 1) * s - _FIRST_FIELDS <= s - _FIRST_FIELDS), 0)
    if count > room or not size or not _untouched(found[most:]):
        raise NvmlRefused(_UNKNOWN_SIZE, name)
    processes: dict[int, int | None] = {}
    for pid, memory in _ENTRIES[size].iter_unpack(found[: count * size]):
        if not 0 < pid <= MOST_PID:
            raise NvmlRefused(_NOT_PROCESSES, name)
        processes[pid] = None if memory == _NOT_REPORTED else memory
    return processes


class _GuardedLibrary:
    """The library, whose functions are `_GuardedFunction`."""

    def __init__(self, library: Any) -> None:
        self.unguarded = library

    def __getattr__(self, name: str) -> _GuardedFunction:
        return _GuardedFunction(getattr(self.unguarded, name), _LISTS.get(name))


_LISTS = {
    "nvmlDeviceGetSamples": (4, 5),
    "nvmlDeviceGetProcessUtilization": (2, 1),
    "nvmlDeviceGetAccountingPids": (1, 2),
}
"""Functions that fill an array, with the positions of the argument that counts the entries and of the array."""
_SPARE = 256
"""Bytes behind a guarded buffer, beside its own size once more."""
_ByReference = type(ctypes.byref(ctypes.c_int()))


class _GuardedFunction:
    """A function of the library that is called with larger buffers, so that it cannot write over other memory.

    A structure has one size, so structures and numbers have no guard once the function has succeeded since the library
    was started. An array always has one.

    list_at: as in `_LISTS`; None if the function fills no array."""

    def __init__(self, function: Any, list_at: tuple[int, int] | None) -> None:
        self._function = function
        self._list_at = list_at
        self._succeeded = False

    def __call__(self, *arguments: Any) -> int:
        count_at, list_at = self._list_at or (-1, -1)
        if self._succeeded and (list_at < 0 or arguments[list_at] is None):
            return self._function(*arguments)  # type: ignore[no-any-return]
        passed = list(arguments)
        targets: dict[int, Any] = {}
        for at in (list_at,) if self._succeeded else range(len(arguments)):
            if isinstance(arguments[at], (_ByReference, ctypes.Array)):
                targets[at] = target = getattr(arguments[at], "_obj", arguments[at])
                room = 2 * ctypes.sizeof(target) + _SPARE
                passed[at] = ctypes.create_string_buffer(_PATTERN * room, room)
                if at != list_at:
                    ctypes.memmove(passed[at], ctypes.byref(target), ctypes.sizeof(target))
        code = int(self._function(*passed))
        for at, target in targets.items():
            if at != list_at:
                ctypes.memmove(ctypes.byref(target), passed[at], ctypes.sizeof(target))
                if not _untouched(passed[at][ctypes.sizeof(target) :]):
                    return _UNKNOWN_SIZE
        if code == 0 and list_at in targets:
            listed = targets[list_at]
            declared = min(arguments[count_at]._obj.value, len(listed)) * ctypes.sizeof(listed._type_)
            if not _untouched(passed[list_at][declared:]):
                return _UNKNOWN_SIZE
            written = passed[list_at][:declared].rstrip(_PATTERN)
            ctypes.memmove(ctypes.byref(listed), written, len(written))
        self._succeeded = self._succeeded or code == 0
        return code


def _wide_fault(code: int, function: str) -> NvmlFault | DriverReplaced | None:
    """Return the exception for an error code that concerns the GPU, the library or the process; None for a code that
    concerns only the call."""
    if code == _REPLACED:
        return DriverReplaced("the NVIDIA driver was replaced; the agent must be started again")
    return Lost(code, function) if code in _LOST else Restart(code, function) if code in _RESTART else None


class Driver:
    """Calls NVML through pynvml. Only one thread at a time may use it.

    doubts: by error code, the exceptions that refused calls would raise if their error code concerned the GPU, the
        library or the process. The reader of the GPU clears it."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self.doubts: dict[int, NvmlFault | DriverReplaced] = {}

    def another(self) -> Driver:
        """Return a driver on the same library with `doubts` of its own, so that the errors of two readers do not
        mix."""
        return Driver()

    def call(self, name: str, *arguments: Any) -> Any:
        """Make one NVML call. Raises NvmlRefused, Lost, Restart, DriverReplaced."""
        nvml = self._binding()
        try:
            answer = getattr(nvml, name)(*arguments)
            if name == "nvmlInit":
                nvml.nvmlLib = _GuardedLibrary(getattr(nvml.nvmlLib, "unguarded", nvml.nvmlLib))
                nvml._nvmlGetFunctionPointer_cache.clear()
            return answer
        except nvml.NVMLError as error:
            raise self._fault(error.value, name) from error
        except nvml.NVMLLibraryMismatchError as error:  # how the binding reports a missing symbol
            raise NvmlRefused(_FUNCTION_NOT_FOUND, name) from error

    def figure(self, name: str, *arguments: Any, read: Callable[[Any], int] = int) -> Reading:
        """Return the number that a call gives; Unavailable if the driver refuses the call. read: converts the call's
        result to a number."""
        try:
            return read(self.call(name, *arguments))
        except NvmlRefused as fault:
            return Unavailable(str(fault))

    def constant(self, name: str) -> int:
        """Return a constant of nvml.h."""
        return int(getattr(self._binding(), name))

    def structure(self, name: str) -> Any:
        """Return an empty structure of nvml.h."""
        return getattr(self._binding(), name)()

    @staticmethod
    def fields(structures: Sequence[Any], *names: str) -> list[tuple[Any, ...]]:
        """Return these numeric fields of each structure; all are of one kind. The method bypasses the binding, which
        would check each field for text."""
        if not structures:
            return []
        kind = type(structures[0])
        return list(zip(*[map(getattr(kind, name).__get__, structures) for name in names], strict=True))

    def processes(self, name: str, handle: Any) -> dict[int, int | None]:
        """Return the bytes of memory of each process in a list of the driver, by process number; None if the driver
        does not report them.

        name: the function of the library that returns the list (`..._v3`).

        The method bypasses the binding, which creates an object for every process and takes ten times as long, and the
        guard, because its own buffer has room for entries of twice the largest size. Raises the exceptions of
        `call`."""
        library = self._binding().nvmlLib
        try:
            function = getattr(getattr(library, "unguarded", library), name)
        except AttributeError as error:
            raise NvmlRefused(_FUNCTION_NOT_FOUND, name) from error
        count = ctypes.c_uint(_EXPECTED)
        while True:
            room = count.value
            size = 2 * room * _LARGEST_ENTRY + _SPARE
            found = ctypes.create_string_buffer(_PATTERN * size, size)
            code = function(handle, ctypes.byref(count), found)
            if code == 0:
                return _entries(found.raw, count.value, room, name) if count.value else {}
            if code != _INSUFFICIENT_SIZE or room > _MOST_PROCESSES:
                raise self._fault(code, name)
            count.value = min(max(count.value, room), _MOST_PROCESSES) * 2  # further calls may begin meanwhile

    @staticmethod
    def address(handle: Any) -> int:
        """Return a number that identifies a handle. NVML always returns the same handle for the same GPU."""
        return ctypes.cast(handle, ctypes.c_void_p).value or 0

    def _fault(self, code: int, function: str) -> NvmlFault | DriverReplaced:
        more = _wide_fault(code, function)
        if more is None:
            return NvmlRefused(code, function)
        if function in _WIDE_FUNCTIONS:
            return more
        self.doubts[code] = more
        return NvmlRefused(code, function)

    def _binding(self) -> Any:
        if self._nvml is None:
            import pynvml

            self._nvml = pynvml
        return self._nvml


_Result = TypeVar("_Result")

IMPATIENCE = 5
"""Divisor of the time limit of other calls after the first one hangs, because a driver usually hangs as a whole."""


class CallHangs(Exception):
    """A call of a group has not returned in time."""


class CallWatchdog:
    """Runs calls with a time limit, for one caller at a time. Each call belongs to a group, which is a name. At most
    one thread per group hangs."""

    def __init__(self) -> None:
        self._worker: _Worker | None = None
        self._hung: dict[str, _Worker] = {}

    @property
    def stuck(self) -> tuple[str, ...]:
        """The groups with a call that has not returned."""
        for group in [group for group, worker in self._hung.items() if worker.ended]:
            del self._hung[group]
        return tuple(self._hung)

    def call(self, group: str, limit_s: float, action: Callable[[], _Result]) -> _Result:
        """Run `action` and return its result. Raises its exception, or CallHangs if it takes longer than `limit_s` or
        if a call of the group hangs already."""
        (outcome,) = self.run([(group, action)], limit_s)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def run(self, calls: Sequence[tuple[str, Callable[[], _Result]]], limit_s: float) -> list[_Result | Exception]:
        """Run calls, each with its group, and return one outcome per call, in order: its result, its exception, or
        CallHangs.

        limit_s: how long one call may take. A call that hangs is noticed after at most twice this time."""
        hung = self.stuck
        outcomes: list[_Result | Exception] = [CallHangs(group) for group, _ in calls]
        waiting = [number for number, (group, _) in enumerate(calls) if group not in hung]
        while waiting:
            worker = self._worker or _Worker()
            self._worker = worker
            done = worker.work(_Round([calls[number][1] for number in waiting]), limit_s)
            for number, outcome in zip(waiting, done, strict=False):
                outcomes[number] = outcome
            waiting = waiting[len(done) :]
            if waiting:
                self._hung[calls[waiting.pop(0)][0]] = worker
                self._worker = None
                limit_s /= IMPATIENCE
        return outcomes

    def close(self) -> None:
        """End the worker thread."""
        if self._worker is not None:
            self._worker.tasks.put(None)
            self._worker = None


class _Round(Generic[_Result]):
    """Calls that a worker runs one after the other.

    outcomes: the results and exceptions so far.
    given_up: True once the caller waits no longer; then the worker stops after the current call."""

    def __init__(self, actions: Sequence[Callable[[], _Result]]) -> None:
        self.actions = actions
        self.lock = threading.Lock()
        self.outcomes: list[_Result | Exception] = []
        self.given_up = False

    def run(self) -> bool:
        """Run the calls. Return False if the caller gave up before the last one returned."""
        for action in self.actions:
            outcome: _Result | Exception
            try:
                outcome = action()
            except Exception as error:  # noqa: BLE001 - the caller of the watchdog raises it
                outcome = error
            with self.lock:
                if self.given_up:
                    return False
                self.outcomes.append(outcome)
        return True


class _Worker:
    """A thread that runs calls. It is a daemon thread, so that it does not keep the process alive if it hangs."""

    def __init__(self) -> None:
        self.tasks: SimpleQueue[_Round[object] | None] = SimpleQueue()
        self._finished: SimpleQueue[None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="nvml", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def work(self, task: _Round[_Result], limit_s: float) -> list[_Result | Exception]:
        """Run the calls of `task`. Return all outcomes, or the outcomes so far if a call does not return in time."""
        self.tasks.put(task)  # type: ignore[arg-type]
        made = 0
        while True:
            try:
                self._finished.get(timeout=limit_s)
                return task.outcomes
            except Empty:
                with task.lock:
                    if len(task.outcomes) == made:
                        task.given_up = True
                        return list(task.outcomes)
                    made = len(task.outcomes)

    def _serve(self) -> None:
        while (task := self.tasks.get()) is not None and task.run():
            self._finished.put(None)
            del task
