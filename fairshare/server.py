"""/livez, /readyz and /metrics over plain HTTP, for kubelet and Prometheus; the extender's two questions on a
port of their own, for the kube-scheduler, with TLS and its certificate where that is asked for.

Nothing else is served. Bodies are bounded and have to come in time. A client that goes away is no news."""

from __future__ import annotations

import json
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import structlog

from agent.background import BackgroundTasks
from agent.clock import Clock
from agent.units import MS_PER_SECOND
from fairshare.errors import FairshareError
from fairshare.extender import MOST_BYTES, BadRequest, Extender

BODY_S = 1.0
"""A body has to come within this time."""
IDLE_S = 120.0
"""A connection may be silent this long between two questions."""
Probe = Callable[[], str | None]
"""None: well. Text: what is wrong."""


class CannotListen(FairshareError):
    """The address cannot be listened on, or not with that certificate."""


class Health:
    """Alive while cycles come; ready after the first, while every background task works."""

    def __init__(self, clock: Clock, interval_s: float, tasks: BackgroundTasks | None = None) -> None:
        self._clock = clock
        self._tasks = tasks or BackgroundTasks(clock)
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
        faults = [f"{name} {fault.partition(':')[0]}" for name, fault in self._tasks.faults().items()]
        if faults:
            return f"{'; '.join(faults)}: the log says why"
        return None if self._beaten else "the first cycle has not ended yet"


@contextmanager
def serve(host: str, port: int, *, live: Probe, ready: Probe, metrics: Callable[[], bytes]) -> Iterator[str]:
    """Serve in a thread until the context ends; yields the base URL. port 0: any free one. Raises CannotListen."""

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

    with listening(host, port, Handler, "fairshare-http", None) as url:
        yield url


@contextmanager
def serve_extender(
    host: str,
    port: int,
    extender: Extender,
    *,
    told: Callable[[str, float, str], None] | None = None,
    tls: ssl.SSLContext | None = None,
) -> Iterator[str]:
    """`POST /scheduler/prioritize` and `/scheduler/preempt` until the context ends; yields the base URL.

    told: hears of every answer, as (verb, seconds, ok | late | refused). Raises CannotListen."""
    verbs = {"/scheduler/prioritize": extender.prioritize, "/scheduler/preempt": extender.preempt}

    class Handler(BaseHTTPRequestHandler):
        server_version = "gputally"
        sys_version = ""
        protocol_version = "HTTP/1.1"  # the scheduler keeps its connection
        timeout = IDLE_S

        def do_POST(self) -> None:
            started = time.monotonic()
            verb = verbs.get(self.path)
            length = self.headers.get("Content-Length", "")
            if verb is None:
                self._refuse(404, "not found")
            elif not length.isascii() or not length.isdigit():
                self._refuse(411, "Content-Length is missing")
            elif int(length) > MOST_BYTES:
                self._refuse(413, f"more than {MOST_BYTES} bytes")
            else:
                self.connection.settimeout(BODY_S)
                content = self.rfile.read(int(length))
                self.connection.settimeout(IDLE_S)
                try:
                    answer = verb(content)
                except BadRequest as error:
                    result = "refused"
                    self._refuse(400, str(error))
                else:
                    result = "late" if answer.late else "ok"
                    self._answer(200, json.dumps(answer.body).encode())
                if told is not None:
                    told(self.path.rpartition("/")[2], time.monotonic() - started, result)

        def _refuse(self, status: int, reason: str) -> None:
            self.close_connection = True  # a body may be left unread
            self._answer(status, json.dumps({"Error": reason}).encode())

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Counted, not logged."""

    with listening(host, port, Handler, "fairshare-extender", tls) as url:
        yield url


def tls_context(certificate: Path, key: Path, client_authority: Path | None) -> ssl.SSLContext:
    """Serve with `certificate`; with `client_authority` only to who shows a certificate of it. Raises CannotListen."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
        if client_authority is not None:
            context.load_verify_locations(client_authority)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise CannotListen(f"certificate {certificate}: {error.strerror or error}") from error
    return context


@contextmanager
def listening(
    host: str, port: int, handler: type[BaseHTTPRequestHandler], name: str, tls: ssl.SSLContext | None
) -> Iterator[str]:
    """Serve `handler` in a thread of that name until the context ends; yields the base URL. Raises CannotListen."""

    log = structlog.get_logger("fairshare.http")

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002 - the base's
            error = sys.exception()
            if isinstance(error, (ConnectionError, TimeoutError, ssl.SSLError)):
                log.debug("client_went_away", server=name, client=client_address, reason=str(error))
            else:
                log.error("request_failed", server=name, client=client_address, exc_info=error)

    try:
        server = Server((host, port), handler)
    except OSError as error:
        raise CannotListen(f"cannot listen on {host}:{port}: {error.strerror}") from error
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, name=name, kwargs={"poll_interval": 0.1})
    thread.start()
    try:
        shown = f"[{host}]" if ":" in host else host
        yield f"{'https' if tls else 'http'}://{shown}:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
