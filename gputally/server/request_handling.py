"""Wraps an ASGI application so that every response has its headers and every defect is logged, and reads bodies within
bounds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

import structlog
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

Answered = Callable[[str, str, int, float], None]
"""Called after each response: method, path as sent, status, seconds."""


class RequestLog:
    """Wraps a Starlette application, which answers 500 for what it raises. headers: of every response that does not
    set them itself."""

    def __init__(
        self, app: ASGIApp, name: str, *, headers: Mapping[str, str] | None = None, answered: Answered | None = None
    ) -> None:
        self._app = app
        self._headers = [(key.lower().encode(), value.encode()) for key, value in (headers or {}).items()]
        self._answered = answered
        self._log = structlog.get_logger(name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, status = time.monotonic(), 500

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                given = {key.lower() for key, _ in message["headers"]}
                message["headers"] = [*message["headers"], *(pair for pair in self._headers if pair[0] not in given)]
            await send(message)

        try:
            await self._app(scope, receive, observed)
        except ClientDisconnect:
            return
        except Exception as error:  # noqa: BLE001  # the last stop: a defect is logged once
            self._log.error("request_failed", path=scope.get("path", "")[:200], exc_info=error)
        if self._answered is not None and scope["type"] == "http":
            path = scope.get("raw_path", b"").decode("ascii", "replace")
            self._answered(scope["method"], path, status, time.monotonic() - started)


async def read_body(request: Request, most_bytes: int, seconds: float) -> bytes:
    """The body, if it is not larger and comes in time. Raises HTTPException."""
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
