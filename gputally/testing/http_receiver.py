"""An HTTP server on the loopback that takes what a plug-in sends, refuses it, or hangs up without an answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

ACCEPTS, HANGS_UP = 200, 0
_MOST_BYTES: Final = 8 * 2**20


@dataclass
class HttpReceiver:
    """url: the server's address, without a path.

    answer: the status of all further requests. HANGS_UP reads the request and closes the connection.
    paths, bodies: of the requests that were accepted or read before the server hung up."""

    url: str = ""
    answer: int = ACCEPTS
    paths: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)


@contextmanager
def http_receiver() -> Iterator[HttpReceiver]:
    """Run a receiver until the block ends."""
    receiver = HttpReceiver()

    class Handler(BaseHTTPRequestHandler):
        def _take(self) -> None:
            content = self.rfile.read(min(int(self.headers.get("Content-Length") or 0), _MOST_BYTES))
            status = receiver.answer
            if status in (ACCEPTS, HANGS_UP):
                receiver.paths.append(self.path)
                receiver.bodies.append(content)
            if status == HANGS_UP:
                self.close_connection = True
                return
            body = b"ok" if status == ACCEPTS else b"not\nnow"
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_PUT = _take  # noqa: N815 - the names that the standard library calls

        def log_message(self, format: str, *args: object) -> None:
            """Write no log."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Ignore a client that hangs up."""

    server = Server(("127.0.0.1", 0), Handler)
    receiver.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
