"""The ports without credentials answer under names of the cluster only, and work for nobody who has gone."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from accountant.composition import Service
from accountant.core.settings import Settings
from gputally.base.called_off import CalledOff
from gputally.base.clock import VirtualClock
from gputally.base.host_names import is_private
from gputally.server.turns import GONE, TurnLimits, Turns
from tests import empty_ledger


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Any:
    settings = {
        "auth": "off", "data": empty_ledger.data(tmp_path_factory.mktemp("ports") / "data"),
        "kai_usage": {"listen": "127.0.0.1:1"}, "opencost": {"listen": "127.0.0.1:2", "hosts": ["costs.example.com"]},
    }  # fmt: skip
    service = Service(Settings.model_validate(settings), VirtualClock(1_790_812_800_000))
    yield {listener.what: listener.app for listener in service.listeners}
    service.close()


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("10.1.2.3:9003", True), ("[fd00::1]:9003", True), ("localhost:9003", True), ("gputally-accountant", True),
        ("gputally-accountant.gputally.svc:9003", True), ("gputally-accountant.gputally.svc.cluster.local", True),
        ("costs.example.com", None), ("COSTS.example.com:9003", None), ("evil.example", False),
        ("10.1.2.3.evil.example", False), ("localhost.evil.example:9003", False), ("svc.evil.example", False),
        ("costs.example.com.evil.example", False), ("", False), ("[", False), ("evil.example:9003:1", False),
    ],
)  # fmt: skip
def test_a_port_answers_under_names_that_no_stranger_can_have(ports: Any, host: str, known: bool | None) -> None:
    """None: only at the port whose settings name the host."""
    for what, path in (("opencost", "/clusterInfo"), ("kai_usage", "/-/ready")):
        answer = TestClient(ports[what]).get(path, headers={"Host": host})
        expected = what == "opencost" if known is None else known
        assert answer.status_code == (200 if expected else 421), what


@given(st.text())
def test_every_host_header_is_decided(host: str) -> None:
    assert is_private(host) in (True, False)


def test_who_has_gone_is_not_worked_for() -> None:
    done: list[str] = []
    begun, goes_on = threading.Event(), threading.Event()

    def work(name: str) -> Response:
        begun.set()
        goes_on.wait(30)
        done.append(name)
        return PlainTextResponse(name)

    turns = Turns("queries", TurnLimits(running=1, running_by_caller=1))

    async def answer(request: Request) -> Response:
        try:
            return await turns.run(request, work, request.url.query)
        except CalledOff:
            return GONE

    app = Starlette(routes=[Route("/", answer)])

    async def ask(name: str, gone: asyncio.Event) -> int:
        scope = {"type": "http", "method": "GET", "path": "/", "query_string": name.encode(), "headers": []}
        statuses: list[int] = []

        async def receive() -> Any:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        await app(scope, receive, send)
        return statuses[0]

    async def run() -> list[int]:
        gone, stays = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(ask("first", stays))
        await asyncio.to_thread(begun.wait, 30)
        others = [asyncio.create_task(ask(f"{number}", gone)) for number in range(20)]
        last = asyncio.create_task(ask("last", stays))
        await asyncio.sleep(0)
        gone.set()
        goes_on.set()
        return [await task for task in (first, *others, last)]

    assert asyncio.run(run()) == [200, *[499] * 20, 200]
    assert done == ["first", "last"]
