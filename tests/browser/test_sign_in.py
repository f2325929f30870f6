"""Sign-in with a real Chromium: a provider on this machine, TLS, and the code flow with PKCE."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.fairshare.web.browser_sessions import callers

pytest.importorskip("playwright", reason="make test-real installs the browser driver", exc_type=ImportError)

import httpx2
import trustme
from playwright.sync_api import Browser, BrowserContext, Page

from accountant.composition import Service
from accountant.core.settings import Settings
from gputally.base.clock import SystemClock
from gputally.server.https_server import serve
from tests.browser.demo_pages import chromium
from tests.fakes.provider import Provider, provider
from tests.real.programs import free_ports
from tests.usage_records import batch, interval, pod_facts, pod_holder

pytestmark = pytest.mark.real
MINUTE_MS = 60_000
TEAMS = ("vision", "zebra")
"""The team of the lead who signs in, and a team whose name that lead must never see."""


@dataclass
class PageContext:
    """The accountant at `url`, and the users' provider."""

    url: str
    login: Provider
    service: Service
    context: BrowserContext

    def open(self, path: str) -> Page:
        page = self.context.new_page()
        page.goto(self.url + path, wait_until="networkidle")
        return page


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture
def site(tmp_path: Path, browser: Browser) -> Iterator[PageContext]:
    clock = SystemClock()
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    (port,) = free_ports(1)
    with provider(clock) as login:
        grants = [
            {"groups": ["platform"], "scopes": ["read", "admin"]},
            {"groups": ["leads"], "scopes": ["read"], "teams": ["vision"]},
        ]
        (tmp_path / "inventory.yaml").write_text(
            json.dumps({"schema": 1, "cluster": "prod", "namespaces": [{"name": t, "team": t} for t in TEAMS]})
        )
        settings = Settings(
            data=tmp_path / "data", callers=callers(tmp_path, login, grants), inventory=tmp_path / "inventory.yaml",
            public_url=f"https://localhost:{port}", tls_cert=tmp_path / "cert.pem", tls_key=tmp_path / "key.pem",
        )  # fmt: skip
        with Service(settings, clock) as service, serve(service.app, "127.0.0.1", port, service.tls):
            _fill(service, clock)
            context = browser.new_context(ignore_https_errors=True)
            try:
                yield PageContext(f"https://localhost:{port}", login, service, context)
            finally:
                context.close()


