"""The route `/mcp` of the accountant. It admits readers only, and loads the protocol's library at its first request."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import TYPE_CHECKING, Final

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from accountant.api.access_control import admit
from accountant.api.dependencies import deps_of

if TYPE_CHECKING:
    from accountant.assistant.mcp_server import McpEndpoint


class _Mcp:
    """Checks the caller before the body is read."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        await admit(request, await deps_of(request), "read")
        endpoint = await asyncio.to_thread(_endpoint)
        await endpoint(scope, receive, send)


@cache
def _endpoint() -> McpEndpoint:
    from accountant.assistant.mcp_server import McpEndpoint

    return McpEndpoint()


ROUTE: Final = Route("/mcp", _Mcp(), methods=["POST"], include_in_schema=False)
