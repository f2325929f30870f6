"""What surrounds every request: an id, safe headers, the browser's cross-site rules, one log line.

Plain ASGI, so that it costs the ingest little and never touches a body. Logged are method, path,
status, time, who and which problem: never a token, never a query string.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from functools import lru_cache
from urllib.parse import urlsplit

import structlog
from fastapi.datastructures import Headers

from accountant.api.asgi import App, Message, Receive, Scope, Send
from accountant.api.problems import Refusal, answer
from accountant.callers.auth import is_loopback
from accountant.web import look
from agent.clock import Clock

HEADERS = look.headers()
_HEADERS = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
_QUIET = frozenset({"/livez", "/readyz", "/metrics", "/v1/usage"})
"""Asked every few seconds by machines: logged only at debug, unless something was wrong."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Guard:
    """Wraps the app. local_only: without tokens, only loopback names reach it (no DNS rebinding).
    answered: told the status of every answer."""

    def __init__(
        self, app: App, *, clock: Clock, local_only: bool, answered: Callable[[int], None] = lambda _: None
    ) -> None:
        self._app = app
        self._clock = clock
        self._local_only = local_only
        self._answered = answered
        self._log = structlog.get_logger("accountant.http")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = self._clock.monotonic_ms()
        headers = Headers(scope=scope)
        wanted = headers.get("x-request-id", "")
        request_id = wanted if _REQUEST_ID.fullmatch(wanted) else secrets.token_hex(8)
        state = scope.setdefault("state", {})
        status = 500
        started_answer = False

        async def guarded(message: Message) -> None:
            nonlocal status, started_answer
            if message["type"] == "http.response.start":
                status = message["status"]
                started_answer = True
                given = {name.lower() for name, _ in message["headers"]}
                added = [pair for pair in _HEADERS if pair[0] not in given]
                message["headers"] = [*message["headers"], *added, (b"x-request-id", request_id.encode())]
            await send(message)

        refusal = self._refusal(scope, headers)
        try:
            if refusal is None:
                await self._app(scope, receive, guarded)
        except Exception as error:  # noqa: BLE001  # the last stop: a defect is logged and answered
            self._log.error("request_failed", path=scope["path"][:200], request_id=request_id, exc_info=error)
            refusal = Refusal("internal", f"the failure was logged as {request_id}")
        try:
            if refusal is not None and not started_answer:
                state["problem"] = refusal.slug
                await answer(refusal, scope["path"])(scope, receive, guarded)
        finally:
            self._answered(status)
            level = "warning" if status >= 500 else "debug" if scope["path"] in _QUIET and status < 400 else "info"
            getattr(self._log, level)(
                "request",
                method=scope["method"],
                path=scope["path"][:200],
                status=status,
                milliseconds=self._clock.monotonic_ms() - started,
                principal=state.get("principal"),
                problem=state.get("problem"),
                request_id=request_id,
            )

    def _refusal(self, scope: Scope, headers: Headers) -> Refusal | None:
        if self._local_only and not _for_this_machine(scope, headers):
            return Refusal("wrong-host", "without tokens this service answers only under localhost or 127.0.0.1")
        if scope["method"] not in ("GET", "HEAD") and headers.get("sec-fetch-site", "none") not in (
            "none",
            "same-origin",
        ):
            return Refusal("cross-site", "a page of another site may not write here")
        return None


def _for_this_machine(scope: Scope, headers: Headers) -> bool:
    """Whether the caller used a loopback name; who sends no Host used the address."""
    host = headers.get("host")
    if host is None:
        server = scope.get("server")
        return server is not None and is_loopback(server[0])
    return _names_this_machine(host)


@lru_cache(maxsize=64)
def _names_this_machine(host: str) -> bool:
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False
