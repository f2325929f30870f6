"""What the lock file gives an image, and how large that is."""

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
    """Name -> version of everything an image holds on this platform."""
    export = [_uv(), "export", "--quiet", "--frozen", "--no-emit-project", "--no-hashes", "--no-annotate"]
    done = subprocess.run([*export, "--only-group", image], cwd=ROOT, capture_output=True, text=True, check=True)
    found = {}
    for line in done.stdout.splitlines():
        match = re.fullmatch(r"([a-z0-9-]+)==(\S+)(?: ; (.+))?", line.strip())
        if match and (match[3] is None or _applies(match[3])):
            found[match[1]] = match[2]
    return found


def _applies(marker: str) -> bool:
    """Images are Linux and CPython 3.11 or newer; the markers of the lock ask for nothing finer."""
    return Marker(marker).evaluate({"python_version": "3.11", "python_full_version": "3.11.2"})
