"""Serves the pages of accountant and controller at one address in one process, as a proxy does for two."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

CONTROLLER = "/shares"
"""The path of all pages of the controller."""


class OneAddress:
    """An ASGI application that passes the paths of the controller's pages to it, and everything else to the
    accountant."""

    def __init__(self, accountant: ASGIApp, controller: ASGIApp) -> None:
        self._accountant = accountant
        self._controller = controller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        of_controller = scope["type"] == "http" and (path == CONTROLLER or path.startswith(CONTROLLER + "/"))
        await (self._controller if of_controller else self._accountant)(scope, receive, send)
