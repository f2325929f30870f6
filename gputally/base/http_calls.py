"""Creates HTTP clients with httpx2, and checks their addresses, CA files and tokens, for every program but the agent.

The client follows no redirects. It verifies certificates against the system's CAs or those of a file. Functions that
can fail take the exception to raise as the argument `fault`. Its message has one line, which never contains a token."""

from __future__ import annotations

import contextlib
import math
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from weakref import WeakSet

import httpx2

from gputally.base.errors import without_password

PATIENCE: Final = 5
"""A whole answer may take this many times as long as the next part of it."""
SLOWEST: Final = 64 * 1024
"""Bytes a second that a body without a largest size must bring at least."""


def address(url: str, example: str, fault: type[Exception]) -> httpx2.URL:
    """Parse an http or https address. Raises `fault` for any other text. example: a valid address for the message."""
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise _no_address(url, example, fault) from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise _no_address(url, example, fault)
    return parsed


def _no_address(url: str, example: str, fault: type[Exception]) -> Exception:
    return fault(f"not an address: {without_password(url)!r} (write for example {example})")


def tls_context(ca_file: Path | None, fault: type[Exception]) -> ssl.SSLContext:
    """Return a TLS context that trusts the CAs of a PEM file, or the system's for None. Raises `fault` for a file
    without a certificate."""
    if ca_file is None:
        return httpx2.create_ssl_context()
    try:
        return ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError as error:
        raise fault(f"CA file {ca_file}: it contains no certificate") from error
    except OSError as error:
        raise fault(f"CA file {ca_file}: {error.strerror}") from error


def tls_context_for(url: httpx2.URL, ca_file: Path | None, fault: type[Exception]) -> ssl.SSLContext:
    """Return a TLS context for an address. For http the context trusts no CA, because loading the system's CAs is
    slow."""
    if url.scheme == "http" and ca_file is None:
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return tls_context(ca_file, fault)


def read_token(path: Path, fault: type[Exception]) -> str:
    """Read the bearer token in a file."""
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise fault(f"token file {path}: {getattr(error, 'strerror', None) or 'not ASCII text'}") from error


def client(
    tls: ssl.SSLContext,
    timeout_s: float,
    *,
    head_s: float | None = None,
    transport: httpx2.BaseTransport | None = None,
    proxies: bool = True,
) -> DeadlineClient:
    """Return an HTTP client.

    timeout_s: time limit of each wait for the server.
    head_s: time limit of a request up to the headers of its answer, however steadily they arrive; None: PATIENCE waits.
    transport: replaces the network.
    proxies: True to use the proxies that environment variables name."""
    head_s = PATIENCE * timeout_s if head_s is None else head_s
    return DeadlineClient(
        head_s, timeout=timeout_s, transport=transport, follow_redirects=False, verify=tls, trust_env=proxies
    )


class DeadlineClient(httpx2.Client):
    """A client whose requests end after `head_s` unless the headers of their answer have arrived. The time limit of a
    socket alone begins anew with every byte."""

    def __init__(self, head_s: float, **more: Any) -> None:
        super().__init__(**more)
        self._head_s = head_s
        self._connections: WeakSet[Any] = WeakSet()

    def abort(self) -> None:
        """End the requests in progress, which then fail. Does not wait."""
        for connection in list(self._connections):
            with contextlib.suppress(OSError):  # already closed
                socket.socket.shutdown(connection.get_extra_info("socket"), socket.SHUT_RDWR)

    def send(self, request: httpx2.Request, **more: Any) -> httpx2.Response:
        over = threading.Event()

        def connected(event: str, known: Mapping[str, Any]) -> None:
            if event.endswith(("connect_tcp.complete", "start_tls.complete")):
                self._connections.add(known["return_value"])

        def end() -> None:
            over.set()
            self.abort()

        request.extensions["trace"] = connected
        limit = threading.Timer(self._head_s, end)
        limit.daemon = True
        limit.start()
        try:
            return super().send(request, **more)
        except (httpx2.HTTPError, OSError):
            if not over.is_set():
                raise
        finally:
            limit.cancel()
        raise _too_slow(self._head_s)  # without the error of the shutdown as its cause


def _too_slow(limit_s: float) -> httpx2.ReadTimeout:
    return httpx2.ReadTimeout(f"no whole answer within {limit_s:g} s")


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a small request."""

    status: int
    content: bytes


def exchange(tls: ssl.SSLContext, method: str, url: str, *, seconds: float, most_bytes: int, **more: Any) -> Reply:
    """Send one request and read its answer, whatever its status, within limits.

    seconds: the time limit of the answer's headers, and again of its content.
    more: arguments of `httpx2.Client.stream`.

    Raises httpx2.HTTPError, also for an answer that is too long."""
    with (
        contextlib.suppress(httpx2.ReadTimeout),
        client(tls, seconds, head_s=seconds) as http,
        http.stream(method, url, **more) as response,
    ):
        content = read_bounded(response, most_bytes, seconds)
        if content is not None:
            return Reply(response.status_code, content)
        raise httpx2.DecodingError(f"the answer has more than {most_bytes} bytes")
    raise _too_slow(seconds)


def read_bounded(response: httpx2.Response, most_bytes: int, most_s: float = math.inf) -> bytes | None:
    """Read the body of a streamed response; None if it is larger than `most_bytes`. Raises httpx2.ReadTimeout if it
    takes longer than `most_s`, however steadily it arrives."""
    body, until = bytearray(), time.monotonic() + most_s
    for part in response.iter_bytes():
        body += part
        if len(body) > most_bytes:
            return None
        if time.monotonic() > until:
            raise _too_slow(most_s)
    return bytes(body)


def parts_of(response: httpx2.Response, most_s: float) -> Iterator[bytes]:
    """Yield the body of a streamed response, of any size. Raises httpx2.ReadTimeout if it takes longer than `most_s`
    and comes slower than SLOWEST."""
    size, began = 0, time.monotonic()
    for part in response.iter_bytes():
        size += len(part)
        if time.monotonic() - began > most_s + size / SLOWEST:
            raise _too_slow(most_s)
        yield part


def reason(error: BaseException) -> str:
    """Return why a call failed: the operating system's message if there is one, else that of the exception."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__
