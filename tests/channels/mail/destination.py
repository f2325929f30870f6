"""A mail server as a destination of a deliveries file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.fakes.mailserver import mail_server

NAME = "smtp"


@contextmanager
def destination(folder: Path) -> Iterator[object]:
    """Yield the settings, as long as the server runs."""
    with mail_server() as mail:
        yield {"server": mail.address, "from": "g@example.com", "to": ["a@example.com"], "tls": "off"}
