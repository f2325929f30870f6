"""Slow or silent clients do not block the controller's servers."""

from __future__ import annotations

import socket
import ssl
import time
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest
import trustme
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gputally.server.https_server import Identity, Tls, serve
from gputally.server.rate_and_connection_limits import ConnectionLimits
from gputally.server.request_handling import read_body

SOON = ConnectionLimits(connections=40, connections_by_address=10, header_seconds=0.3)


async def echo(request: Request) -> Response:
    return Response(await read_body(request, 100_000, 0.3) if request.method == "POST" else b"ok")


APP = Starlette(routes=[Route("/", echo, methods=["GET", "POST"])])


def dial(url: str, source: str = "127.0.0.1") -> socket.socket:
    found = httpx2.URL(url)
    return socket.create_connection((found.host, found.port or 0), source_address=(source, 0))


def ends(connection: socket.socket, trickle: bytes = b"") -> bool:
    """Whether the server closes it within five seconds, whatever trickles."""
    connection.settimeout(0.05)
    limit = time.monotonic() + 5
    while time.monotonic() < limit:
        try:
            if trickle:
                connection.sendall(trickle)
            if not connection.recv(100):
                return True
        except TimeoutError:
            continue
        except ConnectionError:
            return True
    return False


@pytest.mark.parametrize(
    ("said", "trickle"),
    [
        (b"", b""),
        (b"GET", b"G"),
        (b"GET / HTTP/1.1\r\nHost: ", b"x"),
        (b"POST / HTTP/1.1\r\nContent-Length: 100000\r\n\r\n", b"x"),
        (b"GET / HTTP/1.1\r\n\r\nGET /", b"x"),
    ],
    ids=["silence", "request line", "headers", "body", "second request"],
)
def test_what_trickles_is_not_waited_for(said: bytes, trickle: bytes) -> None:
    with serve(APP, "127.0.0.1", 0, None, SOON) as url, dial(url) as one:
        one.sendall(said)
        assert ends(one, trickle)


def test_a_connection_between_two_requests_stays_open() -> None:
    with serve(APP, "127.0.0.1", 0, None, SOON) as url, dial(url) as one:
        one.settimeout(2 * SOON.header_seconds)
        for _ in range(2):
            one.sendall(b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\nhi")
            said = b""
            while not said.endswith(b"hi"):
                said += one.recv(1000)
            with pytest.raises(TimeoutError):
                one.recv(1)


def test_one_address_cannot_take_all_connections_and_they_are_given_back() -> None:
    with serve(APP, "127.0.0.1", 0, None, SOON) as url, ExitStack() as open_:
        half_open = [open_.enter_context(dial(url, "127.0.0.2")) for _ in range(30)]
        assert httpx2.get(url).status_code == 200
        assert all(ends(one) for one in half_open)
        limit = time.monotonic() + 5
        while time.monotonic() < limit:
            with dial(url, "127.0.0.2") as one:
                one.settimeout(1)
                try:
                    one.sendall(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
                    if one.recv(100).startswith(b"HTTP/1.1 200"):
                        return
                except ConnectionError:
                    continue
        pytest.fail("no place was given back")


def test_unfinished_tls_handshakes_do_not_delay_other_requests(tmp_path: Path) -> None:
    authority = trustme.CA()
    mine, files = authority.issue_cert("127.0.0.1"), (tmp_path / "tls.crt", tmp_path / "tls.key")
    mine.cert_chain_pems[0].write_to_path(files[0])
    mine.private_key_pem.write_to_path(files[1])
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    with serve(APP, "127.0.0.1", 0, Tls(Identity(*files)), SOON) as url, ExitStack() as open_:
        half_open = [open_.enter_context(dial(url, "127.0.0.2")) for _ in range(30)]
        assert httpx2.get(url, verify=trusted).status_code == 200
        assert all(ends(one) for one in half_open)