def _fill(service: Service, clock: SystemClock) -> None:
    """Book a GPU of each team, held until a quarter of an hour ago."""
    begin = (clock.wall_ms() // MINUTE_MS - 25) * MINUTE_MS
    facts = [
        pod_facts(
            f"{team}-0", begin, namespace=team, uid=team, node="node-1", workload=f"Job/{team}-train",
            created_ms=begin, scheduled_ms=begin, started_ms=begin,
        )
        for team in TEAMS
    ]  # fmt: skip
    rows = [
        interval(begin, f"GPU-{t}", pod_holder(f"{t}-0", t, t), span_ms=10 * MINUTE_MS, busy_us=300_000_000)
        for t in TEAMS
    ]
    service.ingest.submit_batch(batch(rows, facts, cluster="prod", node="node-1")).result()


def test_a_person_comes_in_by_the_provider_and_leaves(site: PageContext) -> None:
    site.login.claims |= {"groups": ["platform"]}
    said: list[str] = []
    page = site.context.new_page()
    page.on("console", lambda message: said.append(message.text))
    page.goto(f"{site.url}/coverage", wait_until="networkidle")
    assert page.url == f"{site.url}/coverage", "through the provider, and back to what was asked for"
    assert page.get_by_role("heading", level=1).inner_text() == "Coverage"
    (asked,) = site.login.asked
    assert asked["code_challenge_method"] == "S256"
    assert len(base64.urlsafe_b64decode(asked["code_challenge"] + "=")) == hashlib.sha256().digest_size
    assert asked["redirect_uri"] == f"{site.url}/sign-in/done"
    assert {"state", "nonce"} <= asked.keys()

    (cookie,) = site.context.cookies()
    assert cookie["name"] == f"__Host-gputally-{urlsplit(site.url).port}"
    assert (cookie["httpOnly"], cookie["secure"], cookie["sameSite"]) == (True, True, "Lax")
    assert (cookie["domain"], cookie["path"]) == ("localhost", "/")
    assert page.evaluate("document.cookie") == "", "no script could read it"

    page.get_by_role("button", name="Sign out").click()
    page.wait_for_url("**/signed-out")
    assert site.context.cookies() == []
    assert page.get_by_role("link", name="Sign in again").is_visible()
    assert len(site.login.asked) == 1, "nobody was signed in again by that"
    assert said == []
    page.get_by_role("link", name="Sign in again").click()
    page.wait_for_url(f"{site.url}/")
    assert len(site.login.asked) == 2


def test_after_signing_out_the_back_button_shows_nothing(site: PageContext) -> None:
    site.login.claims |= {"groups": ["platform"]}
    page = site.open("/coverage")
    page.goto(f"{site.url}/nodes", wait_until="networkidle")
    site.login.refuse = True
    page.get_by_role("button", name="Sign out").click()
    page.wait_for_url("**/signed-out")
    for _ in range(2):
        page.go_back(wait_until="networkidle")
        assert "node-1" not in page.inner_text("body")
        assert page.get_by_role("button", name="Sign out").count() == 0


def test_five_restored_pages_all_come_back(site: PageContext) -> None:
    site.login.claims |= {"groups": ["platform"]}
    paths = ["/coverage", "/nodes", "/prices", "/jobs", "/decisions"]
    pages = [site.context.new_page() for _ in paths]
    for page, path in zip(pages, paths, strict=True):
        page.evaluate("address => { location.href = address }", site.url + path)  # none waits for another
    for page, path in zip(pages, paths, strict=True):
        page.wait_for_url(site.url + path)
        assert page.get_by_role("button", name="Sign out").is_visible()
    assert [cookie["name"] for cookie in site.context.cookies()] == [f"__Host-gputally-{urlsplit(site.url).port}"]


def test_a_lead_sees_the_own_team_and_no_word_of_another(site: PageContext) -> None:
    site.login.claims |= {"groups": ["leads"]}
    page = site.open("/")
    assert urlsplit(page.url).path == "/team/vision"
    assert "vision" in page.inner_text("body")
    seen = {page.url}
    for link in page.locator("a[href^='/']").evaluate_all("all => all.map(one => one.href)"):
        if link not in seen and not urlsplit(link).path.startswith("/v1/"):
            seen.add(link)
            page.goto(link, wait_until="domcontentloaded")
            assert "zebra" not in page.content(), link
    assert len(seen) > 8
    for path in ("/team/zebra", "/month/2026-11", "/job/prod~zebra~Job~zebra-train"):
        answer = page.goto(site.url + path)
        assert answer is not None
        assert answer.status in (403, 404), path
        assert "zebra" not in page.inner_text("main").replace("prod~zebra~Job~zebra-train", "")


def test_an_answer_with_another_state_signs_nobody_in(site: PageContext) -> None:
    site.login.refuse = True
    page = site.context.new_page()
    answer = page.goto(f"{site.url}/coverage")
    assert answer is not None
    assert answer.status == 401
    assert "the provider refused the sign-in" in page.inner_text("main")
    (under_way,) = site.context.cookies()
    assert under_way["path"] == "/sign-in"
    assert (under_way["httpOnly"], under_way["secure"]) == (True, True)
    answer = page.goto(f"{site.url}/sign-in/done?state=another&code=stolen")
    assert answer is not None
    assert answer.status == 401
    assert "go to /sign-in to begin again" in page.inner_text("main")
    assert not any(cookie["name"].startswith("__Host-") for cookie in site.context.cookies())


def test_an_attackers_code_does_not_sign_a_victim_in(site: PageContext) -> None:
    """Login CSRF: the unused answer to a sign-in that another browser began."""
    site.login.claims |= {"groups": ["platform"], "email": "attacker@example.com"}
    with httpx2.Client(verify=False, follow_redirects=False) as attacker:  # the test's own authority
        leave = attacker.get(f"{site.url}/sign-in?next=/coverage").headers["location"]
        stolen = attacker.get(leave).headers["location"]
    assert {"code", "state"} <= parse_qs(urlsplit(stolen).query).keys()
    page = site.context.new_page()
    answer = page.goto(stolen)
    assert answer is not None
    assert answer.status == 401
    assert site.context.cookies() == []
