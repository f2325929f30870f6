"""The fake CUDA driver, built with the machine's compiler."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.fakes.nvml.library import NoCompiler

NAME = "libcuda.so.1"


def build(folder: Path) -> Path:
    """Build the library in `folder`. Raises NoCompiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise NoCompiler("no C compiler: what needs the fake CUDA library is left out")
    library = folder / NAME
    source = str(Path(__file__).with_name("fakecuda.c"))
    flags = ["-O1", "-Wall", "-Wextra", "-shared", "-fPIC", f"-Wl,-soname,{NAME}"]
    subprocess.run([compiler, *flags, "-o", str(library), source, "-ldl"], check=True, capture_output=True)
    return library
