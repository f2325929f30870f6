"""Connections that occupy room: half-open, half-sent, slow, unread. Other clients are still served."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trustme
from starlette.types import Receive, Scope, Send

from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import VirtualClock
from gputally.server.https_server import Tls, TlsFiles, serve
from gputally.server.rate_and_connection_limits import ConnectionLimits, Connections
from tests.deadlines import patience_s, until

SOON = ConnectionLimits(connections=40, connections_by_address=20, header_seconds=0.3, stalled_seconds=0.3)


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """An app that echoes the body; /early answers before it arrives, /large has a long answer."""
    if scope["path"] == "/large":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * 50_000_000})
        return
    body = b""
    more = scope["path"] != "/early"
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    head = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": body})


def address(url: str) -> tuple[str, int]:
    found = httpx2.URL(url)
    return found.host, found.port or 0


def ended(connection: socket.socket, within: float = 5.0) -> bool:
    """Return whether the server closes the connection, whatever it sends before."""
    connection.settimeout(within)
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


@contextmanager
def dialled(url: str, many: int, source: str = "127.0.0.1") -> Iterator[list[socket.socket]]:
    with ExitStack() as open_:
        yield [
            open_.enter_context(socket.create_connection(address(url), source_address=(source, 0))) for _ in range(many)
        ]


def test_one_address_cannot_take_all_connections():
    with serve(app, "127.0.0.1", 0, limits=SOON) as url, dialled(url, 60, "127.0.0.2"):
        assert httpx2.get(url).status_code == 200


def test_all_addresses_together_take_no_more_than_the_bound_and_give_it_back():
    with serve(app, "127.0.0.1", 0, limits=SOON) as url:
        with dialled(url, 20, "127.0.0.2"), dialled(url, 20, "127.0.0.3"), dialled(url, 1, "127.0.0.4") as one:
            assert ended(one[0])
        # Headers were due in 0.3 s: the places are free again.
        limit = time.monotonic() + 5
        while time.monotonic() < limit:
            with dialled(url, 1, "127.0.0.4") as one:
                one[0].sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                try:
                    if one[0].recv(100).startswith(b"HTTP/1.1 200"):
                        return
                except ConnectionError:
                    continue
        pytest.fail("no place was given back")


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\r\n",
        b"GET / HTTP/1.1\r\nHost:",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET /",
        b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nsome",
    ],
)
def test_what_is_half_said_is_not_waited_for(said):
    with serve(app, "127.0.0.1", 0, limits=SOON) as url, dialled(url, 1) as (one,):
        one.sendall(said)
        assert ended(one)


def test_headers_that_trickle_are_not_waited_for():
    with serve(app, "127.0.0.1", 0, limits=SOON) as url, dialled(url, 1) as (one,):
        limit = time.monotonic() + 5
        over = False
        while not over and time.monotonic() < limit:
            try:
                one.sendall(b"G")
                over = ended(one, 0.05)
            except ConnectionError:
                over = True
        assert over


def test_headers_without_end_are_not_kept():
    with serve(app, "127.0.0.1", 0, limits=SOON) as url, dialled(url, 1) as (one,), pytest.raises(ConnectionError):
        one.sendall(b"GET / HTTP/1.1\r\n" + (b"X: " + b"y" * 8_000 + b"\r\n") * 5_000)


def test_a_connection_between_two_requests_stays_open():
    with serve(app, "127.0.0.1", 0, limits=SOON) as url, dialled(url, 1) as (one,):
        for _ in range(2):
            one.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi")
            said = b""
            while not said.endswith(b"hi"):
                said += one.recv(1000)
            assert not ended(one, SOON.header_seconds * 2)


def test_an_answer_that_is_not_read_is_given_up():
    with serve(app, "127.0.0.1", 0, limits=SOON) as url, dialled(url, 1) as (one,):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        connections_open = True
        limit = time.monotonic() + 5
        while connections_open and time.monotonic() < limit:
            try:
                one.sendall(b"\r\n")
            except ConnectionError:
                connections_open = False
        assert not connections_open


@pytest.fixture
def identified(tmp_path: Path) -> tuple[TlsFiles, ssl.SSLContext]:
    """A server's certificate and key, and a context that trusts it."""
    authority, trusted = trustme.CA(), ssl.create_default_context()
    issued = authority.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "tls.crt")
    issued.private_key_pem.write_to_path(tmp_path / "tls.key")
    authority.configure_trust(trusted)
    return TlsFiles(tmp_path / "tls.crt", tmp_path / "tls.key"), trusted


