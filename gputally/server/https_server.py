"""Serves an ASGI application with uvicorn in a thread, over HTTP or HTTPS with certificates that reload.

uvicorn limits neither the number of connections nor the time that a client takes to send its headers. This module
limits both (gputally.server.rate_and_connection_limits), and closes a connection whose handshake or headers do not
arrive in time.

The TLS layer verifies a client certificate against the configured CAs. The request's scope then has the common name of
the certificate's subject as `scope["extensions"]["tls"]["client_cert_name"]`, which is "" without a verified
certificate."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import structlog
import uvicorn
from anyio import to_thread
from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from gputally.base.background_tasks import BackgroundTask, BackgroundTasks, error_summary
from gputally.base.errors import AccountantError, CannotStart
from gputally.base.yaml_file import Unreadable
from gputally.server.config_loading import ReloadedFile
from gputally.server.rate_and_connection_limits import ConnectionLimits, Connections


class BadCertificate(Unreadable, AccountantError):
    """A certificate or key cannot be used. The message has the file and the reason."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The server's TLS files.

    certificate, key: PEM files of the server.
    client_ca: PEM file of the CAs of client certificates; None: the server asks for no client certificate.
    clients_required: True if a client without a certificate gets no connection; False if it gets one and can send a
        bearer token."""

    certificate: Path
    key: Path
    client_ca: Path | None = None
    clients_required: bool = False


class Tls(ReloadedFile[ssl.SSLContext]):
    """The TLS context of all new connections, which is replaced when the files change. Raises BadCertificate.

    A client whose CA the new files lack gets no new connection. Files that cannot be used are tried again at each
    `renew`."""

    def __init__(self, identity: TlsFiles) -> None:
        beside = [identity.key, *([identity.client_ca] if identity.client_ca is not None else [])]
        super().__init__(identity.certificate, lambda _: _context(identity), beside=beside)


def _context(identity: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(identity.certificate, identity.key)
    except ssl.SSLError as error:
        raise BadCertificate(
            [f"{identity.certificate}, {identity.key}: these are not a certificate and its key: {error.reason}"]
        ) from error
    except OSError as error:
        raise BadCertificate(
            [f"{identity.certificate}, {identity.key}: one of these files cannot be read: {error.strerror}"]
        ) from error
    if identity.client_ca is not None:
        try:
            context.load_verify_locations(identity.client_ca)
        except ssl.SSLError as error:
            raise BadCertificate([f"{identity.client_ca}: it contains no CA certificate: {error.reason}"]) from error
        except OSError as error:
            raise BadCertificate([f"{identity.client_ca}: {error.strerror or error}"]) from error
        context.verify_mode = ssl.CERT_REQUIRED if identity.clients_required else ssl.CERT_OPTIONAL
    return context


def common_name(certificate: Any) -> str:
    """Return the common name of the subject; "" if there is no verified certificate, or not exactly one common name."""
    names = [value for part in (certificate or {}).get("subject", ()) for key, value in part if key == "commonName"]
    return names[0] if len(names) == 1 else ""


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol of one connection, with time and size limits.

    closed: the function to call when the connection has ended, if it was established.
    stopping: see STOPPING."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        *,
        limits: ConnectionLimits,
        closed: Callable[[], None],
        stopping: asyncio.Event,
    ) -> None:
        super().__init__(config, server_state, app_state)
        self.established = False
        self._stopping = stopping
        self._limits = limits
        self._closed = closed
        self._awaiting_headers = True
        self._header_bytes = 0
        self._header_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.established = True
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_header_timer()
        self._stop_stall_timer()
        self._closed()

    def data_received(self, data: bytes) -> None:
        if self._awaiting_headers:
            self._start_header_timer()
            self._header_bytes += len(data)
        super().data_received(data)
        # Bytes of the body that arrive in the same read as the headers are not counted.
        if self._awaiting_headers and self._header_bytes > self._limits.header_bytes:
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast(dict[str, Any], self.scope)[STOPPING] = self._stopping
        self._start_header_timer()
        secure = self.transport.get_extra_info("ssl_object")
        if secure is not None:
            extensions: Any = {"tls": {"client_cert_name": common_name(secure.getpeercert())}}
            self.scope["extensions"] = extensions

    def on_headers_complete(self) -> None:
        self._awaiting_headers = False
        self._stop_header_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._awaiting_headers = True
        self._header_bytes = 0
        self._stop_header_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._awaiting_headers and not self.transport.is_closing():
            self._start_header_timer()  # the rest of a body whose request was already answered

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(self._limits.stalled_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_stall_timer()

    def abort_unread(self) -> None:
        """Close the connection at once if its client has not read all that was sent."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def _start_header_timer(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self._limits.header_seconds, self.transport.abort)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None


