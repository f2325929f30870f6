"""`serve`: the accountant itself, until somebody ends it.

The exit code: 0 ended as it was told to, 70 the database failed and the process has to be started again.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import structlog
import typer

from accountant import log
from accountant.commands.asking import Timezone
from accountant.guarded_clock import GuardedClock, boot_id
from accountant.service import Service
from accountant.serving import serve as serving
from accountant.settings import host_and_port, load
from agent.clock import SystemClock

EXIT_FAILED = 70
"""EX_SOFTWARE of sysexits.h: a supervisor should start the process again."""

_GC_ALLOCATIONS = 50_000
"""Between collections: a batch makes thousands of objects, hardly any of them in cycles."""
_SWITCH_S = 0.000_5
"""How long a thread may compute before another one gets its turn. While the writer books a large group, every
word on a socket would else wait the interpreter's 5 ms, several times per request."""


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command()(serve)


def serve(
    config: Annotated[Path | None, typer.Option(help="Settings file (YAML).")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the ledger.")] = None,
    listen: Annotated[str | None, typer.Option(help="host:port to serve on.")] = None,
    auth: Annotated[str | None, typer.Option(help="tokens, or off (loopback only).")] = None,
    tokens: Annotated[Path | None, typer.Option(help="Token file.")] = None,
    prices: Annotated[Path | None, typer.Option(help="Price book.")] = None,
    inventory: Annotated[Path | None, typer.Option(help="Inventory (YAML).")] = None,
    callers: Annotated[Path | None, typer.Option(help="Who else is let in (YAML).")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate (PEM) to serve HTTPS with.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key (PEM).")] = None,
    tls_client_ca: Annotated[Path | None, typer.Option(help="Authorities of client certificates (PEM).")] = None,
    policy: Annotated[Path | None, typer.Option(help="Policy file.")] = None,
    timezone: Timezone = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print the settings in force and stop.")] = False,
) -> None:
    """Keep the ledger and serve it until SIGTERM or Ctrl-C."""
    given = {
        "data": data, "listen": listen, "auth": auth, "tokens": tokens, "prices": prices,
        "inventory": inventory, "policy": policy, "callers": callers, "tls_cert": tls_cert, "tls_key": tls_key,
        "tls_client_ca": tls_client_ca, "timezone": timezone, "log_level": log_level,
    }  # fmt: skip
    settings = load(config, os.environ, {name: value for name, value in given.items() if value is not None})
    if print_config:
        typer.echo(settings.as_yaml(), nl=False)
        return
    log.configure(settings.log_level)
    clock = GuardedClock(SystemClock(), settings.data / "clock.json", boot_id())
    with Service(settings, clock) as service, _signals(service):
        code = run(service)
    raise typer.Exit(code)


@contextlib.contextmanager
def _signals(service: Service) -> Iterator[None]:
    """SIGTERM and Ctrl-C end the service in order."""
    before = {
        number: signal.signal(number, lambda *_: service.over.set()) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def take_turns() -> None:
    """Have the interpreter work as the accountant needs it."""
    # What is loaded by now stays: a full collection need not walk all libraries while senders wait.
    gc.freeze()
    gc.set_threshold(_GC_ALLOCATIONS)
    sys.setswitchinterval(_SWITCH_S)


def run(service: Service) -> int:
    """Serve until the service is over; the exit code."""
    events = structlog.get_logger("accountant")
    settings = service.settings
    take_turns()
    limits = settings.limits.of_connections()
    with contextlib.ExitStack() as open_ports:
        for listener in service.listeners:
            address = open_ports.enter_context(serving(listener.app, *host_and_port(listener.listen), limits=limits))
            events.info("serving_for_others", what=listener.what, url=address)
        url = open_ports.enter_context(serving(service.app, settings.host, settings.port, service.tls, limits))
        service.start()
        events.info("serving", url=url, ledger=str(settings.ledger_file), auth=settings.auth)
        service.over.wait()
        events.info("stopping")
    if service.failure is None:
        return 0
    typer.echo(f"gputally accountant: {service.failure}", err=True)
    return EXIT_FAILED
