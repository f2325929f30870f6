"""Creates HTTP clients with httpx2, and checks their addresses, CA files and tokens, for every program but the agent.

The client follows no redirects. It verifies certificates against the system's CAs or those of a file. Functions that
can fail take the exception to raise as the argument `fault`. Its message has one line, which never contains a token."""

from __future__ import annotations

import math
import ssl
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from gputally.base.errors import without_password


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
    transport: httpx2.BaseTransport | None = None,
    proxies: bool = True,
) -> httpx2.Client:
    """Return an HTTP client.

    transport: replaces the network.
    proxies: True to use the proxies that environment variables name."""
    return httpx2.Client(timeout=timeout_s, transport=transport, follow_redirects=False, verify=tls, trust_env=proxies)


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a small request."""

    status: int
    content: bytes


def exchange(tls: ssl.SSLContext, method: str, url: str, *, seconds: float, most_bytes: int, **more: Any) -> Reply:
    """Send one request and read its answer, whatever its status, within limits.

    seconds: the time limit of the whole exchange; a server that sends a byte now and then does not extend it by more
        than one wait of the same length.
    more: arguments of `httpx2.Client.stream`.

    Raises httpx2.HTTPError, also for an answer that is too long."""
    content: bytes | None = None
    over = threading.Event()
    with client(tls, seconds) as http:

        def end() -> None:
            over.set()
            http.close()  # which ends an exchange at its next byte

        limit = threading.Timer(seconds, end)
        limit.daemon = True
        limit.start()
        try:
            with http.stream(method, url, **more) as response:
                content = read_bounded(response, most_bytes)
        except (httpx2.HTTPError, RuntimeError, ValueError, OSError) as error:
            if not over.is_set() and isinstance(error, httpx2.HTTPError):
                raise
            over.set()  # reading from a closed connection raises any of these
        finally:
            limit.cancel()
    if over.is_set() and content is None:
        raise httpx2.ReadTimeout(f"no whole answer within {seconds:g} s")
    if content is None:
        raise httpx2.DecodingError(f"the answer has more than {most_bytes} bytes")
    return Reply(response.status_code, content)


def read_bounded(response: httpx2.Response, most_bytes: int, most_s: float = math.inf) -> bytes | None:
    """Read the body of a streamed response; None if it is larger than `most_bytes`. Raises httpx2.ReadTimeout if it
    takes longer than `most_s`, however steadily it arrives."""
    body, until = bytearray(), time.monotonic() + most_s
    for part in response.iter_bytes():
        body += part
        if len(body) > most_bytes:
            return None
        if time.monotonic() > until:
            raise httpx2.ReadTimeout(f"the answer takes longer than {most_s:g} s")
    return bytes(body)


def reason(error: BaseException) -> str:
    """Return why a call failed: the operating system's message if there is one, else that of the exception."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__
