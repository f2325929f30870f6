"""What a browser keeps for us, sealed so that it can be read but not changed: sign-ins under way, and sessions.

Both are JWTs under a key that only who serves the pages has (HS256: who verifies them is who made them), and all
replicas of it. A value of one sort is never taken for the other, nor that of other pages for one of these.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import jwt

from accountant.callers.auth import Unauthenticated
from accountant.errors import CannotStart
from agent import wholefile
from agent.units import MS_PER_SECOND

Sort = Literal["sign-in", "session"]
_KEY_BYTES: Final = 32
_MOST_BYTES: Final = 4_000
"""Browsers keep no more in one cookie."""


@dataclass(frozen=True, slots=True)
class SignIn:
    """Somebody is with the provider. next: where to go afterwards."""

    issuer: str
    state: str
    nonce: str
    verifier: str
    next: str


@dataclass(frozen=True, slots=True)
class Session:
    """Somebody came back. id: of this session alone, for its forms."""

    issuer: str
    user: str
    groups: tuple[str, ...]
    id: str


class Seal:
    """Signs and opens. key: secret, the same over restarts. house: whose pages these are; in the cookies' names too."""

    def __init__(self, key: bytes, house: str = "gputally") -> None:
        self._key = key
        self.house = house

    def sign_in(self, under_way: SignIn, now_ms: int, seconds: int) -> str:
        return self._sealed("sign-in", _plain(under_way), now_ms, seconds)

    def session(self, session: Session, now_ms: int, seconds: int) -> str:
        """Raises Unauthenticated where a person is in more groups than a cookie holds."""
        text = self._sealed("session", _plain(session), now_ms, seconds)
        if len(text) > _MOST_BYTES:
            raise Unauthenticated("this person is in more groups than a session can hold")
        return text

    def opened_sign_in(self, text: str, now_ms: int) -> SignIn:
        """Raises Unauthenticated."""
        found = self._opened("sign-in", text, now_ms)
        return SignIn(found["issuer"], found["state"], found["nonce"], found["verifier"], found["next"])

    def opened_session(self, text: str, now_ms: int) -> Session:
        """Raises Unauthenticated."""
        found = self._opened("session", text, now_ms)
        return Session(found["issuer"], found["user"], tuple(found["groups"]), found["id"])

    def form_token(self, session: Session) -> str:
        """What a form of this session has to bring along."""
        return hmac.new(self._key, b"form:" + session.id.encode(), hashlib.sha256).hexdigest()

    def _sealed(self, sort: Sort, content: Mapping[str, Any], now_ms: int, seconds: int) -> str:
        times = {"aud": f"{self.house}-{sort}", "exp": now_ms // MS_PER_SECOND + seconds}
        return jwt.encode({**content, **times}, self._key, algorithm="HS256")

    def _opened(self, sort: Sort, text: str, now_ms: int) -> dict[str, Any]:
        try:
            claims: dict[str, Any] = jwt.decode(
                text,
                self._key,
                algorithms=["HS256"],
                audience=f"{self.house}-{sort}",
                options={"require": ["exp"], "verify_exp": False},
            )
        except (jwt.PyJWTError, ValueError) as error:
            raise Unauthenticated("the cookie is none of ours") from error
        if claims["exp"] * MS_PER_SECOND <= now_ms:
            raise Unauthenticated("signed in too long ago")
        return claims


def key_of(path: Path, remedy: str = f"a key has at least {_KEY_BYTES} bytes") -> bytes:
    """The key that a file holds; another one signs everybody out. Raises CannotStart. remedy: for a short one."""
    try:
        key = path.read_bytes()
    except OSError as error:
        raise CannotStart(f"{path}: {error.strerror}") from error
    if len(key) < _KEY_BYTES:
        raise CannotStart(f"{path}: holds no key; {remedy}")
    return key


def key_in(folder: Path) -> bytes:
    """The key in a folder, made when first asked for. Raises CannotStart."""
    path = folder / "session.key"
    try:
        if not path.exists():
            wholefile.write(path, secrets.token_bytes(_KEY_BYTES), 0o600)
    except OSError as error:
        raise CannotStart(f"{path}: {error.strerror}") from error
    return key_of(path, "remove it, and a new one is made")


def _plain(value: SignIn | Session) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__slots__}
