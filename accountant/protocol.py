"""HTTP/1.1 of one connection, bounded: headers arrive in time and are small, and an answer is read.

uvicorn's protocol, which has none of these bounds. It also tells the app whose client certificate the connection
showed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from accountant.listener import ConnectionLimits
from accountant.tls import common_name


class BoundedProtocol(HttpToolsProtocol):
    """closed: told once the connection is over, if it was ever made."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        *,
        limits: ConnectionLimits,
        closed: Callable[[], None],
    ) -> None:
        super().__init__(config, server_state, app_state)
        self.made = False
        self._limits = limits
        self._closed = closed
        self._awaiting_headers = True
        self._header_bytes = 0
        self._header_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.made = True
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._headers_came()
        self._resumed()
        self._closed()

    def data_received(self, data: bytes) -> None:
        if self._awaiting_headers:
            self._expect_headers()
            self._header_bytes += len(data)
        super().data_received(data)
        # Bytes of a body that follow the headers in the same read count for nothing.
        if self._awaiting_headers and self._header_bytes > self._limits.header_bytes:
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_headers()
        secure = self.transport.get_extra_info("ssl_object")
        if secure is not None:
            extensions: Any = {"tls": {"client_cert_name": common_name(secure.getpeercert())}}
            self.scope["extensions"] = extensions

    def on_headers_complete(self) -> None:
        self._awaiting_headers = False
        self._headers_came()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._awaiting_headers = True
        self._header_bytes = 0
        self._headers_came()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._awaiting_headers and not self.transport.is_closing():
            self._expect_headers()  # the rest of a body that was answered before it had come

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(self._limits.stalled_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._resumed()

    def _expect_headers(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self._limits.header_seconds, self.transport.abort)

    def _headers_came(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _resumed(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