_KEEP_ALIVE_SECONDS = 120
"""Time after which the server closes an unused connection. It is longer than an agent's interval, and than Go's HTTP
client keeps an unused connection (90 s)."""
_DRAIN_SECONDS = 20
"""Time that requests in progress have to finish when the server stops."""
_CALLED_OFF_SECONDS = 5.0
"""Time after which a server that stops calls off the reads in progress, so that acts and senders have the rest."""
_UNREAD_SECONDS = 1.0
"""Time after that, and then pause, after which connections are closed whose clients do not read their answers."""
STOPPING = "gputally.stopping"
"""The name in an ASGI scope of an `asyncio.Event` that is set when the server, which stops, calls off reads."""
_THREADS = 16
"""Number of threads for routes that are not coroutines. Further requests wait."""
_TLS_SHUTDOWN_SECONDS = 1.0
"""Time that a client has to confirm the end of its TLS connection, so that idle clients do not delay a shutdown."""
_NO_DESCRIPTOR_SECONDS = 0.2
"""Pause before accepting again when the system has no file descriptor left."""


class _Server(uvicorn.Server):
    """A uvicorn server that limits connections. It sets the event `listening` when it accepts connections, so that its
    starter does not poll."""

    def __init__(
        self,
        config: uvicorn.Config,
        bound: socket.socket,
        limits: ConnectionLimits,
        tls: Tls | None,
        task: BackgroundTask | None,
        *,
        renew: bool,
        called_off_s: float,
        over: threading.Event | None,
    ) -> None:
        super().__init__(config)
        self._stopping = asyncio.Event()
        self._over = over
        self._called_off_s = called_off_s
        self._task = task
        self._tls = tls
        self._renew = renew
        self.listening = threading.Event()
        self._bound = bound
        self._limits = limits
        self._connections = Connections(limits)
        self._accepting: asyncio.Task[None] | None = None
        self._handshakes: set[asyncio.Task[None]] = set()
        self._log = structlog.get_logger("http")

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002  # the base's
        await super().startup([])
        to_thread.current_default_thread_limiter().total_tokens = _THREADS
        self._bound.setblocking(False)
        self._accepting = asyncio.create_task(self._accept())
        self.listening.set()

    async def on_tick(self, counter: int) -> bool:
        """Run ten times a second, unless a request blocks the loop."""
        if self._accepting is not None and self._accepting.done() and not self._accepting.cancelled():
            error = self._accepting.exception() or RuntimeError("accepting ended")
            self._log.error("accepting_failed", reason=error_summary(error), exc_info=error)
            if self._task is not None:
                self._task.fail(error)
            self._accepting = asyncio.create_task(self._accept())
        elif self._task is not None:
            self._task.progress()
        return await super().on_tick(counter) or (self._over is not None and self._over.is_set())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_reads())
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting, *self._handshakes])
        await super().shutdown(sockets)
        ending.cancel()

    async def _end_reads(self) -> None:
        """Call off the reads in progress when their time is over, and then leave clients that do not read."""
        await asyncio.sleep(self._called_off_s)
        self._stopping.set()
        while True:
            await asyncio.sleep(_UNREAD_SECONDS)
            for connection in list(self.server_state.connections):
                cast(BoundedProtocol, connection).abort_unread()

    async def _accept(self) -> None:
        """Accept connections up to the limits, and start the handshake of each."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(self._bound)
            except ConnectionError:
                continue
            except OSError as error:
                self._log.error("connection_not_accepted", reason=error.strerror or str(error))
                await asyncio.sleep(_NO_DESCRIPTOR_SECONDS)
                continue
            admitted = False
            try:
                admitted = self._connections.enter(address[0])
            finally:
                if not admitted:
                    connection.close()
            if not admitted:
                continue
            task = loop.create_task(self._establish(connection, address[0]))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _establish(self, connection: socket.socket, address: str) -> None:
        """Make the TLS handshake, if any, and hand the connection to its protocol."""
        protocol = BoundedProtocol(
            self.config,
            self.server_state,
            self.lifespan.state,
            limits=self._limits,
            closed=partial(self._connections.leave, address),
            stopping=self._stopping,
        )
        try:
            tls: dict[str, Any] = {}
            if self._tls is not None:
                if self._renew:
                    self._renew_certificate(self._tls)
                tls = {
                    "ssl": self._tls.current,
                    "ssl_handshake_timeout": self._limits.header_seconds,
                    "ssl_shutdown_timeout": _TLS_SHUTDOWN_SECONDS,
                }
            connection.setblocking(False)
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, connection, **tls)
        finally:
            if not protocol.established:
                connection.close()
                self._connections.leave(address)

    def _renew_certificate(self, tls: Tls) -> None:
        try:
            if tls.renew():
                self._log.info("file_reloaded", what="certificate")
        except BadCertificate as error:
            self._log.error("certificate_refused", fault=str(error))


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. port: 0 for any free port. Raises CannotStart."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, proto)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(2048)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise CannotStart(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return bound


@contextlib.contextmanager
def serve(
    app: ASGIApp,
    host: str,
    port: int,
    tls: Tls | None = None,
    limits: ConnectionLimits | None = None,
    name: str = "http",
    *,
    tasks: BackgroundTasks | None = None,
    renew: bool = False,
    called_off_s: float = _CALLED_OFF_SECONDS,
    over: threading.Event | None = None,
) -> Iterator[str]:
    """Serve the app in a thread and yield its base URL. When the block ends, accept no more connections, let requests
    finish, and after a time call off reads that are still in progress (`gputally.server.turns`) and leave clients that
    do not read their answers.

    port: 0 for any free port.
    tls: the certificate for HTTPS; None for HTTP.
    name: the name of the thread and its background task.
    tasks: gets the server as a background task, which has a fault while one request blocks the event loop.
    called_off_s: the time that reads have to finish when the block ends.
    over: when set, the server begins to stop before the block ends, so that several servers stop at one time.
    renew: True to check the certificate files at each new connection. If False, the owner of `tls` calls `Tls.renew`.

    Raises CannotStart."""
    bound = listen(host, port)
    task = None if tasks is None else tasks.add(name, serves=True)
    server = _Server(
        uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_DRAIN_SECONDS,
            ssl_context_factory=None if tls is None else lambda *_: tls.current,
        ),
        bound,
        limits or ConnectionLimits(),
        tls,
        task,
        renew=renew,
        called_off_s=called_off_s,
        over=over,
    )

    def run() -> None:
        try:
            server.run(sockets=[])
        finally:
            server.listening.set()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    if task is not None:
        task.watch(thread)
    server.listening.wait()
    address, actual_port = bound.getsockname()[:2]
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(address, f"[{address}]" if ":" in address else address)  # noqa: S104
    try:
        yield f"{'http' if tls is None else 'https'}://{name}:{actual_port}"
    finally:
        if task is not None:
            task.end()
        server.should_exit = True
        thread.join()
        bound.close()
