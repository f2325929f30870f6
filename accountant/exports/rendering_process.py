"""Renders reports as PDF, spreadsheets and other binary files in separate processes, so that a document takes neither
the serving process's time nor its memory.

A process stays for the next document. It is killed when a document takes too long, and when the caller's work is called
off (`gputally.base.called_off`). What another package writes is always made there, so that it cannot hang, end or fill
the serving process, and its failure is named. The bytes are those that the export writes."""

from __future__ import annotations

import asyncio
import io
import os
import resource
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Final, TypeVar

import anyio
import structlog
from anyio import CancelScope, CapacityLimiter, from_thread, move_on_after, to_process, to_thread

from accountant.core.errors import CannotRender
from accountant.exports.protocol import SEAM, ExportPlugin, package_of
from accountant.reports.report_builder import Report
from gputally.base import called_off
from gputally.base.called_off import CalledOff
from gputally.base.plugins import named

T = TypeVar("T")

MOST_S: Final = 60.0
MOST_MIB: Final = 1_024
_NICE: Final = 5
_SMALLER: Final = "ask for one team, for a shorter span, or for a text format"
_MOST_REASON: Final = 500
_log = structlog.get_logger("accountant.exports.rendering_process")


def render(name: str, report: Report, most_s: float = MOST_S) -> bytes:
    """The report in the format of this name. gputally's own text formats are rendered here, others in another process.
    An export of another package has a process of its own, which ends with the document.

    Call it in a thread: one that the server started uses the server's processes, any other one starts a process of its
    own. Raises CannotRender, also for a document that takes too much time or memory, CalledOff and NoPlugin."""
    binary, package = named(SEAM, ExportPlugin, name).binary, package_of(name)
    if package is not None:
        try:
            return anyio.run(partial(apart, _rendered, name, report, most_s=most_s, here=False))
        except CannotRender as error:
            reason = " ".join(str(error).split())[:_MOST_REASON]
            raise CannotRender(f"the format {name} of the package {package} failed: {reason}") from error
    if not binary:
        return written(name, report)
    made = partial(apart, written, name, report, most_s=most_s)
    try:
        from_thread.check_cancelled()
    except RuntimeError:  # not a thread of an event loop
        return anyio.run(made)
    return from_thread.run(made)


async def apart(function: Callable[..., T], *arguments: object, most_s: float = MOST_S, here: bool = True) -> T:
    """The result of a function of a module, called in another process. Raises CannotRender if it takes too much time or
    memory, and CalledOff. here: whether it may be called in this process if no other one can be started."""
    loop, work = asyncio.get_running_loop(), called_off.current()
    with move_on_after(most_s) as scope:

        def stop() -> None:
            loop.call_soon_threadsafe(scope.cancel)

        with work.stoppable(stop) if work is not None else nullcontext():
            # The turns of requests (`gputally.server.turns`) limit the documents at one time.
            one = CapacityLimiter(1)
            try:
                # A process whose start is cancelled would be left running, so one is started first, whatever happens.
                # What it imports takes seconds, so that it is after the server in line from the first import.
                with CancelScope(shield=True), suppress(PermissionError):  # it is nicer already, or may not change it
                    await to_process.run_sync(os.setpriority, os.PRIO_PROCESS, 0, _niceness(), limiter=one)
                return await to_process.run_sync(_limited, function, *arguments, cancellable=True, limiter=one)
            except (anyio.BrokenWorkerProcess, MemoryError) as error:
                if isinstance(error, anyio.BrokenWorkerProcess) and error.args:
                    if not here:
                        raise CannotRender(f"no other process can be started: {error.__cause__}") from error
                    # The process cannot load this program's main module, a script of the operator's. The document is
                    # then made here, as a small one would be.
                    _log.warning("document_made_in_this_process", reason=str(error.__cause__))
                    return await to_thread.run_sync(lambda: function(*arguments), abandon_on_cancel=True)
                raise CannotRender(
                    f"the document needs more than {MOST_MIB} MiB, or ended its process: {_SMALLER}"
                ) from error
    if work is not None and work.over:
        raise CalledOff
    raise CannotRender(f"the document takes longer than {most_s:g} s: {_SMALLER}")


def _limited(function: Callable[..., T], *arguments: object) -> T:
    """Calls the function in the other process, with its limit of memory."""
    present, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = MOST_MIB * 2**20 if hard == resource.RLIM_INFINITY else min(MOST_MIB * 2**20, hard)
    if present != most:
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    return function(*arguments)


def _niceness() -> int:
    """The niceness of the processes, which take what the server leaves of the processors."""
    return min(os.getpriority(os.PRIO_PROCESS, os.getpid()) + _NICE, 19)


def _rendered(name: str, report: Report) -> bytes:
    """As `written`, for code of others: whatever it raises becomes CannotRender, which can leave the process."""
    try:
        return written(name, report)
    except MemoryError:
        raise
    except CannotRender as error:
        reason = str(error)
    except BaseException as error:  # noqa: BLE001
        reason = f"{type(error).__name__}: {error}"
    raise CannotRender(reason)


def written(name: str, report: Report) -> bytes:
    """The report in the format of this name, made here. Raises CannotRender, and what an export with a defect
    raises."""
    stream = io.BytesIO()
    named(SEAM, ExportPlugin, name).write(report, stream)
    return stream.getvalue()
