"""At `/mcp`, many calls, slow clients and tools of other packages stop neither the accountant nor other tools."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client

from accountant.api.dependencies import Deps
from accountant.assistant.mcp_server import server
from accountant.composition import Service
from accountant.wire.typed_accountant_client import AccountantClient
from gputally.base.clock import VirtualClock
from gputally.server.https_server import serve
from tests.deadlines import until
from tests.fakes.gated_ledger import Gate, GatedLedger
from tests.fakes.memory_ledger import NOW_MS
from tests.http.conftest import bearer, settings_in, token_entry
from tests.plugins.conftest import folder as folder
from tests.plugins.installed import install

TOKENS = "tokens:\n" + token_entry("lead", "read") + token_entry("other", "read")
PUBLIC = "https://gpus.example/tally"
SPAN = "?start=2026-11-01&end=2026-11-02"
WHOLE = {"by": "team", "start": "2026-11-01", "end": "2026-11-02"}
HEADERS = {"accept": "application/json, text/event-stream"}
FOREIGN = '''
import threading
from accountant.assistant.protocol import AssistantTool
from accountant.wire.typed_accountant_client import AccountantClient

released = threading.Event()

def hangs(accountant: AccountantClient) -> dict[str, object]:
    """Hangs."""
    released.wait()
    return {}

def leaves(accountant: AccountantClient) -> dict[str, object]:
    """Leaves."""
    raise SystemExit(1)

def asks(accountant: AccountantClient, size: int = 1) -> dict[str, object]:
    """Asks."""
    return {"asked": accountant.get("/v1/budgets").decode(), "size": size}

def unknown(accountant: AccountantClient, size: "NoSuchType") -> dict[str, object]:
    """Unknown."""

def nothing() -> dict[str, object]:
    """Takes nothing."""

def twice(accountant: AccountantClient, ctx: int) -> dict[str, object]:
    """Has a parameter of the library."""

HANGS, LEAVES, ASKS, UNKNOWN, NOTHING, TWICE, USAGE = (
    AssistantTool(name, tool) for name, tool in {
        "hangs": hangs, "leaves": leaves, "asks": asks, "unknown": unknown, "nothing": nothing, "twice": twice,
        "usage": nothing,
    }.items()
)
'''


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open()


@contextmanager
def running(path: Path, gate: Gate, called_off_s: float = 5.0, **limits: float) -> Iterator[tuple[Service, str]]:
    """An accountant that computes at most three reads at a time, two of one caller, which wait at the gate."""
    settings = settings_in(
        path, tokens=TOKENS, limits={"reads": 3, "reads_by_caller": 2, **limits}, public_url=f"{PUBLIC}/"
    )
    with Service(settings, VirtualClock(NOW_MS)) as service:
        deps: Deps = service.app.state.deps
        object.__setattr__(deps, "ledger", GatedLedger(deps.ledger, gate))
        with serve(service.app, "127.0.0.1", 0, called_off_s=called_off_s) as url:
            yield service, url


def call(url: str, token: str, tool: str = "usage", **arguments: Any) -> Any:
    """Call a tool with one request, and return the answer's result."""
    params = {"name": tool, "arguments": arguments or (WHOLE if tool == "usage" else {})}
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    answer = httpx2.post(f"{url}/mcp", json=body, headers={**bearer(token), **HEADERS}, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["result"]


def test_more_calls_than_threads_are_answered_and_stop_nobody(tmp_path: Path, gate: Gate) -> None:
    with running(tmp_path, gate) as (_, url), ThreadPoolExecutor(24) as senders:
        flood = [senders.submit(call, url, "lead") for _ in range(20)]
        until(lambda: gate.inside == 2, "two questions of the caller should run")
        tool: Future[Any] = senders.submit(call, url, "other")
        until(lambda: gate.inside == 3, "another caller's tool should have a turn")
        gate.open()
        read = httpx2.get(f"{url}/v1/usage{SPAN}", headers=bearer("other"), timeout=120)
        assert read.status_code == 200
        assert not any(each.result()["isError"] for each in [*flood, tool])
        assert tool.result()["structuredContent"]["link"].startswith(f"{PUBLIC}/v1/usage?")


def test_a_server_that_stops_calls_off_the_questions_of_tools(tmp_path: Path, gate: Gate) -> None:
    with ThreadPoolExecutor(1) as senders:
        with running(tmp_path, gate, called_off_s=0) as (_, url):
            asked = senders.submit(call, url, "lead")
            until(lambda: gate.inside == 1, "the question should run")
        assert gate.inside == 0
        assert asked.result()["isError"]


def test_a_body_that_does_not_arrive_is_given_up(tmp_path: Path, gate: Gate) -> None:
    with running(tmp_path, gate, read_seconds=0.1) as (_, url):
        at = httpx2.URL(url)
        with socket.create_connection((at.host, at.port or 0), timeout=60) as client:
            client.sendall(
                b"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer lead\r\n"
                b"Accept: application/json, text/event-stream\r\nContent-Type: application/json\r\n"
                b"Content-Length: 500\r\n\r\n{"
            )
            assert client.recv(64).split()[1] == b"408"


def test_no_call_opens_a_stream_without_an_end(tmp_path: Path, gate: Gate) -> None:
    version, method = "2026-07-28", "subscriptions/listen"
    of_library = "io.modelcontextprotocol/"
    meta = {
        f"{of_library}protocolVersion": version, f"{of_library}clientInfo": {"name": "x", "version": "1"},
        f"{of_library}clientCapabilities": {},
    }  # fmt: skip
    params = {"notifications": {"toolsListChanged": True}, "_meta": meta}
    body = {"jsonrpc": "2.0", "id": "a", "method": method, "params": params}
    headers = {**bearer("lead"), **HEADERS, "mcp-protocol-version": version, "mcp-method": method}
    with running(tmp_path, gate) as (_, url):
        answer = httpx2.post(f"{url}/mcp", json=body, headers=headers, timeout=60)
        assert "error" in answer.json()


@pytest.fixture
def foreign(folder: Path) -> Any:
    """A package with tools, of which some cannot be used."""
    names = ("hangs", "leaves", "asks", "unknown", "nothing", "twice", "usage")
    points = {name: f"foreign_tools:{name.upper()}" for name in names} | {"lost": "a_module_that_is_not_there:TOOL"}
    install(folder, "foreign", {"gputally.assistant": points}, foreign_tools=FOREIGN)
    return folder


def test_a_tool_of_another_package_stops_neither_the_server_nor_other_tools(
    tmp_path: Path, gate: Gate, foreign: Path, logs: list[Any]
) -> None:
    gate.open()

    async def work(url: str, *, hangs: bool) -> None:
        patience = {"patience_s": 0.1} if hangs else {}
        async with Client(server(lambda *_: closing(AccountantClient(url, "lead")), **patience)) as client:
            if hangs:
                hanging = await asyncio.gather(*(client.call_tool("hangs", {}) for _ in range(40)))
                assert all(each.is_error for each in hanging)
            else:
                tools = {tool.name for tool in (await client.list_tools()).tools}
                assert {"hangs", "leaves", "asks", "usage"} <= tools
                assert tools.isdisjoint({"unknown", "nothing", "twice", "lost"})
                assert (await client.call_tool("leaves", {})).is_error
                assert (await client.call_tool("asks", {"size": 3})).structured_content["size"] == 3
            assert not (await client.call_tool("usage", WHOLE)).is_error

    with running(tmp_path, gate) as (_, url):
        import foreign_tools  # type: ignore[import-not-found]  # ty: ignore[unresolved-import]

        try:
            asyncio.run(work(url, hangs=True))
            asyncio.run(work(url, hangs=False))
        finally:
            foreign_tools.released.set()
    left_out = {one["tool"] for one in logs if one["event"] == "tool_left_out"}
    assert left_out == {"unknown", "nothing", "twice", "usage", "lost"}


def test_a_tool_of_another_package_asks_at_the_endpoint(tmp_path: Path, gate: Gate, foreign: Path) -> None:
    from accountant.assistant import route

    gate.open()
    route._endpoint.cache_clear()
    try:
        with running(tmp_path, gate) as (_, url):
            found = call(url, "lead", "asks", size=2)
            assert found["structuredContent"]["size"] == 2
            assert json.loads(found["structuredContent"]["asked"]) == []
    finally:
        route._endpoint.cache_clear()
