"""/metrics and /livez over HTTP: small, read-only, bounded.

At most four requests at a time, five seconds each; nothing is computed here but the text of what the
collectors already know. Answers 404 for anything else. Must not block the sampling thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from agent.errors import PortUnavailable

MAX_REQUESTS = 4
TIMEOUT_S = 5.0


class Exposition:
    """Serves until `close`. text: one scrape; alive: what /livez asks. Raises PortUnavailable."""

    def __init__(self, host: str, port: int, text: Callable[[], bytes], alive: Callable[[], bool]) -> None:
        handler = type("Handler", (_Handler,), {"text": staticmethod(text), "alive": staticmethod(alive)})
        try:
            self._server = _Server((host, port), handler)
        except OSError as error:
            raise PortUnavailable(f"metrics port {host}:{port} cannot be opened: {error.strerror}") from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._slots = threading.BoundedSemaphore(MAX_REQUESTS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is nothing to report."""


class _Handler(BaseHTTPRequestHandler):
    text: Callable[[], bytes]
    alive: Callable[[], bool]
    timeout = TIMEOUT_S
    server_version = "gputally-agent"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            from agent.metrics.promtext import CONTENT_TYPE

            # Whatever else a scraper would take: every one takes this, and nothing is quicker to write.
            self._answer(200, CONTENT_TYPE, self.text())
        elif path == "/livez":
            alive = self.alive()
            self._answer(200 if alive else 503, "text/plain", b"ok\n" if alive else b"sampling stands still\n")
        else:
            self._answer(404, "text/plain", b"/metrics or /livez\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not events."""

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
