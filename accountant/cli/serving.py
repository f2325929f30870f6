"""Runs the accountant as a process: waits for the Lease, serves until a signal arrives or the service fails."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator

import structlog
import typer
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from accountant import composition
from accountant.api.problems import answer as problem
from accountant.api.problems import retry_later
from accountant.composition import Service
from accountant.core.settings import Settings, host_and_port
from accountant.runtime.clock_step_guard import GuardedClock, boot_id
from accountant.runtime.leadership import Leadership, take_over
from gputally.base.background_tasks import set_on_signals
from gputally.base.clock import SystemClock
from gputally.server.https_server import serve as serving

EXIT_FAILED = 70
"""EX_SOFTWARE of sysexits.h: a supervisor should start the process again."""

RETRY_S = 1.0
"""How long a client of a waiting replica should wait before the next request."""

_GC_ALLOCATIONS = 50_000
"""Allocations between garbage collections: a batch creates thousands of objects, hardly any of them in cycles."""

_SWITCH_S = 0.000_5
"""How long a thread may run before another gets its turn. While the writer books a large group, each socket operation
would otherwise wait the interpreter's default of 5 ms, several times per request."""


def lead(settings: Settings, leader: Leadership) -> int:
    """Waits until this replica leads, then serves the ledger; returns the exit code."""
    with contextlib.ExitStack() as waiting:
        if settings.leader_election is not None:
            stop, events = threading.Event(), structlog.get_logger("accountant")
            waiting.enter_context(_signals(stop))
            app, limits = (
                waiting_app(settings.leader_election.lease, leader.leaderless),
                settings.limits.of_connections(),
            )
            url = waiting.enter_context(serving(app, settings.host, settings.port, composition.tls(settings), limits))
            events.info("waiting", url=url, lease=settings.leader_election.lease)
            if not leader.wait(stop):
                return 0
            restored = take_over(settings, SystemClock())
            events.info("leading", restored=None if restored is None else restored.name)
        clock = GuardedClock(SystemClock(), settings.data / "clock.json", boot_id())
        with Service(settings, clock, fence=leader.fence) as service:
            waiting.close()  # the service needs the port
            with _signals(service.over):
                leader.watch(service.fail, lambda: os._exit(EXIT_FAILED))
                return run(service)


def waiting_app(lease: str, leaderless: Callable[[], bool]) -> ASGIApp:
    """The application of a replica that does not lead yet: /livez answers 200, every other path 503.

    leaderless: returns whether no other replica is known to lead."""

    async def app(scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope)
        response: Response
        if request.url.path == "/livez":
            response = PlainTextResponse("waiting\n")
        else:
            others = "and no replica is known to hold it" if leaderless() else "because another one serves"
            why = f"this replica waits for the Lease {lease}, {others}: try again"
            response = problem(retry_later("ledger-unavailable", why, RETRY_S), request.url.path)
        await response(scope, receive, send)

    return app


@contextlib.contextmanager
def _signals(over: threading.Event) -> Iterator[None]:
    """Inside the context, SIGTERM and Ctrl-C set the event."""
    restore = set_on_signals(over)
    try:
        yield
    finally:
        restore()


def take_turns() -> None:
    """Configures garbage collection and the switching of threads for many senders."""
    # Objects loaded so far are excluded from full collections, which would otherwise scan all libraries while senders
    # wait.
    gc.freeze()
    gc.set_threshold(_GC_ALLOCATIONS)
    sys.setswitchinterval(_SWITCH_S)


def run(service: Service) -> int:
    """Serves until the service ends; returns the exit code."""
    events = structlog.get_logger("accountant")
    settings = service.settings
    take_turns()
    limits = settings.limits.of_connections()
    with contextlib.ExitStack() as open_ports:
        for listener in service.listeners:
            at, name = host_and_port(listener.listen), f"http {listener.what}"
            address = open_ports.enter_context(
                serving(listener.app, *at, limits=limits, name=name, tasks=service.tasks, over=service.over)
            )
            events.info("serving_for_others", what=listener.what, url=address)
        url = open_ports.enter_context(
            serving(
                service.app, settings.host, settings.port, service.tls, limits, tasks=service.tasks, over=service.over
            )
        )
        service.start()
        events.info("serving", url=url, ledger=str(settings.ledger_file), auth=settings.auth)
        service.over.wait()
        events.info("stopping")
    if service.failure is None:
        return 0
    typer.echo(f"gputally accountant: {service.failure}", err=True)
    return EXIT_FAILED
