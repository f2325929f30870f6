"""Refuses requests under host names that a stranger's site can give itself (`gputally.base.host_names`)."""

from __future__ import annotations

from collections.abc import Collection

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from gputally.base.host_names import KnownHosts, refusal


class HostCheck:
    """An ASGI application that passes requests under known names to another one, and answers 421 to others.

    hosts: further names, without port.
    setting: where they are set, for the refusal."""

    def __init__(self, app: ASGIApp, hosts: Collection[str], setting: str) -> None:
        self._app = app
        self._known = KnownHosts(hosts)
        self._setting = setting

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._known.knows(
            next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), None)
        ):
            await self._app(scope, receive, send)
            return
        await PlainTextResponse(refusal(self._setting), 421)(scope, receive, send)
