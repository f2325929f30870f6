"""Restarts the agent's process if the driver was replaced under it, or the machine's clock was set back.

After a driver upgrade, the library of the old driver stays mapped, so only a new process can continue. The new process
has the same program, arguments, process number and spool, and its meter continues where the old one ended. In a
container, the new process may find the old library again, because only a new container gets the new one. The process
then ends, and its supervisor restarts it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, MutableMapping
from typing import NoReturn

from agent.core.readings import DriverReplaced
from agent.core.steady_clock import ClockSetBack
from gputally.base.untrusted_text import for_terminal

RESTARTED = "GPUTALLY_RESTARTED"
"""Environment variable of a process that replaced another one."""
_SETTLED_S = 60
"""A process that has run for this time had a library that fits the driver, so a later mismatch means a new upgrade."""


def with_restarts(program: Callable[[bool], int]) -> int:
    """Run a program, and return its exit code unless the process is replaced. The program is told whether this process
    replaced another one. Raises what it raises, except the reasons for a restart."""
    restarted, began_s = was_restarted(os.environ), time.monotonic()
    try:
        return program(restarted)
    except DriverReplaced as error:
        sys.stderr.write(for_terminal(f"gputally agent: {error}\n"))
        if not restarted or time.monotonic() - began_s > _SETTLED_S:
            _restart()
        return 0
    except ClockSetBack as error:
        sys.stderr.write(f"gputally agent: {error}\n")
        _restart()


def was_restarted(environ: MutableMapping[str, str]) -> bool:
    """Return True if this process replaced another one. Removes the variable from `environ`, so that child processes do
    not inherit it."""
    return environ.pop(RESTARTED, "") != ""


def _restart() -> NoReturn:
    """Replace this process by a new one with the same program and arguments. Raises OSError if the program is gone."""
    os.environ[RESTARTED] = "1"
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - our own command line
