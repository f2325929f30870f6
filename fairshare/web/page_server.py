"""Serves the controller's pages over HTTP."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import parse_qs, unquote, urlsplit

from fairshare.http_server import MOST_DIGITS, TimedHandler, listening
from fairshare.web.http_messages import Answer, Request

MOST_BYTES = 2 * 1024 * 1024
"""Of a form: a policy of two thousand queues is half of it."""
MOST_FIELDS = 25_000
MOST_AT_ONCE = 16
BODY_S = 10.0
TEXT = "text/plain; charset=utf-8"
Told = Callable[[str, str, int, float], None]
"""Hears of every answer: method, path, status, seconds."""


@contextmanager
def serve_pages(
    host: str,
    port: int,
    answer: Callable[[Request], Answer],
    *,
    told: Told | None = None,
    tls: ssl.SSLContext | None = None,
) -> Iterator[str]:
    """Serve until the context ends; yields the base URL. port 0: any free one. Raises CannotListen."""
    places = threading.BoundedSemaphore(MOST_AT_ONCE)

    class Handler(TimedHandler):
        server_version = "gputally"
        sys_version = ""
        protocol_version = "HTTP/1.1"
        timeout = 30

        def do_GET(self) -> None:  # noqa: N802  # the base's
            self._serve("GET", {})

        def do_POST(self) -> None:  # noqa: N802  # the base's
            length = self.headers.get("Content-Length", "")[:MOST_DIGITS]
            kind = self.headers.get_content_type()
            if not length.isascii() or not length.isdigit():
                self._refuse(411, "Content-Length is missing")
            elif int(length) > MOST_BYTES:
                self._refuse(413, f"more than {MOST_BYTES} bytes")
            elif kind != "application/x-www-form-urlencoded":
                self._refuse(415, "forms are application/x-www-form-urlencoded")
            else:
                content = self.body(int(length), BODY_S)
                try:
                    form = parse_qs(content.decode(), keep_blank_values=True, max_num_fields=MOST_FIELDS)
                except ValueError:
                    self._refuse(400, "not a form, or one with too many fields")
                    return
                self._serve("POST", form)

        def _serve(self, method: str, form: dict[str, list[str]]) -> None:
            started = time.monotonic()
            asked = urlsplit(self.path)
            try:
                query = parse_qs(asked.query, max_num_fields=100)
            except ValueError:
                self._refuse(400, "too many parameters")
                return
            headers = {name.lower(): value for name, value in self.headers.items()}
            if not places.acquire(timeout=5):
                self._refuse(503, "too many requests at once; try again")
                return
            try:
                found = answer(Request(method, unquote(asked.path), query, form, headers))
            finally:
                places.release()
            self._answer(found)
            if told is not None:
                told(method, asked.path, found.status, time.monotonic() - started)

        def _refuse(self, status: int, reason: str) -> None:
            self.close_connection = True  # a body may be left unread
            self._answer(Answer(f"{reason}\n".encode(), TEXT, status))

        def _answer(self, answer: Answer) -> None:
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.type)
            self.send_header("Content-Length", str(len(answer.body)))
            for name, value in answer.headers.items():
                self.send_header(name, value)
            for cookie in answer.cookies:
                self.send_header("Set-Cookie", cookie)
            self.end_headers()
            self.wfile.write(answer.body)

        def log_message(self, format: str, *args: object) -> None:
            """`told` hears of it."""

    with listening(host, port, Handler, "fairshare-pages", tls) as url:
        yield url
