"""A fake accountant on loopback for the commands: fixed answers in the form of the HTTP API."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Answer = Callable[[Mapping[str, str]], Any]


@contextmanager
def serving(routes: Mapping[str, Answer], taking: Mapping[str, Answer] | None = None) -> Iterator[str]:
    """GET of `routes`; PUT and POST of `taking`, which is not told what came. Anything else is 405, an unknown path
    404, both without a body. Yields the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            answer = routes.get(url.path)
            if answer is None:
                self.send_error(404)
                return
            query = {key: values[0] for key, values in parse_qs(url.query).items()}
            self._answer(answer(query))

        def _answer(self, document: Any) -> None:
            content = json.dumps(document).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_PUT(self) -> None:
            answer = (taking or {}).get(urlsplit(self.path).path)
            if answer is None:
                self.send_error(405)
                return
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self._answer(answer({}))

        do_POST = do_PUT

        def log_message(self, format: str, *args: object) -> None:
            return

    with listening(Handler) as url:
        yield url


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """A server on a free loopback port until the end of the block; yields its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def window_of(usage: Mapping[str, float], capacity: int, version: str | None = None) -> Answer:
    """GET /v1/windows: usage as parts of the capacity, of the last hour."""

    def answer(query: Mapping[str, str]) -> dict[str, Any]:
        at = int(query["at"])
        return {
            "kind": "sliding", "start_ms": at - 3_600_000, "end_ms": at, "half_life_s": None,
            "measure": "allocated", "unit": "gpu_us", "by": "queue",
            "usage": {q: round(p * capacity) for q, p in usage.items()}, "unassigned": 0, "capacity": capacity,
            "watermark_ms": at, "coverage": 1.0, "policy_version": version,
        }  # fmt: skip

    return answer
