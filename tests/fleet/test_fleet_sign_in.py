"""People sign in to several replicas of the fleet's pages: a session that is ended at one is over at the others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

from accountant.api.access_control import ALONE_SECONDS
from accountant.core.settings import Settings
from accountant.fleet.fleet_server import FleetService
from gputally.base.clock import VirtualClock
from gputally.server.ended_sessions import LOOK_SECONDS
from tests.fakes.provider import Provider, provider
from tests.fleet.conftest import TwoLedgers
from tests.lake.comparison_queries import SPAN

HERE = "http://127.0.0.1"
PAGE = {"Accept": "text/html"}
pytestmark = pytest.mark.usefixtures("logs")


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(SPAN[1] + 60_000)


@pytest.fixture
def login(clock: VirtualClock) -> Iterator[Provider]:
    with provider(clock) as running:
        yield running


class Replicas:
    """Two replicas of the fleet's pages with one key, and a browser that is signed in at the first one."""

    def __init__(self, folder: Path, two: TwoLedgers, clock: VirtualClock, login: Provider, **settings: Any) -> None:
        (folder / "keys.json").write_bytes(login.keys())
        (folder / "secret").write_text("client-s3cret\n")
        (folder / "session.key").write_bytes(b"k" * 32)
        (folder / "callers.yaml").write_text(
            f"schema: 1\nissuers:\n  - issuer: {login.url}\n    audience: gputally\n"
            f"    jwks_file: {folder}/keys.json\n    user: email\n"
            f"    login: {{client_id: gputally, client_secret_file: {folder}/secret}}\n"
            "grants:\n  - {groups: [platform], scopes: [read]}\n"
        )
        made = Settings(
            callers=folder / "callers.yaml", public_url=HERE, session_key=folder / "session.key", **settings
        )
        self.services = [FleetService(made, two.fleet, clock) for _ in range(2)]
        self.browsers = [TestClient(service.app, base_url=HERE, follow_redirects=False) for service in self.services]
        first = self.browsers[0]
        login.claims |= {"groups": ["platform"]}
        away = first.get(first.get("/", headers=PAGE).headers["location"], headers=PAGE).headers["location"]
        back = httpx2.get(away, follow_redirects=False).headers["location"]
        assert first.get(back.removeprefix(HERE), headers=PAGE).status_code == 303
        self.copied = dict(first.cookies)

    def sign_out(self) -> None:
        page = self.browsers[0].get("/fleet", headers=PAGE)
        assert page.status_code == 200
        token = page.text.split('name="form_token" value="')[1].split('"')[0]
        assert self.browsers[0].post("/sign-out", data={"form_token": token}).status_code == 303

    def copy_answers(self, replica: int) -> bool:
        """Return whether a replica answers the copied cookie."""
        browser = self.browsers[replica]
        browser.cookies.clear()
        browser.cookies.update(self.copied)
        return browser.get("/v1/ledgers").status_code == 200


class Once(threading.Event):
    """A stop event that is set when it is asked for the second time, so that a loop runs once."""

    def is_set(self) -> bool:
        was = super().is_set()
        self.set()
        return was


def test_a_session_that_is_ended_at_one_replica_is_over_at_the_other(
    tmp_path: Path, two: TwoLedgers, clock: VirtualClock, login: Provider
) -> None:
    replicas = Replicas(tmp_path, two, clock, login, session_store=str(tmp_path / "sessions"))
    assert replicas.copy_answers(1)
    replicas.browsers[0].cookies.update(replicas.copied)
    replicas.sign_out()
    assert not replicas.copy_answers(0)
    other = replicas.services[1]
    began_ms = clock.wall_ms()
    other._callers.follow_sessions(Once(), other.tasks.add("sessions"))
    assert clock.wall_ms() - began_ms <= LOOK_SECONDS * 1000
    assert not replicas.copy_answers(1)


def test_without_a_store_a_copied_cookie_ends_within_the_stated_time(
    tmp_path: Path, two: TwoLedgers, clock: VirtualClock, login: Provider
) -> None:
    replicas = Replicas(tmp_path, two, clock, login)
    replicas.sign_out()
    assert not replicas.copy_answers(0)
    clock.advance(ALONE_SECONDS * 1000 - 1)
    assert replicas.copy_answers(1), "the other replica does not know it"
    clock.advance(1)
    assert not replicas.copy_answers(1)
