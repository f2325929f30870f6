"""Serves health, metrics and the kube-scheduler extender over HTTP.

Nothing else is served. Connections are bounded in total and by address; handshake, headers and bodies are bounded and
have to come in time, however they trickle. A client that goes away is no news.
"""

from __future__ import annotations

import io
import json
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import structlog

from fairshare.controller.kube_scheduler_extender import MOST_BYTES, BadRequest, Extender
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import Clock
from gputally.base.errors import FairshareError
from gputally.base.units import MS_PER_SECOND
from gputally.server.connection_limits import ConnectionLimits, Connections

BODY_S = 1.0
"""A body has to come within this time."""
IDLE_S = 120.0
"""A connection may be silent this long between two questions."""
LIMITS = ConnectionLimits(connections=256, connections_by_address=64)
"""Each connection has a thread."""
MOST_DIGITS = 12
"""Of a Content-Length; longer ones are cut, and still too large."""
Probe = Callable[[], str | None]
"""None: well. Text: what is wrong."""


class CannotListen(FairshareError):
    """The address cannot be listened on, or not with that certificate."""


class TimedHandler(BaseHTTPRequestHandler):
    """A handler whose client has to say what it wants in time: `timeout` bounds each read, this bounds all of them."""

    server: _Server

    def handle(self) -> None:
        self.server.due_in(self.request, self.server.limits.header_seconds)
        super().handle()

    def handle_one_request(self) -> None:
        # Before the first byte of a further request a connection may be silent as long as `timeout`.
        if isinstance(self.rfile, io.BufferedReader):
            self.rfile.peek(1)
        self.server.due_in(self.request, self.server.limits.header_seconds)
        super().handle_one_request()
        self.server.due_in(self.request, None)

    def parse_request(self) -> bool:
        parsed = super().parse_request()
        self.server.due_in(self.request, None)
        return parsed

    def body(self, length: int, seconds: float) -> bytes:
        """The body, if it comes within so many seconds. Raises ConnectionError."""
        self.server.due_in(self.request, seconds)
        content = self.rfile.read(length)
        self.server.due_in(self.request, None)
        if len(content) < length:
            raise ConnectionAbortedError("the body did not come in time, or not at all")
        return content


class _Server(ThreadingHTTPServer):
    """A thread for each connection, bounded. `service_actions` is called ten times a second."""

    daemon_threads = True

    def __init__(
        self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], name: str, limits: ConnectionLimits
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.limits = limits
        self._connections = Connections(limits)
        self._entered: dict[socket.socket, str] = {}
        self._due: dict[socket.socket, float] = {}
        self._name = name
        self._log = structlog.get_logger("fairshare.http")
        super().__init__(address, handler)

    def due_in(self, connection: socket.socket, seconds: float | None) -> None:
        """What is read from now on has to have come within so many seconds; None: nothing is awaited."""
        if seconds is None:
            self._due.pop(connection, None)
        else:
            self._due[connection] = time.monotonic() + seconds

    def service_actions(self) -> None:
        now = time.monotonic()
        for connection, due in list(self._due.items()):
            if due <= now and self._due.pop(connection, None) is not None:
                with suppress(OSError):
                    # Not the method of a TLS socket: another thread is reading from it.
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        if not self._connections.enter(client_address[0]):
            return False
        self._entered[request] = client_address[0]
        return True

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self._due.pop(request, None)
        address = self._entered.pop(request, None)
        if address is not None:
            self._connections.leave(address)

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002 - the base's
        error = sys.exception()
        if isinstance(error, (ConnectionError, TimeoutError, ssl.SSLError)):
            self._log.debug("client_went_away", server=self._name, client=client_address, reason=str(error))
        else:
            self._log.error("request_failed", server=self._name, client=client_address, exc_info=error)


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

    class Handler(TimedHandler):
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

    class Handler(TimedHandler):
        server_version = "gputally"
        sys_version = ""
        protocol_version = "HTTP/1.1"  # the scheduler keeps its connection
        timeout = IDLE_S

        def do_POST(self) -> None:
            started = time.monotonic()
            verb = verbs.get(self.path)
            length = self.headers.get("Content-Length", "")[:MOST_DIGITS]
            if verb is None:
                self._refuse(404, "not found")
            elif not length.isascii() or not length.isdigit():
                self._refuse(411, "Content-Length is missing")
            elif int(length) > MOST_BYTES:
                self._refuse(413, f"more than {MOST_BYTES} bytes")
            else:
                content = self.body(int(length), BODY_S)
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
    host: str,
    port: int,
    handler: type[TimedHandler],
    name: str,
    tls: ssl.SSLContext | None,
    limits: ConnectionLimits = LIMITS,
) -> Iterator[str]:
    """Serve `handler` in a thread of that name until the context ends; yields the base URL. Raises CannotListen."""
    try:
        server = _Server((host, port), handler, name, limits)
    except OSError as error:
        raise CannotListen(f"cannot listen on {host}:{port}: {error.strerror}") from error
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
