"""Adds headers to responses, logs unexpected exceptions, reads bodies within limits, and serves content with ETags."""

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
"""A function that is called after each response with the method, the path as sent, the status and the seconds."""


class ObservedSend:
    """An ASGI `send` function that adds the headers which a response does not set itself.

    status: the status of the response; 500 before it is sent."""

    def __init__(self, send: Send, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._headers = headers
        self.status = 500
        self.started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.started = message["status"], True
            present = {name.lower() for name, _ in message["headers"]}
            message["headers"] = [*message["headers"], *(pair for pair in self._headers if pair[0] not in present)]
        await self._send(message)


def raw_headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Return headers in the form of ASGI."""
    return [(name.lower().encode(), value.encode()) for name, value in headers.items()]


class RequestLog:
    """An ASGI application that wraps a Starlette application. It logs every exception, to which Starlette answers 500.

    name: the name of the logger.
    headers: added to every response that does not set them.
    answered: called after each response."""

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
        except Exception as error:  # noqa: BLE001  # every defect is logged once, here
            self._log.error("request_failed", path=scope.get("path", "")[:200], exc_info=error)
        if self._answered is not None and scope["type"] == "http":
            path = scope.get("raw_path", b"").decode("ascii", "replace")
            self._answered(scope["method"], path, observed.status, time.monotonic() - started)


_MOST_DIGITS = 18
"""Maximum number of digits of Content-Length."""


async def read_body(request: Request, most_bytes: int, seconds: float) -> bytes:
    """Read the body of a request. Raises HTTPException: 413 for more than `most_bytes`, 408 if it takes longer than
    `seconds`."""
    declared = request.headers.get("content-length", "0")
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            if len(declared) <= _MOST_DIGITS and int(declared) <= most_bytes:
                async for part in request.stream():
                    body += part
                    if len(body) > most_bytes:
                        break
                else:
                    return bytes(body)
    except TimeoutError as error:
        raise HTTPException(408, f"the body did not arrive within {seconds:g} s", _CLOSE) from error
    raise HTTPException(413, f"the body has more than {most_bytes} bytes", _CLOSE)


_CLOSE = {"Connection": "close"}
"""Makes the client close the connection, because the rest of the body is not read."""


def tagged(request: Request, body: bytes, media_type: str, file: str = "", *, public: bool = False) -> Response:
    """Answer 200 with an ETag of the content, or 304 if the client already has the content. A browser with cookies must
    not store the content, because it would show it after the person has signed out.

    file: the name under which a browser saves the content; "" to display it.
    public: whether everybody may see the content."""
    tag = f'"{hashlib.sha256(body).hexdigest()}"'
    forgotten = "cookie" in request.headers and not public
    headers = {"ETag": tag, "Cache-Control": "no-store" if forgotten else "private, no-cache"}
    if file:
        headers["Content-Disposition"] = f'attachment; filename="{file}"'
    known = {part.strip().removeprefix("W/") for part in request.headers.get("if-none-match", "").split(",")}
    if tag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type=media_type)


def static_routes(files: Mapping[str, tuple[bytes, str]]) -> list[Route]:
    """Return the routes of files that need no authentication. files: the content and its media type, by path."""

    def route(path: str, content: bytes, media_type: str) -> Route:
        async def answer(request: Request) -> Response:
            return tagged(request, content, media_type, public=True)

        return Route(path, answer)

    return [route(path, *file) for path, file in files.items()]
