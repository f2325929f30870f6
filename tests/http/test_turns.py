"""One caller, one kind of work or a client that leaves does not stop the others: turns, probes and ingest."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from starlette.testclient import TestClient

from accountant.api.dependencies import Deps
from accountant.composition import Service
from accountant.core.periods import Month
from accountant.storage.duckdb_engine import Database
from gputally.base import called_off
from gputally.base.called_off import CalledOff, Work
from gputally.base.clock import VirtualClock
from gputally.server.https_server import serve
from gputally.server.turns import Busy, TurnLimits, Turns
from tests.deadlines import until
from tests.fakes.gated_ledger import Gate, GatedLedger
from tests.http.conftest import bearer, pod_minutes, settings_in, token_entry, token_list
from tests.price_books import price_book_text

LEADS = token_entry("lead", "read", ", teams: [vision]") + token_entry("other", "read", ", teams: [nlp]")


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open()


@pytest.fixture
def running(tmp_path: Path, clock: VirtualClock, gate: Gate) -> Iterator[tuple[Service, str]]:
    """An accountant that computes at most three reads at a time, two of one caller."""
    settings = settings_in(tmp_path, tokens=token_list(LEADS), limits={"reads": 3, "reads_by_caller": 2})
    with Service(settings, clock) as service:
        deps: Deps = service.app.state.deps
        object.__setattr__(deps, "ledger", GatedLedger(deps.ledger, gate))
        with serve(service.app, "127.0.0.1", 0, tasks=service.tasks) as url:
            yield service, url


def get(url: str, name: str, path: str = "/v1/usage?start=2026-11-01&end=2026-11-02") -> httpx2.Response:
    return httpx2.get(url + path, headers=bearer(name), timeout=60)


def test_a_callers_reads_wait_while_probes_ingest_and_other_callers_are_answered(
    running: tuple[Service, str], gate: Gate
) -> None:
    _, url = running
    with ThreadPoolExecutor(32) as senders:
        flood = [senders.submit(get, url, "lead") for _ in range(20)]
        until(lambda: gate.inside == 2, "two reads of the caller should run")
        assert get(url, "lead", "/readyz").status_code == 200
        raw = msgspec.json.encode(pod_minutes())
        sent = httpx2.post(url + "/v1/usage", content=raw, headers=bearer("token-of-ingest"), timeout=30)
        assert sent.status_code == 200
        assert get(url, "other", "/v1/prices/versions").status_code == 200
        other: Future[httpx2.Response] = senders.submit(get, url, "other")
        until(lambda: gate.inside == 3, "the other caller should have the third turn")
        assert not any(each.done() for each in flood)
        gate.open()
        assert {each.result().status_code for each in [*flood, other]} == {200}


def test_a_request_whose_client_has_gone_leaves_the_queue_and_its_work_ends(
    running: tuple[Service, str], gate: Gate, logs: list[Any]
) -> None:
    _, url = running
    at = httpx2.URL(url)
    request = b"GET /v1/usage?start=2026-11-01&end=2026-11-02 HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    clients = [socket.create_connection((at.host, at.port or 0)) for _ in range(6)]
    for client in clients:
        client.sendall(request + b"Authorization: Bearer lead\r\n\r\n")
    until(lambda: gate.inside == 2, "two reads should run")
    for client in clients:
        client.close()
    until(lambda: gate.inside == 0, "the reads of clients that have gone should end")
    gate.open()
    assert get(url, "lead").status_code == 200
    until(
        lambda: sum(one.get("problem") == "client-gone" for one in logs) == len(clients), "each request has a log line"
    )
    assert not [one for one in logs if one["event"] == "request_failed"], "a client that leaves is no defect"


def test_a_server_that_stops_ends_reads_that_run_or_wait_and_says_so(
    tmp_path: Path, clock: VirtualClock, gate: Gate
) -> None:
    settings = settings_in(tmp_path, tokens=token_list(LEADS), limits={"reads": 3, "reads_by_caller": 2})
    with Service(settings, clock) as service, ThreadPoolExecutor(8) as senders:
        deps: Deps = service.app.state.deps
        object.__setattr__(deps, "ledger", GatedLedger(deps.ledger, gate))
        with serve(service.app, "127.0.0.1", 0, called_off_s=0) as url:
            asked = [senders.submit(get, url, name) for name in ("lead", "lead", "lead", "other")]
            until(lambda: gate.inside == 3, "three reads should run")
            until(lambda: deps.turns._pools["reads"].waiting, "the fourth should wait")
        assert gate.inside == 0
        assert {each.result().status_code for each in asked} == {503}


def test_servers_stop_at_one_time_and_leave_clients_that_do_not_read(logs: list[Any]) -> None:
    """Each would otherwise wait its own 20 seconds for the client, one after the other."""
    over, content = threading.Event(), b"x" * 2**25

    async def large(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": content})

    with ExitStack() as ports:
        for _ in range(2):
            port = serve(large, "127.0.0.1", 0, name="stopping", called_off_s=0, over=over)
            at = httpx2.URL(ports.enter_context(port))
            client = ports.enter_context(socket.create_connection((at.host, at.port or 0)))
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert client.recv(1)
        over.set()
        running = [thread for thread in threading.enumerate() if thread.name == "stopping"]
        assert len(running) == 2
        until(lambda: not any(thread.is_alive() for thread in running), "both should end before the first block does")
    assert [one for one in logs if one["level"] == "error"] == [], "no request that had to be given up"


def test_a_query_of_the_engine_ends_when_its_work_is_called_off(tmp_path: Path) -> None:
    database, work = Database(tmp_path / "ledger.duckdb"), Work()
    begun = threading.Event()

    def ask() -> None:
        called_off.make_current(work)
        with database.cursor() as cursor:
            begun.set()
            cursor.run("SELECT count(*) FROM range(10000000000000) WHERE range % 7 = 3")

    try:
        with ThreadPoolExecutor(1) as thread:
            asked = thread.submit(ask)
            begun.wait()
            until(lambda: work.call_off() or asked.done(), "the query should end")
            with pytest.raises(CalledOff):
                asked.result()
        with database.cursor() as cursor:
            assert cursor.run("SELECT 1") == [(1,)]
    finally:
        database.close()


def test_a_reader_of_a_month_does_not_make_every_closed_month_be_billed_again(
    tmp_path: Path, clock: VirtualClock
) -> None:
    spent, counted = itertools.count(0, 10), []
    with Service(settings_in(tmp_path, prices=price_book_text(H100=2)), clock) as service:
        deps: Deps = service.app.state.deps
        service.app.state.deps = replace(deps, spent=lambda: float(next(spent)))  # everything takes ten seconds
        service.books.close(Month(2026, 9), "a", "r", acknowledged=("coverage", "grace"))
        found = service.books.proposals
        service.books.proposals = lambda month=None: counted.append(month) or found(month)  # type: ignore[method-assign]
        client = TestClient(service.app, base_url="http://127.0.0.1")
        for path in ("/v1/periods/2026-10", "/v1/periods/2026-08", "/v1/proposals", "/proposals") * 2:
            assert client.get(path).status_code == 200
    assert counted == [None]


class Stays:
    """A request whose client waits."""

    def __init__(self) -> None:
        self.scope: dict[str, Any] = {}

    async def receive(self) -> dict[str, str]:
        await asyncio.Event().wait()
        raise AssertionError


def test_turns_go_to_the_longest_waiting_caller_that_may_have_one() -> None:
    turns = Turns("reads", TurnLimits(running=2, running_by_caller=1, waiting=3, waiting_by_caller=2))
    order: list[str] = []

    async def take(caller: str, over: asyncio.Event) -> None:
        async with turns.turn(Stays(), caller):  # type: ignore[arg-type]
            order.append(caller)
            await over.wait()

    async def scenario() -> None:
        over = [asyncio.Event() for _ in range(4)]
        tasks = [asyncio.create_task(take(caller, end)) for caller, end in zip("aaab", over, strict=True)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (order, turns.waiting) == (["a", "b"], 2)
        with pytest.raises(Busy) as own:
            await take("a", over[0])
        await_c = asyncio.create_task(take("c", over[3]))
        await asyncio.sleep(0)
        with pytest.raises(Busy) as others:
            await take("d", over[0])
        assert (own.value.own, others.value.own) == (True, False)
        tasks[1].cancel()
        for end in over:
            end.set()
        await asyncio.gather(*tasks, await_c, return_exceptions=True)
        assert (sorted(order), turns.running, turns.waiting) == (["a", "a", "b", "c"], 0, 0)

    asyncio.run(scenario())


def test_a_request_that_waits_too_long_is_refused() -> None:
    turns = Turns("reads", TurnLimits(1, 1, patience_s=0.01))

    async def scenario() -> None:
        async with turns.turn(Stays(), "a"):  # type: ignore[arg-type]
            with pytest.raises(Busy):
                async with turns.turn(Stays(), "b"):  # type: ignore[arg-type]
                    pass
        assert (turns.running, turns.waiting) == (0, 0)

    asyncio.run(scenario())
