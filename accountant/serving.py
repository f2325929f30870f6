"""Listening and serving: a socket, a server in a thread, TLS where it is wanted."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator

import uvicorn

from accountant.api import asgi
from accountant.errors import CannotStart
from accountant.tls import CertifiedProtocol, Tls

_KEEP_ALIVE_SECONDS = 75
"""Longer than an agent's interval, so that its connection lasts."""
_DRAIN_SECONDS = 20
"""How long requests in flight may take to finish when the service stops."""


class _Server(uvicorn.Server):
    """Says when it listens, so that nobody has to ask again and again."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


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
def serve(app: asgi.App, host: str, port: int, tls: Tls | None = None) -> Iterator[str]:
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
            http="auto" if tls is None else CertifiedProtocol,
            ssl_context_factory=None if tls is None else _always(tls.context),
        )
    )

    def run() -> None:
        try:
            server.run(sockets=[bound])
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
