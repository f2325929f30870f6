"""Mail passes the suite of channels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from accountant.channels import mail
from gputally.testing.channels import ACCEPTS, HANGS_UP, ChannelSuite, Medium
from tests.fakes.mailserver import MailServer, mail_server


class _Letters:
    """The mail server as a receiver."""

    def __init__(self, server: MailServer) -> None:
        self._server = server

    @property
    def answer(self) -> int:
        raise NotImplementedError

    @answer.setter
    def answer(self, status: int) -> None:
        self._server.busy, self._server.silent = (0 if status in (ACCEPTS, HANGS_UP) else 1), status == HANGS_UP

    @property
    def bodies(self) -> Sequence[bytes]:
        found = []
        for letter in self._server.letters:
            parts = [part.get_payload(decode=True) for part in letter.walk() if not part.is_multipart()]
            found.append(b"\n".join([str(letter["Subject"]).encode(), *(bytes(part) for part in parts)]))
        return found


def _html(body: bytes) -> list[str]:
    """The part of a letter that is read as HTML."""
    return ["".join(body.decode().partition("<!doctype html>")[1:])]


class TestMail(ChannelSuite):
    plugin = mail.CHANNEL

    @pytest.fixture
    def medium(self) -> Iterator[Medium]:
        with mail_server() as server:
            settings = {"server": server.address, "from": "gputally@example.com", "to": ["a@example.com"], "tls": "off"}
            yield Medium(settings, _Letters(server), {"html": _html})
