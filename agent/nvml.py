"""The driver's library: loading it, calling it, and what its errors mean. The only importer of pynvml.

The binding is imported when the driver is first asked, so that a machine without one pays nothing.
Every call raises one of four things, and the caller decides by the kind alone: `Refused` concerns this
call, `Lost` this GPU, `Restart` the whole library, `agent.errors.DriverReplaced` the process. Only the functions
that start the library, count the GPUs and open one raise the last three. What any other function answers is
its own refusal: a broken power sensor may answer "unknown error" for ever, on a GPU that works. Where its code
says more, it is kept in `Driver.doubts`, and the reader of that GPU confirms it.

Source of the codes: nvml.h (NVIDIA Management Library), nvmlReturn_t.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from agent.errors import DriverReplaced
from agent.model import Reading, Unavailable

_REASONS = {
    0: "nothing to read", 1: "nvml uninitialized", 2: "invalid argument", 3: "not supported", 4: "no permission",
    6: "not found", 7: "insufficient size", 8: "insufficient power", 9: "driver not loaded", 10: "timeout",
    11: "interrupt issue", 12: "libnvidia-ml.so.1 not found", 13: "function not found", 15: "gpu is lost",
    16: "gpu needs a reset", 17: "operating system", 18: "driver replaced", 19: "in use", 21: "no data",
    27: "not ready", 28: "gpu not found", 29: "invalid state", 999: "unknown nvml error",
}  # fmt: skip
_SUCCESS, _INVALID_ARGUMENT, _NOT_SUPPORTED, _NOT_FOUND, _FUNCTION_NOT_FOUND, _REPLACED = 0, 2, 3, 6, 13, 18
_NO_PERMISSION, _INSUFFICIENT_SIZE = 4, 7
_EXPECTED, _MOST_PROCESSES = 32, 65_536
_NOT_REPORTED = 2**64 - 1
_LOST = frozenset({15, 16, 28})
_RESTART = frozenset({1, 999})
_SPEAK_FOR_MORE = frozenset({"nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"})
"""The functions whose failure concerns more than their own answer."""


class Fault(Exception):
    """An NVML call failed. `code` is its nvmlReturn_t; `str()` is a reason fit for a label: it names the function."""

    def __init__(self, code: int, function: str) -> None:
        super().__init__(f"{_REASONS.get(code, 'nvml error')} ({function}, {code})")
        self.code = code


class Refused(Fault):
    """This call is not to be had here: unsupported, not permitted, nothing found."""

    @property
    def missing(self) -> bool:
        """Whether the library is older than the function."""
        return self.code == _FUNCTION_NOT_FOUND

    @property
    def unsupported(self) -> bool:
        """Whether this GPU, as it is now, will not answer it later either."""
        return self.code in (_NOT_SUPPORTED, _FUNCTION_NOT_FOUND)

    @property
    def denied(self) -> bool:
        """Whether this process lacks the privilege for it."""
        return self.code == _NO_PERMISSION

    @property
    def empty(self) -> bool:
        """Whether it is an answer: there is nothing to tell."""
        return self.code in (_SUCCESS, _NOT_FOUND)

    @property
    def nothing_there(self) -> bool:
        """Whether what was asked for does not exist."""
        return self.code in (_INVALID_ARGUMENT, _NOT_FOUND)


class Lost(Fault):
    """This GPU does not answer; the others may."""


class Restart(Fault):
    """The library must be shut down and started again."""


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("memory", ctypes.c_ulonglong),
        ("gi", ctypes.c_uint),
        ("ci", ctypes.c_uint),
    )


def _concerns_more(code: int, function: str) -> Fault | DriverReplaced | None:
    """What a code says about the GPU, the library or the process; None for one that concerns the call alone."""
    if code == _REPLACED:
        return DriverReplaced("the NVIDIA driver was replaced; the agent must be started again")
    return Lost(code, function) if code in _LOST else Restart(code, function) if code in _RESTART else None


class Driver:
    """NVML through the real binding. One thread at a time.

    doubts: what refusals said about more than their own call since `doubts` was last cleared, by code."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self.doubts: dict[int, Fault | DriverReplaced] = {}

    def another(self) -> Driver:
        """The same library, for a reader with doubts of its own."""
        return Driver()

    def call(self, name: str, *arguments: Any) -> Any:
        """One NVML call. Raises Refused, Lost, Restart, DriverReplaced."""
        nvml = self._binding()
        try:
            return getattr(nvml, name)(*arguments)
        except nvml.NVMLError as error:
            raise self._fault(error.value, name) from error
        except nvml.NVMLLibraryMismatchError as error:  # how the binding reports a missing symbol
            raise Refused(_FUNCTION_NOT_FOUND, name) from error

    def figure(self, name: str, *arguments: Any, read: Callable[[Any], int] = int) -> Reading:
        """One number, or why there is none."""
        try:
            return read(self.call(name, *arguments))
        except Refused as fault:
            return Unavailable(str(fault))

    def constant(self, name: str) -> int:
        """A constant of nvml.h."""
        return int(getattr(self._binding(), name))

    def structure(self, name: str) -> Any:
        """An empty structure of nvml.h."""
        return getattr(self._binding(), name)()

    @staticmethod
    def fields(structure: Any, *names: str) -> tuple[Any, ...]:
        """Numbers of a structure, past the binding's own access, which looks for text in every one of them."""
        kind = type(structure)
        return tuple([getattr(kind, name).__get__(structure) for name in names])

    def processes(self, name: str, handle: Any) -> list[tuple[int, int | None]]:
        """(pid, bytes of memory or None) of a list of processes. name: the function's in the library, version 3.

        Asked past the binding, which makes an object of every process at ten times the cost. Raises like `call`."""
        try:
            function = getattr(self._binding().nvmlLib, name)
        except AttributeError as error:
            raise Refused(_FUNCTION_NOT_FOUND, name) from error
        count = ctypes.c_uint(_EXPECTED)
        while True:
            room = count.value
            found = (_Process * room)()
            code = function(handle, ctypes.byref(count), found)
            if code == 0:
                return [(p.pid, None if p.memory == _NOT_REPORTED else p.memory) for p in found[: count.value]]
            if code != _INSUFFICIENT_SIZE or room > _MOST_PROCESSES:
                raise self._fault(code, name)
            count.value = max(count.value, room) * 2  # more may begin meanwhile

    @staticmethod
    def address(handle: Any) -> int:
        """What tells a handle from another: NVML hands out the same one for the same GPU."""
        return ctypes.cast(handle, ctypes.c_void_p).value or 0

    def _fault(self, code: int, function: str) -> Fault | DriverReplaced:
        more = _concerns_more(code, function)
        if more is None:
            return Refused(code, function)
        if function in _SPEAK_FOR_MORE:
            return more
        self.doubts[code] = more
        return Refused(code, function)

    def _binding(self) -> Any:
        if self._nvml is None:
            import pynvml

            self._nvml = pynvml
        return self._nvml