def test_a_tls_handshake_that_does_not_end_takes_a_place_for_seconds_only(identified):
    identity, trusted = identified
    tls = Tls(identity)
    with serve(app, "127.0.0.1", 0, tls, SOON) as url, dialled(url, 30, "127.0.0.2") as half_open:
        assert httpx2.get(url, verify=trusted).status_code == 200
        assert all(ended(one) for one in half_open)


def test_connections_are_counted_by_address():
    counted = Connections(ConnectionLimits(connections=30, connections_by_address=2))
    assert [counted.enter(each) for each in "aaab"] == [True, True, False, True]
    counted.leave("a")
    assert counted.enter("a")
    assert (counted.open, counted.refused) == (3, 1)


def test_a_tls_client_that_does_not_answer_the_end_of_its_connection_holds_up_no_shutdown(identified):
    identity, trusted = identified
    with ExitStack() as open_:
        with serve(app, "127.0.0.1", 0, Tls(identity)) as url:
            plain = open_.enter_context(socket.create_connection(address(url)))
            secure = open_.enter_context(trusted.wrap_socket(plain, server_hostname="127.0.0.1"))
            secure.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert secure.recv(100).startswith(b"HTTP/1.1 200")
            began = time.monotonic()
        assert time.monotonic() - began < patience_s(5)


def test_a_defect_while_a_connection_is_opened_gives_its_place_back(identified):
    """Two places: if the first two connections kept theirs, the third would be refused."""

    class Broken(Tls):
        failures = 2

        def renew(self) -> bool:
            if self.failures:
                self.failures -= 1
                raise ValueError("I/O operation on closed file")
            return False

    tls = Broken(identified[0])
    limits = ConnectionLimits(connections=4, connections_by_address=2, header_seconds=5)
    with serve(app, "127.0.0.1", 0, tls, limits, renew=True) as url:
        for _ in range(2):
            with socket.create_connection(address(url)) as connection:
                assert ended(connection)
        with socket.create_connection(address(url)) as one, socket.create_connection(address(url)) as other:
            assert not ended(one, within=0.2)
            assert not ended(other, within=0.2)


def test_a_listener_whose_loop_is_held_up_is_a_fault_of_its_task() -> None:
    clock, held, release = VirtualClock(0), threading.Event(), threading.Event()
    tasks = BackgroundTasks(clock)

    async def holding(scope: Scope, receive: Receive, send: Send) -> None:
        held.set()
        release.wait(30)  # on the loop: nothing else is answered meanwhile
        await app(scope, receive, send)

    with serve(holding, "127.0.0.1", 0, name="http", tasks=tasks) as url, ExitStack() as open_:
        until(lambda: tasks.states()["http"].running_s is not None, "the loop does not tick")
        assert not tasks.faults()
        asking = threading.Thread(target=lambda: httpx2.get(url, timeout=60))
        asking.start()
        open_.callback(asking.join)
        open_.callback(release.set)
        assert held.wait(30)
        clock.advance(59_000)
        assert tasks.faults() == {"http": "has not ended for 59 s"}
        release.set()
        until(lambda: not tasks.faults(), "the loop does not go on")
    assert not tasks.faults(), "it was told to stop"


class RaisesOnce(int):
    """A limit with a defect: the first comparison raises."""

    raised = False

    def __le__(self, other: int) -> bool:
        if not RaisesOnce.raised:
            RaisesOnce.raised = True
            raise KeyError("a defect")
        return super().__le__(other)


def test_a_listener_that_stops_accepting_begins_anew_and_counts_it(logs: list[Any]) -> None:
    tasks, limits = BackgroundTasks(VirtualClock(0)), ConnectionLimits(connections_by_address=RaisesOnce(100))
    with serve(app, "127.0.0.1", 0, limits=limits, tasks=tasks) as url:
        with socket.create_connection(address(url)):
            until(lambda: tasks.states()["http"].failures == 1, "the defect is not counted")
        assert httpx2.get(url, timeout=60).status_code == 200
        until(lambda: not tasks.faults(), "it accepts again")
    assert [line["event"] for line in logs] == ["accepting_failed"]
