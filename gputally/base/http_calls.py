"""Calls other HTTP servers with httpx2, for every program but the agent.

No redirect is followed. Certificates are verified against the system's authorities or those of a file. Functions take
the exception to raise as an argument, so that each caller gets its own kind. The message is one line and holds no
token."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx2


def address(url: str, example: str, fault: type[Exception]) -> httpx2.URL:
    """Parse an http or https address."""
    try:
        found = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise fault(f"not an address: {url!r}: {error}") from error
    if found.scheme not in ("http", "https") or not found.host:
        raise fault(f"not an address: {url!r} (write for example {example})")
    return found


def trust_context(ca_file: Path | None, fault: type[Exception]) -> ssl.SSLContext:
    """Return a TLS context that trusts the authorities of a PEM file, or the system's if there is none."""
    if ca_file is None:
        return httpx2.create_ssl_context()
    try:
        return ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError as error:
        raise fault(f"authorities {ca_file}: no certificate in it") from error
    except OSError as error:
        raise fault(f"authorities {ca_file}: {error.strerror}") from error


def trusting_for(url: httpx2.URL, ca_file: Path | None, fault: type[Exception]) -> ssl.SSLContext:
    """Return a TLS context for an address. For http it verifies nothing, because loading the system's authorities is
    slow."""
    if url.scheme == "http" and ca_file is None:
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return trust_context(ca_file, fault)


def read_token(path: Path, fault: type[Exception]) -> str:
    """Read the bearer token in a file. It is read at each call, because tokens are rotated."""
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise fault(f"token file {path}: {getattr(error, 'strerror', None) or 'not text'}") from error


def client(
    trusted: ssl.SSLContext,
    timeout_s: float,
    *,
    transport: httpx2.BaseTransport | None = None,
    proxies: bool = True,
) -> httpx2.Client:
    """Return an HTTP client. proxies: use the proxies that environment variables name."""
    return httpx2.Client(
        timeout=timeout_s, transport=transport, follow_redirects=False, verify=trusted, trust_env=proxies
    )


def read_bounded(response: httpx2.Response, most_bytes: int) -> bytes | None:
    """Read the body of a streamed response; None if it is larger than `most_bytes`."""
    body = bytearray()
    for part in response.iter_bytes():
        body += part
        if len(body) > most_bytes:
            return None
    return bytes(body)


def reason(error: BaseException) -> str:
    """Return why a call failed, in the system's words if they are known."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__
