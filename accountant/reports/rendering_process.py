"""Renders reports as PDF, spreadsheets and other binary files in separate processes, so that a document takes neither
the serving process's time nor its memory.

A process stays for the next document. It is killed when a document takes too long, and when the caller's work is called
off (`gputally.base.called_off`). The bytes are those of `Rendering.render`."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Final, TypeVar

import anyio
import structlog
from anyio import CancelScope, CapacityLimiter, from_thread, move_on_after, to_process, to_thread

from accountant.core.errors import CannotRender
from accountant.reports.output_formats import BINARY, RENDERINGS, Form
from accountant.reports.report_builder import Report
from gputally.base import called_off
from gputally.base.called_off import CalledOff

T = TypeVar("T")

MOST_S: Final = 60.0
MOST_MIB: Final = 1_024
_NICE: Final = 5
_SMALLER: Final = "ask for one team, for a shorter span, or for the format csv"
_log = structlog.get_logger("accountant.reports.rendering_process")


def render(form: Form, report: Report) -> bytes:
    """The report in this format. Text formats are rendered here, binary ones in another process.

    Call it in a thread: one that the server started uses the server's processes, any other one starts a process of its
    own. Raises CannotRender, also for a document that takes too much time or memory, and CalledOff."""
    if form not in BINARY:
        return RENDERINGS[form].render(report)
    try:
        from_thread.check_cancelled()
    except RuntimeError:  # not a thread of an event loop
        return anyio.run(apart, _rendered, form, report)
    return from_thread.run(apart, _rendered, form, report)


async def apart(function: Callable[..., T], *arguments: object, most_s: float = MOST_S) -> T:
    """The result of a function of a module, called in another process. Raises CannotRender if it takes too much time or
    memory, and CalledOff."""
    loop, work = asyncio.get_running_loop(), called_off.current()
    with move_on_after(most_s) as scope:

        def stop() -> None:
            loop.call_soon_threadsafe(scope.cancel)

        with work.stoppable(stop) if work is not None else nullcontext():
            # The turns of requests (`gputally.server.turns`) limit the documents at one time.
            one = CapacityLimiter(1)
            try:
                # A process whose start is cancelled would be left running, so one is started first, whatever happens.
                with CancelScope(shield=True):
                    await to_process.run_sync(os.getpid, limiter=one)
                return await to_process.run_sync(_limited, function, *arguments, cancellable=True, limiter=one)
            except (anyio.BrokenWorkerProcess, MemoryError) as error:
                if isinstance(error, anyio.BrokenWorkerProcess) and error.args:
                    # The process cannot load this program's main module, a script of the operator's. The document is
                    # then made here, as a small one would be.
                    _log.warning("document_made_in_this_process", reason=str(error.__cause__))
                    return await to_thread.run_sync(lambda: function(*arguments), abandon_on_cancel=True)
                raise CannotRender(f"the document needs more than {MOST_MIB} MiB: {_SMALLER}") from error
    if work is not None and work.over:
        raise CalledOff
    raise CannotRender(f"the document takes longer than {most_s:g} s: {_SMALLER}")


def _limited(function: Callable[..., T], *arguments: object) -> T:
    """Calls the function in the other process, with its limit of memory."""
    present, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = MOST_MIB * 2**20 if hard == resource.RLIM_INFINITY else min(MOST_MIB * 2**20, hard)
    if present != most:
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        with suppress(OSError):
            os.nice(_NICE)
    return function(*arguments)


def _rendered(form: Form, report: Report) -> bytes:
    return RENDERINGS[form].render(report)
