"""Our own channels pass the suite that every channel passes."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from accountant.channels import folder, mail
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


class TestMail(ChannelSuite):
    plugin = mail.CHANNEL

    @pytest.fixture
    def medium(self) -> Iterator[Medium]:
        with mail_server() as server:
            settings = {"server": server.address, "from": "gputally@example.com", "to": ["a@example.com"], "tls": "off"}
            yield Medium(settings, _Letters(server))


class _Files:
    """A folder as a receiver. It refuses while it is a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def answer(self) -> int:
        return ACCEPTS if not self._path.exists() or stat.S_ISDIR(self._path.stat().st_mode) else 1

    @answer.setter
    def answer(self, status: int) -> None:
        if status in (ACCEPTS, HANGS_UP):
            self._path.unlink() if self._path.is_file() else None
        elif self._path.is_dir():
            for file in self._path.iterdir():
                file.unlink()
            self._path.rmdir()
            self._path.write_text("")
        else:
            self._path.write_text("")

    @property
    def bodies(self) -> Sequence[bytes]:
        return [file.read_bytes() for file in sorted(self._path.iterdir())] if self._path.is_dir() else []


class TestFolder(ChannelSuite):
    plugin = folder.CHANNEL

    @pytest.fixture
    def medium(self, tmp_path: Path) -> Medium:
        path = tmp_path / "reports"
        return Medium(str(path), _Files(path), uncertain=False)
