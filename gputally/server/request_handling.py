"""Wraps an ASGI application so that every response has its headers and every defect is logged.

It also reads bodies within limits, and serves content with an ETag."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterable, Mapping

import structlog
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

Answered = Callable[[str, str, int, float], None]
"""Called after each response: method, path as sent, status, seconds."""


class ObservedSend:
    """Sends a response, with headers that it does not set itself. status: as sent, 500 before."""

    def __init__(self, send: Send, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._headers = headers
        self.status = 500
        self.started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.started = message["status"], True
            given = {name.lower() for name, _ in message["headers"]}
            message["headers"] = [*message["headers"], *(pair for pair in self._headers if pair[0] not in given)]
        await self._send(message)


def raw_headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Return headers in the form of ASGI."""
    return [(name.lower().encode(), value.encode()) for name, value in headers.items()]


class RequestLog:
    """Wraps a Starlette application and answers 500 if it raises. headers: added to every response that does not set
    them."""

    def __init__(
        self, app: ASGIApp, name: str, *, headers: Mapping[str, str] | None = None, answered: Answered | None = None
    ) -> None:
        self._app = app
        self._headers = raw_headers(headers or {})
        self._answered = answered
        self._log = structlog.get_logger(name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, observed = time.monotonic(), ObservedSend(send, self._headers)
        try:
            await self._app(scope, receive, observed)
        except ClientDisconnect:
            return
        except Exception as error:  # noqa: BLE001  # the last stop: a defect is logged once
            self._log.error("request_failed", path=scope.get("path", "")[:200], exc_info=error)
        if self._answered is not None and scope["type"] == "http":
            path = scope.get("raw_path", b"").decode("ascii", "replace")
            self._answered(scope["method"], path, observed.status, time.monotonic() - started)


async def read_body(request: Request, most_bytes: int, seconds: float) -> bytes:
    """Read the body, up to `most_bytes` and within `seconds`. Raises HTTPException."""
    declared = request.headers.get("content-length", "0")
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            if int(declared) <= most_bytes:
                async for part in request.stream():
                    body += part
                    if len(body) > most_bytes:
                        break
                else:
                    return bytes(body)
    except TimeoutError as error:
        raise HTTPException(408, f"the body did not arrive within {seconds:g} s", _CLOSE) from error
    raise HTTPException(413, f"more than {most_bytes} bytes", _CLOSE)


_CLOSE = {"Connection": "close"}
"""The rest of a body is not read."""


def tagged(request: Request, body: bytes, media_type: str, file: str = "") -> Response:
    """Answer 200 with an ETag of the content, or 304 if the client has it already.

    file: the name under which a browser saves it; "": it is displayed."""
    tag = f'"{hashlib.sha256(body).hexdigest()}"'
    headers = {"ETag": tag, "Cache-Control": "private, no-cache"}
    if file:
        headers["Content-Disposition"] = f'attachment; filename="{file}"'
    known = {part.strip().removeprefix("W/") for part in request.headers.get("if-none-match", "").split(",")}
    if tag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type=media_type)


def static_routes(files: Mapping[str, tuple[bytes, str]]) -> list[Route]:
    """Routes of files that need no authentication: by path, the content and its media type."""

    def route(path: str, content: bytes, media_type: str) -> Route:
        async def answer(request: Request) -> Response:
            return tagged(request, content, media_type)

        return Route(path, answer)

    return [route(path, *file) for path, file in files.items()]
