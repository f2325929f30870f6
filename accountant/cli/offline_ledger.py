"""Answers commands from the file of an accountant that is not running."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accountant.composition import Service
from accountant.core.settings import Settings
from accountant.wire.http_client import AccountantClient
from gputally.base.clock import SystemClock
from gputally.base.errors import CannotStart
from gputally.server import structlog_setup
from gputally.server.https_server import serve
from gputally.server.tokens_and_grants import SingleToken


@contextlib.contextmanager
def serve_offline(ledger: Path, **given: Any) -> Iterator[AccountantClient]:
    """On a free loopback port, behind a token of its own, as a trial. given: further settings.

    Raises CannotStart where there is no ledger.
    """
    if not ledger.is_file():
        raise CannotStart(f"{ledger}: there is no ledger")
    structlog_setup.configure("error")
    token = secrets.token_urlsafe()
    settings = Settings(data=ledger.parent, ledger=ledger.name, listen="127.0.0.1:0", auth="off", **given)
    with (
        Service(settings, SystemClock(), authenticator=SingleToken(token), trial=True) as service,
        serve(service.app, settings.host, settings.port) as url,
    ):
        yield AccountantClient(url, token)
