"""/livez, /readyz and /metrics over plain HTTP, for kubelet and Prometheus. Nothing else is served."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from agent.clock import Clock
from agent.units import MS_PER_SECOND
from fairshare.errors import FairshareError

Probe = Callable[[], str | None]
"""None: well. Text: what is wrong."""


class PortInUse(FairshareError):
    """The address cannot be listened on."""


class Health:
    """Alive while cycles come; ready after the first."""

    def __init__(self, clock: Clock, interval_s: float) -> None:
        self._clock = clock
        self._patience_ms = 3 * interval_s * MS_PER_SECOND + 60 * MS_PER_SECOND
        self._beat_ms = clock.monotonic_ms()
        self._beaten = False

    def beat(self) -> None:
        """A cycle has ended."""
        self._beat_ms, self._beaten = self._clock.monotonic_ms(), True

    def live(self) -> str | None:
        silent_ms = self._clock.monotonic_ms() - self._beat_ms
        return f"no cycle has ended for {silent_ms / MS_PER_SECOND:.0f} s" if silent_ms > self._patience_ms else None

    def ready(self) -> str | None:
        return None if self._beaten else "the first cycle has not ended yet"


@contextmanager
def serve(host: str, port: int, *, live: Probe, ready: Probe, metrics: Callable[[], bytes]) -> Iterator[str]:
    """Serve in a thread until the context ends; yields the base URL. port 0: any free one. Raises PortInUse."""

    class Handler(BaseHTTPRequestHandler):
        server_version = "gputally"
        sys_version = ""
        timeout = 10

        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._answer(200, metrics(), "text/plain; version=0.0.4; charset=utf-8")
            elif self.path in ("/livez", "/readyz"):
                fault = (live if self.path == "/livez" else ready)()
                self._answer(503 if fault else 200, f"{fault or 'ok'}\n".encode(), "text/plain; charset=utf-8")
            else:
                self._answer(404, b"not found\n", "text/plain; charset=utf-8")

        def _answer(self, status: int, body: bytes, content_type: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Probes are no news."""

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    try:
        server = Server((host, port), Handler)
    except OSError as error:
        raise PortInUse(f"cannot listen on {host}:{port}: {error.strerror}") from error
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="fairshare-http", kwargs={"poll_interval": 0.1})
    thread.start()
    try:
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
