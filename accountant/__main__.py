"""The accountant's command: serve the ledger, and ask it.

`main(argv)` returns an exit code: 0 done, 1 could not (one clear line per fault on stderr, never a
traceback), 2 called wrongly, 70 the database failed and the process has to be started again.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import structlog
import typer

from accountant import console, log
from accountant.api.checks import Balance
from accountant.auth import SCOPES, Scope, new_token
from accountant.commands import books, deliveries, importing, invoices, jobs, reporting, safekeeping, slurm, tokenfile
from accountant.commands.asking import (
    By,
    End,
    Ledger,
    Priced,
    Printed,
    Start,
    Timezone,
    Where,
    Zoned,
    answer,
    connected,
)
from accountant.errors import AccountantError
from accountant.remote import Query
from accountant.service import Service
from accountant.serving import serve as serving
from accountant.settings import SettingsFault, host_and_port, load
from accountant.wire import CostAnswer, UsageAnswer
from agent.clock import SystemClock
from agent.yamlfile import FileFault

EXIT_FAILED = 70
"""EX_SOFTWARE of sysexits.h: a supervisor should start the process again."""

_GC_ALLOCATIONS = 50_000
"""Between collections: a batch makes thousands of objects, hardly any of them in cycles."""
_SWITCH_S = 0.000_5
"""How long a thread may compute before another one gets its turn. While the writer books a large group, every
word on a socket would else wait the interpreter's 5 ms, several times per request."""

app = typer.Typer(
    help="The ledger of GPU-hours and cost.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)
token_app = typer.Typer(help="Bearer tokens for the token file.", no_args_is_help=True)
app.add_typer(token_app, name="token")
books.register(app)
invoices.register(app)
jobs.register(app)
reporting.register(app)
safekeeping.register(app)
deliveries.register(app)
app.add_typer(slurm.app, name="slurm")
app.add_typer(importing.app, name="import")


@app.command()
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
        print(settings.as_yaml(), end="")
        return
    log.configure(settings.log_level)
    with Service(settings, SystemClock()) as service, _signals(service):
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


def run(service: Service) -> int:
    """Serve until the service is over; the exit code."""
    events = structlog.get_logger("accountant")
    settings = service.settings
    # What is loaded by now stays: a full collection need not walk all libraries while senders wait.
    gc.freeze()
    gc.set_threshold(_GC_ALLOCATIONS)
    sys.setswitchinterval(_SWITCH_S)
    with contextlib.ExitStack() as open_ports:
        for listener in service.listeners:
            address = open_ports.enter_context(serving(listener.app, *host_and_port(listener.listen)))
            events.info("serving_for_others", what=listener.what, url=address)
        url = open_ports.enter_context(serving(service.app, settings.host, settings.port, service.tls))
        service.start()
        events.info("serving", url=url, ledger=str(settings.ledger_file), auth=settings.auth)
        service.over.wait()
        events.info("stopping")
    if service.failure is None:
        return 0
    print(f"gputally accountant: {service.failure}", file=sys.stderr)
    return EXIT_FAILED


@app.command()
@connected
def usage(
    by: By = "team",
    start: Start = None,
    end: End = None,
    where: Where = None,
    output: Printed = "table",
    *,
    at: Zoned,
) -> None:
    """GPU-hours by account and group."""
    with at.asking() as remote:
        pages = list(remote.pages(UsageAnswer, "/v1/usage", _query(by, start, end, where, at.timezone)))
    lines = tuple(line for page in pages for line in page.lines)
    whole = pages[-1].model_copy(update={"lines": lines, "next_page": None})
    answer(output, lambda: console.usage_table(whole, at.zone), whole, whole.lines)


@app.command()
@connected
def cost(
    by: By = "team",
    start: Start = None,
    end: End = None,
    where: Where = None,
    output: Printed = "table",
    *,
    at: Priced,
) -> None:
    """Exact cost by group."""
    with at.asking() as remote:
        pages = list(remote.pages(CostAnswer, "/v1/cost", _query(by, start, end, where, at.timezone)))
    lines = tuple(line for page in pages for line in page.lines)
    whole = pages[-1].model_copy(update={"lines": lines, "next_page": None})
    answer(output, lambda: console.cost_table(whole, at.zone), whole, whole.lines)


@app.command()
@connected
def check(output: Printed = "table", *, at: Ledger) -> None:
    """Recompute the books from the rows; exit 1 unless every GPU-microsecond stands in exactly one account."""
    with at.asking() as remote:
        balance = remote.ask(Balance, "/v1/check")
    answer(output, lambda: console.balance_table(balance), balance)
    if balance.imbalance_gpu_us or balance.month_faults:
        raise typer.Exit(1)


tokenfile.register(token_app)


@token_app.command("new")
def token_new(
    name: Annotated[str, typer.Option(help="Who will hold it.")],
    scope: Annotated[list[str], typer.Option(help="ingest, import, read, progress, policy or admin (repeatable).")],
    cluster: Annotated[str | None, typer.Option(help="Bind an agent's token to a cluster …")] = None,
    node: Annotated[str | None, typer.Option(help="… and to a node.")] = None,
    team: Annotated[list[str] | None, typer.Option(help="Show only these teams (repeatable).")] = None,
    expires: Annotated[datetime | None, typer.Option(help="Last day it is valid (UTC).")] = None,
) -> None:
    """Make a token: printed once, here; the file keeps only its hash."""
    try:
        token, entry = new_token(
            name, _scopes(scope), cluster=cluster, node=node, teams=tuple(team) if team else None,
            expires=expires.replace(tzinfo=UTC) if expires else None,
        )  # fmt: skip
    except ValueError as error:
        raise typer.BadParameter(str(error).splitlines()[0]) from error
    print(f"token, shown only now:\n\n  {token}\n\nentry for the token file, under `tokens:`:\n\n{entry}", end="")


def _scopes(names: Sequence[str]) -> tuple[Scope, ...]:
    known: dict[str, Scope] = {scope: scope for scope in SCOPES}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(f"no scope {unknown[0]!r}: one of {', '.join(known)}")
    return tuple(known[name] for name in names)


def _query(by: str, start: str | None, end: str | None, where: list[str] | None, timezone: str | None) -> Query:
    query: dict[str, str | list[str] | None] = {"by": by, "start": start, "end": end, "timezone": timezone}
    for filter in where or ():
        dimension, equals, value = filter.partition("=")
        if not equals:
            raise typer.BadParameter(f"not a filter: {filter!r} (write for example team=vision)")
        values = query.setdefault(f"where.{dimension}", [])
        assert isinstance(values, list)
        values.append(value)
    return query


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    try:
        app(args=list(sys.argv[1:] if argv is None else argv), prog_name="gputally accountant")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 1
    except (AccountantError, SettingsFault, FileFault) as error:
        for line in str(error).splitlines():
            print(f"gputally accountant: {line}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
