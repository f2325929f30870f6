"""Sends POST requests over one persistent connection, reads metrics pages, and reads bearer tokens from files.

It limits the size of answers. It reads the files of tokens, CAs and client certificates again when they change.

The module uses only http.client, because the agent's image contains no HTTP library. It follows no redirects."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import ssl
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from agent.core.settings import SettingsError
from gputally.base.atomic_file import Stamp, stamp, stamp_of
from gputally.base.errors import AgentError, without_password

MAX_ANSWER_BYTES = 1024 * 1024
MAX_TOKEN_BYTES = 64 * 1024
MAX_PAGE_BYTES = 8 * 1024 * 1024
PAGE_TIMEOUT_S = 2.0
_CHUNK_BYTES = 64 * 1024
_SLOWEST = 64 * 1024
"""Bytes a second that an answer must bring at least, once its time limit is over."""
_TOKEN = re.compile(r"[A-Za-z0-9\-._~+/]+=*")  # Source: RFC 6750, 2.1 (b64token)


class Unreachable(AgentError):
    """There is no complete answer: the connection was refused, reset, timed out or not trusted, or the answer is too
    large."""


class TokenUnavailable(AgentError):
    """The file of the bearer token cannot be read or does not contain a token."""


class Response(msgspec.Struct, frozen=True):
    """An HTTP response. retry_after: the value of the Retry-After header; "" if there is none."""

    status: int
    body: bytes
    retry_after: str


class BearerToken:
    """A bearer token in a file that another program renews, such as a projected service account token."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: Stamp | None = None
        self._token = ""

    def read(self) -> str:
        """Return the current token. Reads the file only if it has changed. Raises TokenUnavailable."""
        try:
            with self._path.open("rb") as file:
                current = stamp_of(os.fstat(file.fileno()))
                if current != self._stamp:
                    self._token = self._parse(file.read(MAX_TOKEN_BYTES + 1))
                    self._stamp = current
        except OSError as error:
            raise TokenUnavailable(f"token file {self._path}: {error.strerror}") from error
        return self._token

    def _parse(self, content: bytes) -> str:
        token = content.decode("ascii", "replace").strip()
        if len(content) > MAX_TOKEN_BYTES or not _TOKEN.fullmatch(token):
            raise TokenUnavailable(f"token file {self._path}: it does not contain a bearer token")
        return token


class ClientCertificate(msgspec.Struct, frozen=True):
    """The files of a client certificate (PEM, with intermediate certificates) and of its key."""

    cert: Path
    key: Path


def connection_to(
    url: str, ca_file: Path | None, timeout_s: float, identity: ClientCertificate | None = None
) -> tuple[http.client.HTTPConnection, str]:
    """Return an unopened connection to the host of a URL, and the path of the URL.

    ca_file: PEM file of the CAs to trust; None trusts the system's.
    identity: the client certificate, for a server that requests one; None if there is none.

    Raises SettingsError for a URL that is not http(s)://host[:port][/path] and for files that cannot be read."""
    try:
        scheme, host, port, path = _split(url)
    except ValueError as error:
        raise SettingsError(f"url {without_password(url)!r}: expected http(s)://host[:port][/path]") from error
    prefix = path.rstrip("/")
    if scheme == "http":
        return http.client.HTTPConnection(host, port, timeout=timeout_s), prefix
    try:
        context = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(f"CA file {ca_file}: {error.strerror or error}") from error
    if identity is not None:
        try:
            context.load_cert_chain(identity.cert, identity.key)
        except (OSError, ssl.SSLError) as error:
            raise SettingsError(f"client certificate {identity.cert}: {error.strerror or error}") from error
    return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context), prefix


def _split(url: str) -> tuple[str, str, int | None, str]:
    """Return scheme, host, port (None if there is none) and path of a URL. Raises ValueError for a URL that is not
    http(s)://host[:port][/path]."""
    parts = urlsplit(url)
    port = parts.port
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("it has no scheme or no host")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError("it has a user name, a query or a fragment")
    return parts.scheme, parts.hostname, port, parts.path


