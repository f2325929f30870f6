"""As much of the CUDA driver as it takes to hold memory on a GPU and keep it busy, without any toolkit.

The driver's library is loaded when it is first asked for. Nothing here is used for metering: it makes the
load that `agent.smoke` then looks for with the agent's own eyes. One thread only.

Source of the calls: cuda.h (CUDA driver API); the kernel is PTX, which the driver compiles for its GPU.
"""

from __future__ import annotations

import ctypes
from types import TracebackType

from agent.errors import AgentError

LIBRARY = "libcuda.so.1"
_NO_DEVICE = 100
_BLOCKS_PER_MULTIPROCESSOR, _THREADS = 1, 64
_MULTIPROCESSORS = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT

# Every thread looks at the GPU's nanosecond clock until its time is over. Addressed for any GPU since Maxwell.
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
    """There is no CUDA driver here, or no GPU that this process may use."""


class Cuda:
    """One device with a context of its own; a context manager. Raises NoCuda, CudaFault.

    ordinal: of the devices this process may use. library: for another driver than the system's."""

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
        """`8-4-4-4-12` hex digits of the GPU or, where the process was given one, of the MIG instance."""
        raw = (ctypes.c_ubyte * 16)()
        self._call("cuDeviceGetUuid_v2", raw, self._device)
        digits = bytes(raw).hex()
        return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))

    def allocate(self, size: int) -> None:
        """Hold `size` bytes of device memory, written to, until the context ends."""
        self._call("cuMemAlloc_v2", ctypes.byref(self._memory), ctypes.c_size_t(size))
        self._call("cuMemsetD8_v2", self._memory, ctypes.c_ubyte(0xA5), ctypes.c_size_t(size))
        self._call("cuCtxSynchronize")

    def spin(self, milliseconds: int) -> None:
        """Keep every multiprocessor at work that long, after what was asked before; returns at once."""
        if self._kernel.value is None:
            module = ctypes.c_void_p()
            self._call("cuModuleLoadData", ctypes.byref(module), _KERNEL)
            self._call("cuModuleGetFunction", ctypes.byref(self._kernel), module, b"spin")
        limit = ctypes.c_uint64(milliseconds * 1_000_000)
        parameters = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(limit), ctypes.c_void_p))
        grid = (self._blocks, 1, 1, _THREADS, 1, 1, 0)
        self._call("cuLaunchKernel", self._kernel, *grid, None, parameters, None)

    def finish(self) -> None:
        """Wait for all that was asked."""
        self._call("cuCtxSynchronize")

    def _call(self, name: str, *arguments: object) -> None:
        try:
            function = getattr(self._driver, name)
        except AttributeError as error:
            raise CudaFault(f"{name}: this CUDA driver does not have it") from error
        code = function(*arguments)
        if code == _NO_DEVICE:
            raise NoCuda("no GPU that this process may use")
        if code:
            raise CudaFault(f"{name}: {self._reason(code)}")

    def _reason(self, code: int) -> str:
        text = ctypes.c_char_p()
        self._driver.cuGetErrorString(code, ctypes.byref(text))
        return text.value.decode("ascii", "replace") if text.value else f"CUDA error {code}"
