"""How the agent becomes a new process after the driver was exchanged under it.

The library that fits the old driver stays mapped, so nothing but a new process can go on: same program, same
arguments, same process number, same spool; the meter goes on where it closed. Should even that one find
the library that does not fit (in a container the new one is only there after the container was started again),
it ends, and its supervisor does the rest.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from typing import NoReturn

RESTARTED = "GPUTALLY_RESTARTED"
"""Set in the environment of a process that took another one's place."""
SETTLED_S = 60
"""A process that lived this long did find a library that fits: the next exchange is another matter."""


def was_restarted(environ: MutableMapping[str, str]) -> bool:
    """Whether this process took another one's place; asked once, so that the next is told anew."""
    return environ.pop(RESTARTED, "") != ""


def restart() -> NoReturn:
    """Become a fresh process with the same arguments. Raises OSError where the program is gone."""
    os.environ[RESTARTED] = "1"
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - our own command line
