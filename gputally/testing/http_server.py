"""The HTTP server on the loopback on which fakes are built."""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_PAUSE = threading.Event()
_ENDLESS = b"HTTP/1.0 200 OK\r\nContent-Length: 999999999\r\n\r\n"


class Handler(BaseHTTPRequestHandler):
    """A handler that sends whole responses and writes no log."""

    def content(self) -> bytes:
        """Return the request's body."""
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def say(self, status: int, content: bytes = b"", **headers: str) -> None:
        """Send a response. headers: names with `_` in place of `-`."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def trickle(self, begin: bytes = _ENDLESS) -> None:
        """Send this, and then a byte now and then until the client has gone."""
        with contextlib.suppress(OSError):
            self.wfile.write(begin)
            while True:
                self.wfile.write(b"x")
                _PAUSE.wait(0.01)

    def log_message(self, format: str, *args: object) -> None:
        """Write no log."""


class Trickling(Handler):
    """Sends answers that do not end. begin: how they begin."""

    begin = _ENDLESS

    def do_GET(self) -> None:
        self.content()
        self.trickle(self.begin)

    do_POST = do_GET  # noqa: N815


class TricklingHead(Handler):
    """Sends the headers of an answer so slowly that a client with a short time limit leaves. They end at some time."""

    def do_GET(self) -> None:
        self.content()
        with contextlib.suppress(OSError):
            self.wfile.write(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\nX-Long: ")
            for _ in range(300):
                self.wfile.write(b"x")
                _PAUSE.wait(0.02)
            self.wfile.write(b"\r\n\r\n{}")

    do_POST = do_GET  # noqa: N815


class LoopbackServer:
    """Runs on a free port until `close`. tls: serves TLS under the name `localhost` or 127.0.0.1."""

    def __init__(self, handler: type[BaseHTTPRequestHandler], tls: ssl.SSLContext | None = None) -> None:
        self._server = _Server(("127.0.0.1", 0), handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.port: int = self._server.server_address[1]
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def speak_tls(self, tls: ssl.SSLContext) -> str:
        """Serve TLS from now on, and return the URL with the name in the certificate."""
        self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        return f"https://localhost:{self.port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that hangs up or rejects the certificate."""


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler], tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Run a server until the block ends. Yields its address."""
    server = LoopbackServer(handler, tls)
    try:
        yield server.url
    finally:
        server.close()
