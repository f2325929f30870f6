"""Listening and serving: a socket, a server in a thread, TLS where it is wanted.

uvicorn bounds neither how many connections there are nor how long a client takes to say what it wants. Here every
connection is accepted within bounds (accountant.listener), and closed where its handshake or its headers do not arrive
in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import structlog
import uvicorn

from accountant.api import asgi
from accountant.errors import CannotStart
from accountant.listener import ConnectionLimits, Connections
from accountant.protocol import BoundedProtocol
from accountant.tls import Tls

_KEEP_ALIVE_SECONDS = 75
"""Longer than an agent's interval, so that its connection lasts."""
_DRAIN_SECONDS = 20
"""How long requests in flight may take to finish when the service stops."""


_NO_DESCRIPTOR_SECONDS = 0.2
"""How long accepting pauses where the system gives no further descriptor."""


class _Server(uvicorn.Server):
    """Accepts connections within bounds, and says when it listens, so that nobody has to ask again and again."""

    def __init__(self, config: uvicorn.Config, bound: socket.socket, limits: ConnectionLimits) -> None:
        super().__init__(config)
        self.listening = threading.Event()
        self._bound = bound
        self._limits = limits
        self._connections = Connections(limits)
        self._accepting: asyncio.Task[None] | None = None
        self._opening: set[asyncio.Task[None]] = set()
        self._log = structlog.get_logger("accountant.http")

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002  # the base's
        await super().startup([])
        self._bound.setblocking(False)
        self._accepting = asyncio.create_task(self._accept())
        self.listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting, *self._opening])
        await super().shutdown(sockets)

    async def _accept(self) -> None:
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
            if not self._connections.enter(address[0]):
                connection.close()
                continue
            task = loop.create_task(self._open(connection, address[0]))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket, address: str) -> None:
        protocol = BoundedProtocol(
            self.config,
            self.server_state,
            self.lifespan.state,
            limits=self._limits,
            closed=partial(self._connections.leave, address),
        )
        tls: dict[str, Any] = {}
        if self.config.ssl is not None:
            tls = {"ssl": self.config.ssl, "ssl_handshake_timeout": self._limits.header_seconds}
        try:
            connection.setblocking(False)
            await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, connection, **tls)
        except (OSError, asyncio.CancelledError):
            if not protocol.made:
                connection.close()
                self._connections.leave(address)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises CannotStart."""
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
    app: asgi.App, host: str, port: int, tls: Tls | None = None, limits: ConnectionLimits | None = None
) -> Iterator[str]:
    """Serve the app in a thread and give its base URL; on leaving, stop accepting and let requests finish.

    tls: serve HTTPS with it. port 0 takes a free one. Raises CannotStart."""
    bound = listen(host, port)
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
            ssl_context_factory=None if tls is None else _always(tls.context),
        ),
        bound,
        limits or ConnectionLimits(),
    )

    def run() -> None:
        try:
            server.run(sockets=[])
        finally:
            server.listening.set()

    thread = threading.Thread(target=run, name="http", daemon=True)
    thread.start()
    server.listening.wait()
    address, actual_port = bound.getsockname()[:2]
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(address, f"[{address}]" if ":" in address else address)  # noqa: S104
    try:
        yield f"{'http' if tls is None else 'https'}://{name}:{actual_port}"
    finally:
        server.should_exit = True
        thread.join()
        bound.close()


def _always(context: ssl.SSLContext) -> _Factory:
    def factory(_config: uvicorn.Config, _default: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
        return context

    return factory


_Factory = Callable[[uvicorn.Config, Callable[[], ssl.SSLContext]], ssl.SSLContext]
