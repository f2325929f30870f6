"""Calls to other servers: no redirect, no unwanted proxy, bounded answers, one line for a failure."""

from __future__ import annotations

import contextlib
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from accountant.wire.typed_accountant_client import AccountantClient
from gputally.base import http_calls
from gputally.base.accountant_connection import AccountantConnection, Unanswered
from gputally.base.called_off import CalledOff, Work, make_current
from gputally.base.prometheus_api import Prometheus
from gputally.testing.http_server import Handler, Trickling, TricklingHead, listening


class Fault(Exception):
    """An exception of the caller."""


def test_no_redirect_is_followed() -> None:
    """A redirect could send a token to another server."""
    away = httpx2.MockTransport(lambda _: httpx2.Response(302, headers={"Location": "http://elsewhere"}))
    with http_calls.client(http_calls.tls_context(None, Fault), 1, transport=away) as client:
        assert client.get("http://here").status_code == 302


def test_a_proxy_of_the_environment_is_not_asked_for_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    with pytest.raises(Unanswered, match=r"^http://ledger\.invalid: .*(not known|resolution)"):
        AccountantClient("http://ledger.invalid").get("/v1/usage")


def test_a_body_is_read_up_to_its_bound() -> None:
    large = httpx2.MockTransport(lambda _: httpx2.Response(200, content=b"x" * 100))
    with http_calls.client(http_calls.tls_context(None, Fault), 1, transport=large) as client:
        for most, found in ((100, b"x" * 100), (99, None)):
            with client.stream("GET", "http://here") as response:
                assert http_calls.read_bounded(response, most) == found


@pytest.mark.parametrize("part", ["headers", "body"])
def test_a_server_that_sends_a_byte_now_and_then_is_left_and_the_reason_is_said(part: str) -> None:
    """It would hold a thread for as long as it likes: every byte begins a socket's own time limit anew."""
    left = threading.Event()

    class Watched(Trickling):
        begin = b"HTTP/1.0 200 OK\r\nContent-Length: 999999999\r\n" + (b"\r\n" if part == "body" else b"X-Long: ")

        def do_GET(self) -> None:
            super().do_GET()
            left.set()

    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with listening(Watched) as url:
        with pytest.raises(httpx2.ReadTimeout, match=r"no whole answer within 0\.5 s"):
            http_calls.exchange(tls, "GET", url, seconds=0.5, most_bytes=10**9)
        assert left.wait(30), "the connection is closed"


def test_a_call_of_work_that_nobody_waits_for_ends_and_no_other_one() -> None:
    asked, answers = threading.Semaphore(0), threading.Event()

    class Hanging(Handler):
        def do_GET(self) -> None:
            asked.release()
            answers.wait()
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

    work = Work()

    def called_off_call(connection: AccountantConnection) -> None:
        make_current(work)
        connection.get("/")

    with listening(Hanging) as url, AccountantConnection(url) as shared, ThreadPoolExecutor(2) as threads:
        try:
            other = threads.submit(shared.get, "/")
            mine = threads.submit(called_off_call, shared)
            for _ in range(2):
                assert asked.acquire(timeout=30)
            work.call_off()
            with pytest.raises(CalledOff):
                mine.result(30)
            with pytest.raises(CalledOff):
                threads.submit(called_off_call, shared).result(30)
            assert not other.done()
        finally:
            answers.set()
        assert other.result(30) == b""


@pytest.mark.parametrize("url", ["here", "ftp://here", "http://", "file:///etc/passwd"])
def test_what_is_no_address_is_said(url: str) -> None:
    with pytest.raises(Fault, match=r"^not an address: "):
        http_calls.address(url, "http://ledger:8080", Fault)


def test_a_token_and_authorities_that_cannot_be_used_are_one_line(tmp_path: Path) -> None:
    token, authorities = tmp_path / "token", tmp_path / "ca.pem"
    token.write_bytes("ü".encode())
    authorities.write_text("none")
    with pytest.raises(Fault, match=r"token: not ASCII text$"):
        http_calls.read_token(token, Fault)
    with pytest.raises(Fault, match=r"ca\.pem: it contains no certificate$"):
        http_calls.tls_context(authorities, Fault)
    with pytest.raises(Fault, match=r"none\.pem: No such file or directory$"):
        http_calls.tls_context(tmp_path / "none.pem", Fault)


def test_a_failure_is_told_in_the_systems_words() -> None:
    with (
        http_calls.client(http_calls.tls_context(None, Fault), 5) as client,
        pytest.raises(httpx2.ConnectError) as raised,
    ):
        client.get("http://127.0.0.1:1")
    assert http_calls.reason(raised.value) == "Connection refused"
    assert http_calls.reason(ValueError()) == "ValueError"


def test_headers_that_trickle_are_not_waited_for(tmp_path: Path) -> None:
    """Each client of the three stages: those of one exchange, and those that reuse connections."""
    tls = http_calls.tls_context_for(httpx2.URL("http://x"), None, ValueError)
    with listening(TricklingHead) as url:
        with pytest.raises(httpx2.HTTPError):
            http_calls.exchange(tls, "GET", url, seconds=0.2, most_bytes=100)
        with AccountantConnection(url, timeout_s=0.1) as reused:
            for ask in (
                lambda: reused.get("/"),
                lambda: reused.save("/", tmp_path / "saved"),
                lambda: reused.probe("/"),
            ):
                with pytest.raises(Unanswered):
                    ask()
        with pytest.raises(Fault):
            Prometheus(url, Fault, timeout_s=0.1).instant("up", 0)


def test_a_client_that_left_one_answer_asks_again() -> None:
    class OnceTrickling(TricklingHead):
        slow = iter([True])

        def do_GET(self) -> None:
            super().do_GET() if next(self.slow, False) else self.say(200, b"{}")

    def answers() -> bool:
        with contextlib.suppress(Unanswered):  # on a busy machine also a prompt answer may be late
            return reused.get("/") == b"{}"
        return False

    with listening(OnceTrickling) as url, AccountantConnection(url, timeout_s=0.1) as reused:
        assert not answers()
        assert any(answers() for _ in range(100))