class HttpSender:
    """Sends POST requests to paths below `url`. When the file of the CAs, the certificate or the key changes, later
    requests use the new content, or the old content as long as the new one is incomplete.

    Raises SettingsError like `connection_to`."""

    def __init__(
        self, url: str, ca_file: Path | None, timeout_s: float, identity: ClientCertificate | None = None
    ) -> None:
        self._args = url, ca_file, timeout_s, identity
        own = () if identity is None else (identity.cert, identity.key)
        self._files = own if ca_file is None else (*own, ca_file)
        self._stamps = self._current_stamps()
        self._connection, self._prefix = connection_to(*self._args)
        self.encrypted = isinstance(self._connection, http.client.HTTPSConnection)

    def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> Response:
        """Send a POST request. If the server has closed the persistent connection, try once more. Raises
        Unreachable."""
        self._reload()
        reused = self._connection.sock is not None
        try:
            self._connection.request("POST", self._prefix + path, body, dict(headers))
            response = self._connection.getresponse()
            content = read_answer(response, MAX_ANSWER_BYTES, self._args[2])
        except (OSError, http.client.HTTPException) as error:
            self.close()
            if reused and isinstance(error, ConnectionError):
                return self.post(path, body, headers)
            raise Unreachable(f"accountant unreachable: {failure_reason(error)}") from error
        if len(content) > MAX_ANSWER_BYTES:
            self.close()
            raise Unreachable(f"accountant unreachable: answer larger than {MAX_ANSWER_BYTES} bytes")
        return Response(response.status, content, response.getheader("Retry-After", "").strip())

    def _reload(self) -> None:
        """Replace the connection if the CAs, the certificate or the key changed."""
        current = self._current_stamps()
        if current == self._stamps:
            return
        with contextlib.suppress(SettingsError):
            connection, _ = connection_to(*self._args)
            self.close()
            self._connection, self._stamps = connection, current

    def _current_stamps(self) -> tuple[Stamp | None, ...]:
        return tuple(stamp(file) for file in self._files)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.close()


def read_answer(response: http.client.HTTPResponse, most_bytes: int, seconds: float) -> bytes:
    """Read the body of an answer, of a larger one than `most_bytes` about that much, and close it. A server that sends
    a byte now and then does not extend the time limit. Raises OSError, http.client.HTTPException."""
    body, began_s = bytearray(), time.monotonic()
    # Closing leaves the connection open for the next request. A server that closes its connections leaves the socket to
    # the answer alone.
    with response:
        while len(body) <= most_bytes and (part := response.read1(_CHUNK_BYTES)):
            body += part
            if time.monotonic() - began_s > seconds + len(body) / _SLOWEST:
                raise TimeoutError(f"no whole answer within {seconds:g} s")
        if len(body) <= most_bytes and response.length:
            raise http.client.IncompleteRead(bytes(body), response.length)
    return bytes(body)


def failure_reason(error: BaseException) -> str:
    """Return why a request failed: the message of the error, or its type if it has none."""
    return str(error.args[-1]) if error.args else type(error).__name__


def page_reader(url: str, default_port: int, setting: str) -> Callable[[], str]:
    """Return a function that reads the metrics page at a URL.

    setting: name of the setting or flag that contains the URL, for the error message.

    Raises SettingsError for a URL that is not http://HOST[:PORT][/PATH]. The returned function raises OSError or
    http.client.HTTPException without an answer, and ValueError for an error status or a page that is too large."""
    refusal = SettingsError(f"{setting}: expected http://HOST:PORT/metrics, got {without_password(url)!r}")
    try:
        scheme, host, port, path = _split(url)
    except ValueError as error:
        raise refusal from error
    if scheme != "http":
        raise refusal

    def read() -> str:
        connection = http.client.HTTPConnection(host, port or default_port, timeout=PAGE_TIMEOUT_S)
        try:
            connection.request("GET", path or "/metrics", headers={"Accept": "text/plain"})
            answer = connection.getresponse()
            body = read_answer(answer, MAX_PAGE_BYTES, PAGE_TIMEOUT_S)
        finally:
            connection.close()
        if answer.status != http.client.OK:
            raise ValueError(f"HTTP {answer.status}")
        if len(body) > MAX_PAGE_BYTES:
            raise ValueError(f"the page is larger than {MAX_PAGE_BYTES} bytes")
        return body.decode("utf-8", "replace")

    return read
