"""Posts over one kept-alive connection, with limited answers and a token that is read again from its file.

It uses only http.client, because the agent's image contains no HTTP library, and follows no redirects."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from agent.core.errors import AgentError, SettingsError, TokenUnavailable
from gputally.base.atomic_file import Stamp, stamp, stamp_of

MAX_ANSWER_BYTES = 1024 * 1024
MAX_TOKEN_BYTES = 64 * 1024
_TOKEN = re.compile(r"[A-Za-z0-9\-._~+/]+=*")  # Source: RFC 6750, 2.1 (b64token)


class Unreachable(AgentError):
    """No complete answer came: the connection was refused, reset, timed out or not trusted, or the answer was too
    large."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP response. retry_after: the header as sent, "" without one."""

    status: int
    body: bytes
    retry_after: str


class TokenFile:
    """A bearer token in a file that another program renews (a projected service account token)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: Stamp | None = None
        self._token = ""

    def read(self) -> str:
        """The current token; the file is read only when it changed. Raises TokenUnavailable."""
        try:
            with self._path.open("rb") as file:
                seen = stamp_of(os.fstat(file.fileno()))
                if seen != self._seen:
                    self._token = _checked(file.read(MAX_TOKEN_BYTES + 1), self._path)
                    self._seen = seen
        except OSError as error:
            raise TokenUnavailable(f"token file {self._path}: {error.strerror}") from error
        return self._token


def _checked(raw: bytes, path: Path) -> str:
    token = raw.decode("ascii", "replace").strip()
    if len(raw) > MAX_TOKEN_BYTES or not _TOKEN.fullmatch(token):
        raise TokenUnavailable(f"token file {path}: holds no bearer token")
    return token


@dataclass(frozen=True, slots=True)
class Identity:
    """The client certificate (PEM, with intermediate certificates) and its key."""

    cert: Path
    key: Path


def connection_to(
    url: str, ca_file: Path | None, timeout_s: float, identity: Identity | None = None
) -> tuple[http.client.HTTPConnection, str]:
    """Return an unopened connection, and the prefix of every path.

    ca_file: None for the system's authorities.
    identity: shown to a server that asks for a certificate.

    Raises SettingsError for a url that is not http(s)://host[:port][/path] and for files that cannot be read."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError as error:
        raise SettingsError(f"url {url!r}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
        raise SettingsError(f"url {url!r}: expected http(s)://host[:port][/path]")
    prefix = parts.path.rstrip("/")
    if parts.scheme == "http":
        return http.client.HTTPConnection(parts.hostname, port, timeout=timeout_s), prefix
    try:
        context = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(f"CA file {ca_file}: {error.strerror or error}") from error
    if identity is not None:
        try:
            context.load_cert_chain(identity.cert, identity.key)
        except (OSError, ssl.SSLError) as error:
            raise SettingsError(f"client certificate {identity.cert}: {error.strerror or error}") from error
    return http.client.HTTPSConnection(parts.hostname, port, timeout=timeout_s, context=context), prefix


class HttpSender:
    """POSTs to paths below `url`. Renewed authorities and a renewed client certificate are used from then on; an
    incomplete renewal changes nothing.

    Raises the exceptions of `connection_to`."""

    def __init__(self, url: str, ca_file: Path | None, timeout_s: float, identity: Identity | None = None) -> None:
        self._args = url, ca_file, timeout_s, identity
        own = () if identity is None else (identity.cert, identity.key)
        self._files = own if ca_file is None else (*own, ca_file)
        self._read = self._stamps()
        self._connection, self._prefix = connection_to(*self._args)
        self.encrypted = isinstance(self._connection, http.client.HTTPSConnection)

    def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Send a POST. Raises Unreachable. If the other side has closed a kept connection, it is opened again once."""
        self._renew()
        kept = self._connection.sock is not None
        try:
            return self._once(path, body, headers)
        except (ConnectionError, http.client.RemoteDisconnected) as error:
            self.close()
            if not kept:
                raise Unreachable(f"accountant unreachable: {_reason(error)}") from error
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise Unreachable(f"accountant unreachable: {_reason(error)}") from error
        try:
            return self._once(path, body, headers)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise Unreachable(f"accountant unreachable: {_reason(error)}") from error

    def _renew(self) -> None:
        seen = self._stamps()
        if seen == self._read:
            return
        with contextlib.suppress(SettingsError):
            fresh, _ = connection_to(*self._args)
            self.close()
            self._connection, self._read = fresh, seen

    def _stamps(self) -> tuple[Stamp | None, ...]:
        return tuple(stamp(file) for file in self._files)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.close()

    def _once(self, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        self._connection.request("POST", self._prefix + path, body, dict(headers))
        response = self._connection.getresponse()
        content = response.read(MAX_ANSWER_BYTES + 1)
        if len(content) > MAX_ANSWER_BYTES:
            raise http.client.HTTPException(f"answer larger than {MAX_ANSWER_BYTES} bytes")
        return Answer(response.status, content, response.getheader("Retry-After", "").strip())


def _reason(error: BaseException) -> str:
    return str(error.args[-1]) if error.args else type(error).__name__
