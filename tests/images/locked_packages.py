"""The packages that the lock file gives an image, and their size."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
from pathlib import Path

from packaging.markers import Marker

ROOT = Path(__file__).parents[2]
MOST_OF_THE_AGENT_MB = 60


def _uv() -> str:
    return shutil.which("uv") or str(Path(sys.executable).parent / "uv")


@functools.cache
def locked(image: str) -> dict[str, str]:
    """Return name and version of every package in an image on this platform."""
    export = [_uv(), "export", "--quiet", "--frozen", "--no-emit-project", "--no-hashes", "--no-annotate"]
    done = subprocess.run([*export, "--only-group", image], cwd=ROOT, capture_output=True, text=True, check=True)
    found = {}
    for line in done.stdout.splitlines():
        match = re.fullmatch(r"([a-z0-9-]+)==(\S+)(?: ; (.+))?", line.strip())
        if match and (match[3] is None or _applies(match[3])):
            found[match[1]] = match[2]
    return found


def _applies(marker: str) -> bool:
    """Return whether a marker of the lock file applies to an image: Linux with CPython 3.11 or newer."""
    return Marker(marker).evaluate({"python_version": "3.11", "python_full_version": "3.11.2"})
