"""The route `/mcp` of the accountant and of the fleet. It admits readers only, and loads the protocol's library at its
first request."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import TYPE_CHECKING, Final

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from accountant.api.access_control import admit
from accountant.api.dependencies import deps_of

if TYPE_CHECKING:
    from accountant.assistant.mcp_server import McpEndpoint


class _Mcp:
    """Checks the caller, reads the body within the limits of bodies, and waits for a turn of the caller."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        deps = await deps_of(request)
        principal = await admit(request, deps, "read")
        endpoint = await asyncio.to_thread(_endpoint, of_ledgers=hasattr(request.app.state, "fleet"))
        async with deps.intake.body(request) as body, deps.turns.turn("tools", request, principal.name):
            await endpoint(scope, _again(body, receive), send)


def _again(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives a body that was read, and then what comes."""
    read: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def give() -> Message:
        return read.pop() if read else await receive()

    return give


@cache
def _endpoint(*, of_ledgers: bool) -> McpEndpoint:
    from accountant.assistant.mcp_server import McpEndpoint

    return McpEndpoint(of_ledgers=of_ledgers)


ROUTE: Final = Route("/mcp", _Mcp(), methods=["POST"], include_in_schema=False)
