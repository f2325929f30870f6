"""Two replicas of the controller's pages, an OpenID provider with users and groups, and a minimal browser."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2

from fairshare.web.ended_session_stores import SessionConfigMap
from fairshare.web.page_authentication import SignIns
from gputally.base.clock import VirtualClock
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import CONFIG_MAP
from gputally.server.ended_sessions import EndedSessions
from gputally.server.sign_in import FORM_TOKEN, CookieSigner, Session
from tests.fairshare.web.controller_pages import Answer, Stage, ask, stage
from tests.fakes.provider import Provider

GRANTS = [
    {"groups": ["readers"], "scopes": ["read"]},
    {"groups": ["operators"], "scopes": ["read", "policy"]},
    {"groups": ["admins"], "scopes": ["admin"]},
    {"groups": ["leads"], "scopes": ["read"], "teams": ["vision"]},
    {"groups": ["bold-leads"], "scopes": ["read"], "teams": ["vision", "language"]},
    {"groups": ["bold-leads"], "scopes": ["policy"]},
]


def callers(folder: Path, login: Provider, grants: Sequence[Mapping[str, Any]] = GRANTS, **more: Any) -> Path:
    """Write the file that defines who may sign in. more: further keys of the issuer."""
    (folder / "keys.json").write_bytes(login.keys())
    (folder / "secret").write_text(f"{login.secret}\n")
    issuer = {
        "issuer": login.url, "audience": "gputally", "jwks_file": str(folder / "keys.json"), "user": "email",
        "login": {"client_id": "gputally", "client_secret_file": str(folder / "secret")}, **more,
    }  # fmt: skip
    file = folder / "callers.yaml"
    file.write_text(json.dumps({"schema": 1, "issuers": [issuer], "grants": grants}))
    return file


def key(folder: Path) -> Path:
    file = folder / "session.key"
    file.write_bytes(b"k" * 32)
    return file


Login = tuple[Provider, VirtualClock]
PAGE = {"accept": "text/html"}
HERE = "https://fairshare.example"
NAME, UNDER_WAY = "__Host-gputally", "__Secure-gputally-sign-in"
SIGNER = CookieSigner(b"k" * 32, HERE)
"""Signed with `granting.key`."""
OTHERS = ("research", "language", "robotics", "serving", "students")
"""Queues that a lead of vision must not see; the first is the parent of vision's."""


class Faults(list[str]):
    """Collects the errors that a controller would log."""


@dataclass
class Browser:
    """A browser of one site that keeps cookies."""

    site: Any
    cookies: dict[str, str] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)

    def ask(self, method: str, url: str, form: Mapping[str, str] | None = None, **headers: str) -> Answer:
        asked = urlsplit(url)
        sent = {"host": "fairshare.example", **PAGE, **{k.replace("_", "-"): v for k, v in headers.items()}}
        kept = [f"{n}={v}" for n, v in self.cookies.items() if asked.path.startswith(self.paths[n])]
        if kept:
            sent["cookie"] = "; ".join(["theme=dark", *kept])
        found = ask(self.site, method, url, form, sent)
        for cookie in found.cookies:
            name, _, value = cookie.partition(";")[0].partition("=")
            self.paths[name] = cookie.partition("Path=")[2].partition(";")[0]
            self.cookies[name] = value
            if "Max-Age=0;" in cookie:
                del self.cookies[name]
        return found

    def get(self, url: str, **headers: str) -> Answer:
        return self.ask("GET", url, **headers)

    def post(
        self, url: str, form: Mapping[str, str] | None = None, *, mark: str | None = None, **headers: str
    ) -> Answer:
        """Send a form. mark: its token against forgery; None takes the one of the page "/shares"."""
        return self.ask("POST", url, {FORM_TOKEN: self.mark() if mark is None else mark, **(form or {})}, **headers)

    def mark(self) -> str:
        return self.get("/shares").body.decode().partition(f'name="{FORM_TOKEN}" value="')[2].partition('"')[0]

    def leave(self, path: str = "/shares/decisions") -> str:
        """Request a page and return the provider's address to which it redirects."""
        first = self.get(path)
        assert first.status == 303
        second = self.get(first.headers["Location"])
        assert second.status == 303
        return second.headers["Location"]

    def back(self, address: str) -> str:
        """Return the address to which the provider redirects the browser."""
        where = httpx2.get(address, follow_redirects=False).headers["location"]
        assert where.startswith(f"{HERE}/sign-in/done?")
        return str(where).removeprefix(HERE)

    def sign_in(self, path: str = "/shares/decisions") -> Answer:
        return self.get(self.back(self.leave(path)))


@dataclass
class PageContext:
    """Two replicas over one policy, and their OpenID provider."""

    first: Stage
    second: Stage
    login: Provider
    file: Path
    faults: Faults
    ended: list[EndedSessions]

    def browser(self, *groups: str) -> Browser:
        """Return a browser that is signed in as a member of these groups; without groups it is not signed in."""
        made = Browser(self.first.site)
        if groups:
            who = Session(self.login.url, "ann@example.com", groups, secrets.token_hex(), self.first.clock.wall_ms())
            made.cookies[NAME] = SIGNER.encode_session(who, self.first.clock.wall_ms(), 3_600)
            made.paths[NAME] = "/"
        return made


def site_in(folder: Path, login: Provider, clock: VirtualClock, **more: Any) -> PageContext:
    file, secret, faults = callers(folder, login, **more), key(folder), Faults()
    store, ended = SessionConfigMap(MemoryCluster([CONFIG_MAP]), "ns", "sessions"), list[EndedSessions]()

    def people(own: VirtualClock) -> SignIns:
        ended.append(EndedSessions(own, store))
        return SignIns(file, secret, HERE, 3_600, own, faults.append, ended[-1])

    stages = []
    for name in ("first", "second"):
        (folder / name).mkdir()
        stages.append(stage(folder / name, writable=True, guarded=True, people=people))
    # The provider's clock is the pages'.
    clock.advance(stages[0].clock.wall_ms() - clock.wall_ms())
    return PageContext(stages[0], stages[1], login, file, faults, ended)


def signing_in(folder: Path, file: Path, **options: Any) -> Stage:
    """Yield pages with sign-in through the given callers file. options: of `controller_pages`."""
    secret = key(folder)
    return stage(folder, people=lambda own: SignIns(file, secret, HERE, 60, own, lambda fault: None), **options)
