"""What a browser is told while somebody signs in or out: where to go next, and which cookies to keep. Pure.

The same for whatever serves the pages. A cookie of ours is out of every script's reach and is not sent along with what
another site posts; under https it is bound to this host (`__Host-`, `__Secure-`: RFC 6265bis §4.1.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, urlsplit

LEAVE: Final = "/sign-in"
CALLBACK: Final = "/sign-in/done"
OUT: Final = "/sign-out"
LEFT: Final = "/signed-out"
LONGEST: Final = 4_000
"""Of a parameter that a browser brings along, in characters."""
_KEPT: Final = ":/%#?=@[]!$&'()*+,;"
"""Characters that stand for themselves in an address."""


class CrossSite(Exception):
    """A form that is none of this session's."""


@dataclass(frozen=True, slots=True)
class Cookie:
    """value: without what a cookie would have to quote, as a JWT is. seconds: how long it is kept; 0: forget it.
    secure: for https alone."""

    name: str
    value: str
    seconds: int
    path: str
    secure: bool

    def header(self) -> str:
        """As `Set-Cookie` carries it."""
        kept = f"{self.name}={self.value}; Path={self.path}; Max-Age={self.seconds}; HttpOnly; SameSite=lax"
        return f"{kept}; Secure" if self.secure else kept


@dataclass(frozen=True, slots=True)
class Move:
    """The answer 303: where a browser goes next, and what it keeps or forgets on the way."""

    to: str
    cookies: tuple[Cookie, ...] = ()


def to_sign_in(here: str) -> str:
    """The address to sign in at that leads back to `here`."""
    return f"{LEAVE}?next={quote(here, safe='')}"


def own_path(text: str) -> str:
    """The text where it is a path of ours, else "/": a sign-in must not lead to another site."""
    parts = urlsplit(text)
    if not text.startswith("/") or text.startswith("//") or "\\" in text or parts.scheme or parts.netloc:
        return "/"
    return text if text.isprintable() else "/"


def as_address(path: str) -> str:
    """A path as a header carries it; what is quoted already stays so."""
    return quote(path, safe=_KEPT)
