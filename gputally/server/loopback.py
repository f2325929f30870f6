"""Tells addresses of this machine from others."""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """Return True if only this machine can connect to the host. A name other than localhost gives False."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@lru_cache(maxsize=64)
def names_this_machine(host: str) -> bool:
    """Return True if a Host header names a loopback address."""
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False
