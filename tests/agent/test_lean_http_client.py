"""The agent's HTTP client: an answer is read as a whole, within limits, over a connection that stays open."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import closing
from http.client import HTTPConnection

import pytest

from agent.core import lean_http_client
from agent.core.lean_http_client import HttpSender, Unreachable, page_reader, read_answer
from gputally.testing.http_server import Handler, Trickling, listening


def post(url: str) -> object:
    return HttpSender(url, None, 0.5).post("/", b"", {})


def metrics_page(url: str) -> object:
    return page_reader(f"{url}/metrics", 9400, "gpu_readers: dcgm")()


@pytest.mark.parametrize("ask", [post, metrics_page])
def test_an_answer_that_comes_byte_by_byte_ends_with_its_time_limit(
    monkeypatch: pytest.MonkeyPatch, ask: Callable[[str], object]
) -> None:
    """Else a slow server would hold the thread that uploads for as long as it likes."""
    monkeypatch.setattr(lean_http_client, "PAGE_TIMEOUT_S", 0.5)
    with listening(Trickling) as url, pytest.raises((Unreachable, OSError), match="no whole answer"):
        ask(url)


class Closing(Handler):
    """Closes its connection after each answer, as HTTP/1.0 does."""

    def do_GET(self) -> None:
        self.say(200, b"x" * 100)


@pytest.mark.parametrize(("handler", "most_bytes"), [(Closing, 100), (Closing, 10), (Trickling, 1_000_000)])
def test_an_answer_that_is_refused_leaves_no_socket_open(handler: type[Handler], most_bytes: int) -> None:
    with listening(handler) as url, closing(HTTPConnection(url.removeprefix("http://"), timeout=10)) as connection:
        connection.request("GET", "/")
        response = connection.getresponse()
        with contextlib.suppress(TimeoutError):
            read_answer(response, most_bytes, 0.2)
        assert response.isclosed()


class Answering(Handler):
    """Answers with as many bytes as the path says."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.content()
        size = int(self.path[1:])
        if size == 7:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n")
        elif size == 13:
            self.send_response(200)
            self.send_header("Content-Length", "13")
            self.end_headers()
            self.wfile.write(b"cut")
            self.close_connection = True
        else:
            self.say(200, b"x" * size)


def test_answers_of_every_form_are_whole_and_share_a_connection() -> None:
    connections: set[int] = set()

    class Counting(Answering):
        def do_POST(self) -> None:
            connections.add(self.client_address[1])
            super().do_POST()

    with listening(Counting) as url:
        sender = HttpSender(url, None, 10)
        assert [len(sender.post(f"/{size}", b"{}", {}).body) for size in (0, 5, 300_000, 7, 5)] == [0, 5, 300_000, 7, 5]
        assert len(connections) == 1
        with pytest.raises(Unreachable):
            sender.post("/13", b"{}", {})
        with pytest.raises(Unreachable, match="larger than"):
            sender.post(f"/{lean_http_client.MAX_ANSWER_BYTES + 1}", b"{}", {})
        assert len(sender.post("/5", b"{}", {}).body) == 5
        sender.close()
