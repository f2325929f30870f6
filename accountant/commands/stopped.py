"""An accountant for the length of one command, on a ledger that none has open."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accountant import log
from accountant.callers.auth import OneToken
from accountant.errors import CannotStart
from accountant.remote import Remote
from accountant.service import Service
from accountant.serving import serve
from accountant.settings import Settings
from agent.clock import SystemClock


@contextlib.contextmanager
def answering(ledger: Path, **given: Any) -> Iterator[Remote]:
    """On a free loopback port, behind a token of its own, as a trial. given: further settings.

    Raises CannotStart where there is no ledger.
    """
    if not ledger.is_file():
        raise CannotStart(f"{ledger}: there is no ledger")
    log.configure("error")
    token = secrets.token_urlsafe()
    settings = Settings(data=ledger.parent, ledger=ledger.name, listen="127.0.0.1:0", auth="off", **given)
    with (
        Service(settings, SystemClock(), authenticator=OneToken(token), trial=True) as service,
        serve(service.app, settings.host, settings.port) as url,
    ):
        yield Remote(url, token)
