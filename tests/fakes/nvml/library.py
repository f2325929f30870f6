"""The fake NVML library: built with the machine's compiler, loaded into the real binding, controlled by commands."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCES = Path(__file__).parent
NAME = "libnvidia-ml.so.1"


class NoCompiler(Exception):
    """No C compiler is available."""


def build(folder: Path) -> Path:
    """Build the library in `folder`. Raises NoCompiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise NoCompiler("no C compiler: what needs the fake NVML library is left out")
    library = folder / NAME
    sources = sorted(str(source) for source in SOURCES.glob("*.c"))
    flags = ["-O1", "-shared", "-fPIC", "-Wl,-Bsymbolic", f"-Wl,-soname,{NAME}", "-pthread"]
    subprocess.run([compiler, *flags, "-o", str(library), *sources], check=True, capture_output=True)
    return library


class FakeNvml:
    """The machine that the library shows. `show` sets its whole state, `tell` changes it; language.c defines the
    commands."""

    def __init__(self, library: Path, state: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.fakeNvmlTruth.restype = ctypes.c_uint64
        self._state = state
        self._writes = 0

    def show(self, *lines: str) -> None:
        """Set the whole state of the machine."""
        self._state.write_text("\n".join(lines) + "\n")
        self._writes += 1  # the library looks at the time of change, which may be too coarse
        os.utime(self._state, ns=(self._writes, self._writes))

    def tell(self, *lines: str) -> None:
        """Change the machine's state now."""
        self.library.fakeNvmlTell("\n".join(lines).encode())

    def calls(self, function: str) -> int:
        """Return how often the function was called."""
        return int(self.library.fakeNvmlCalls(function.encode()))

    def truth_us(self, gpu: int, pid: int) -> int:
        """Return a process's true busy time in microseconds of the GPU or instance it runs on."""
        return int(self.library.fakeNvmlTruth(gpu, pid))


@contextmanager
def loaded(library: Path, folder: Path) -> Iterator[FakeNvml]:
    """Load the real binding on a new copy of the library, because each path is one instance of it."""
    import pynvml

    copy = folder / NAME
    shutil.copy(library, copy)
    before, state = pynvml.nvmlLib, os.environ.get("FAKE_NVML_STATE")
    os.environ["FAKE_NVML_STATE"] = str(folder / "gpus")
    fake = FakeNvml(copy, folder / "gpus")
    pynvml.nvmlLib = fake.library
    pynvml._nvmlGetFunctionPointer_cache.clear()
    try:
        yield fake
    finally:
        fake.tell("clear")
        pynvml.nvmlLib = before
        pynvml._nvmlGetFunctionPointer_cache.clear()
        if state is None:
            os.environ.pop("FAKE_NVML_STATE", None)
        else:
            os.environ["FAKE_NVML_STATE"] = state
