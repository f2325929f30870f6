"""What the asking commands share: their options, and the accountant they ask."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer

from accountant import log
from accountant.auth import OneToken
from accountant.remote import Remote, read_token
from accountant.service import Service
from accountant.serving import CannotStart
from accountant.serving import serve as serving
from accountant.settings import Settings
from agent.clock import SystemClock

Format = Annotated[Literal["table", "json"], typer.Option("--format", help="How to print the answer.")]
Url = Annotated[str, typer.Option(envvar="GPUTALLY_URL", help="A running accountant.")]
TokenPath = Annotated[Path | None, typer.Option("--token-file", help="File with the bearer token for --url.")]
CaPath = Annotated[
    Path | None,
    typer.Option(
        "--ca-file", envvar="GPUTALLY_CA_FILE", help="Authorities trusted for https, PEM (default: the system's)."
    ),
]
Db = Annotated[Path | None, typer.Option(help="A ledger file that no accountant has open, instead of --url.")]
Prices = Annotated[Path | None, typer.Option(help="Price book, with --db.")]
Timezone = Annotated[str | None, typer.Option(help="IANA zone of months and days.")]
By = Annotated[str, typer.Option(help="Dimensions, comma-separated: team,queue,namespace,job,pod,gpu_model,node,…")]
Start = Annotated[str | None, typer.Option(help="First instant: a date, RFC 3339 or epoch ms (default: this month).")]
End = Annotated[str | None, typer.Option(help="First instant that is out (default: now).")]
Where = Annotated[list[str] | None, typer.Option(help="Filter, for example --where team=vision (repeatable).")]
DEFAULT_URL = "http://127.0.0.1:8080"


@contextlib.contextmanager
def asking(
    url: str,
    token_file: Path | None,
    db: Path | None,
    prices: Path | None,
    timezone: str | None,
    ca_file: Path | None = None,
) -> Iterator[Remote]:
    """A running accountant, or one on a stopped ledger: on a free loopback port, behind a token of its own."""
    if db is None:
        yield Remote(url, read_token(token_file) if token_file is not None else None, ca_file)
        return
    if not db.is_file():
        raise CannotStart(f"{db}: there is no ledger")
    log.configure("error")
    token = secrets.token_urlsafe()
    settings = Settings(
        data=db.parent, ledger=db.name, listen="127.0.0.1:0", auth="off", prices=prices, timezone=timezone or "UTC"
    )
    with (
        Service(settings, SystemClock(), authenticator=OneToken(token), trial=True) as service,
        serving(service.app, settings.host, settings.port) as local,
    ):
        yield Remote(local, token)
