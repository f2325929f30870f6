"""A chat's incoming webhook on loopback: takes JSON, answers what it is told to, or hangs up."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Hook:
    """answers: status of each request in turn, 0 for hanging up after it was read; then 200."""

    url: str = ""
    answers: list[int] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)


@contextmanager
def webhook() -> Iterator[Hook]:
    """Running until the end of the block."""
    hook = Hook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status = hook.answers.pop(0) if hook.answers else 200
            if status in (0, 200):
                hook.bodies.append(json.loads(body))
            if status == 0:
                self.close_connection = True
                return
            said = b"ok" if status == 200 else b"not\nnow"
            self.send_response(status)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, format: str, *args: object) -> None:
            """Tests read the answers, not a log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hook.url = f"http://127.0.0.1:{server.server_address[1]}/services/s3cret"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hook
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
