"""Refuses requests under host names that a stranger's site can give itself (DNS rebinding).

A page of that site can then read what a port without credentials answers, through the browser of a person who reaches
the port. Requests from inside a cluster have an address or a name that nobody can register: such names are always
accepted, others only if the settings name them."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

_PRIVATE: Final = (".svc", ".local", ".internal", ".localhost", ".test")
"""Ends of names that are in no public zone: Kubernetes services (`.svc`, `.cluster.local`), RFC 6761, RFC 6762, and the
name that ICANN reserved for private use."""


@lru_cache(maxsize=256)
def is_private(host: str) -> bool:
    """Return True if a Host header has an address, or a name that nobody can register."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return bool(name) and ("." not in name or name.endswith(_PRIVATE))
    return True


class KnownHosts:
    """An ASGI application that passes requests under private and known names to another one, and answers 421 to others.

    hosts: further names, without port.
    setting: where they are set, for the refusal."""

    def __init__(self, app: ASGIApp, hosts: Collection[str], setting: str) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)
        self._setting = setting

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._knows(scope):
            await self._app(scope, receive, send)
            return
        text = f"this port does not answer under this host name: use a name of the cluster, or set {self._setting}\n"
        await PlainTextResponse(text, 421)(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), None)
        if host is None or is_private(host):  # without a name (HTTP/1.0) the caller used an address
            return True
        name = host.partition(":")[0].rstrip(".").lower()
        return name in self._hosts
