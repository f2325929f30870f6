"""The demo's unreliable network loses exactly the requests that it should lose."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

from gputally.demo.accountant_process import Receive, Send, UnreliableWire


class Accountant:
    """Counts the requests that reach it and answers 200."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        self.seen.append(scope["path"])
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


def ask(wire: UnreliableWire, method: str = "POST", path: str = "/v1/usage", accept: str = "application/json") -> int:
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    headers = [(b"accept", accept.encode())]
    asyncio.run(wire({"type": "http", "method": method, "path": path, "headers": headers}, receive, send))
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    return int(sent[0]["status"])


def test_it_lets_everything_through_by_itself() -> None:
    accountant = Accountant()
    assert ask(UnreliableWire(accountant)) == 200
    assert accountant.seen == ["/v1/usage"]


def test_a_lost_answer_is_lost_once_and_the_batch_arrived() -> None:
    accountant = Accountant()
    wire = UnreliableWire(accountant)
    wire.lose_next_ack = True
    assert ask(wire, "GET", "/v1/windows") == 200
    assert ask(wire) == 502
    assert ask(wire) == 200
    assert accountant.seen == ["/v1/windows", "/v1/usage", "/v1/usage"]
    assert wire.acks_lost == 1


def test_nothing_arrives_while_the_accountant_is_away() -> None:
    accountant = Accountant()
    wire = UnreliableWire(accountant)
    wire.away = True
    assert (ask(wire), ask(wire, "GET", "/v1/windows")) == (502, 502)
    assert ask(wire, "GET", "/", "text/html,*/*") == 503, "a browser gets a page that names the simulated outage"
    assert accountant.seen == []
