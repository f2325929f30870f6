"""Between the agents and the accountant: a network that sometimes loses an answer, and a server that is
away for an hour. An ASGI application around the accountant's, so that both sides run unchanged."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class UnreliableWire:
    """away: nobody answers but a proxy. lose_next_ack: the next batch arrives and is booked, but its sender
    never hears of it. Both are set from outside, between requests."""

    def __init__(self, app: App) -> None:
        self._app = app
        self.away = False
        self.lose_next_ack = False
        self.acks_lost = 0
        self.refused = 0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self.away:
            self.refused += 1
            await _consume(receive)
            await _bad_gateway(send)
        elif self.lose_next_ack and (scope["method"], scope["path"]) == ("POST", "/v1/usage"):
            self.lose_next_ack = False
            self.acks_lost += 1
            await self._app(scope, receive, _nowhere)
            await _bad_gateway(send)
        else:
            await self._app(scope, receive, send)


async def _consume(receive: Receive) -> None:
    while (await receive()).get("more_body", False):
        pass


async def _nowhere(_message: Message) -> None:
    pass


async def _bad_gateway(send: Send) -> None:
    body = b"bad gateway"
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 502, "headers": headers})
    await send({"type": "http.response.body", "body": body})
