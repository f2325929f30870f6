"""Tells host names that a stranger's site can give itself from others (DNS rebinding).

A page of that site can read what a port without credentials answers, through the browser of a person who reaches the
port. Requests from inside a cluster have an address or a name that nobody can register: such names are always known,
others only if the settings name them."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Collection
from functools import cached_property, lru_cache
from typing import Final
from urllib.parse import urlsplit

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
    """The host names under which a port answers.

    hosts: further names, without port.
    own_name: returns this machine's full name. It may wait for a name server, so it is called for the first name that
        is not known otherwise, and once."""

    def __init__(self, hosts: Collection[str], own_name: Callable[[], str] = lambda: "") -> None:
        self._hosts = frozenset(host.rstrip(".").lower() for host in hosts)
        self._own_name = own_name

    def knows(self, host: str | None) -> bool:
        """Return whether to answer. host: the Host header; None: the request has none (HTTP/1.0), so that the caller
        used an address."""
        if host is None or is_private(host):
            return True
        name = host.partition(":")[0].rstrip(".").lower()
        return name in self._hosts or (bool(name) and name == self._own)

    @cached_property
    def _own(self) -> str:
        return self._own_name().rstrip(".").lower()


PRIVATE_HOSTS: Final = KnownHosts(())
"""Addresses and names that nobody can register."""


def refusal(setting: str) -> str:
    """Return the text of status 421 (Misdirected Request). setting: where further names are set."""
    return f"this port does not answer under this host name: use a name of the cluster, or set {setting}\n"
