"""Sign-in to the controller's pages in a real Chromium over TLS: an operator applies a policy, other users cannot."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("playwright", reason="make test-real installs the browser driver", exc_type=ImportError)

import trustme
from playwright.sync_api import Browser, BrowserContext, Page

from fairshare.composition import serve_pages
from fairshare.core.settings import ControllerSettings
from fairshare.usage.accountant_client import AccountantApi
from gputally.base.clock import SystemClock
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import CONFIG_MAP
from tests.browser.demo_pages import chromium
from tests.fairshare.web.browser_sessions import callers, key
from tests.fairshare.web.controller_pages import Stage, stage
from tests.fake_scheduler import fake_scheduler as fake_scheduler
from tests.fakes.provider import Provider, provider
from tests.real.programs import free_ports

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("fake_scheduler")]


@dataclass
class PageContext:
    """The controller's pages at `url`, served by any replica, and the users' provider."""

    url: str
    stage: Stage
    login: Provider
    context: BrowserContext
    settings: ControllerSettings

    @contextlib.contextmanager
    def replica(self) -> Iterator[None]:
        """Serve a replica until the block ends."""
        clock, cluster = SystemClock(), MemoryCluster((CONFIG_MAP,), [])
        with (
            AccountantApi("http://127.0.0.1:1") as client,
            serve_pages(self.settings, self.stage.scene, client, clock, cluster),
        ):
            yield

    def sign_in(self, *groups: str, path: str = "/shares/policy") -> tuple[Page, list[str]]:
        """Sign in and return the next page with the browser's messages."""
        self.login.claims |= {"groups": list(groups)}
        said: list[str] = []
        page = self.context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(self.url + path, wait_until="networkidle")
        return page, said


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture
def site(tmp_path: Path, browser: Browser) -> Iterator[PageContext]:
    certificate = trustme.CA().issue_cert("localhost")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    (port,) = free_ports(1)
    here = stage(tmp_path, cycles=1)
    with provider(SystemClock()) as login:
        settings = ControllerSettings(
            policy=here.file, pages_listen=f"127.0.0.1:{port}", pages_apply="file", status_namespace="",
            pages_certificate=tmp_path / "cert.pem", pages_key=tmp_path / "key.pem",
            pages_callers=callers(tmp_path, login), pages_session_key=key(tmp_path),
            pages_public_url=f"https://localhost:{port}",
        )  # fmt: skip
        context = browser.new_context(ignore_https_errors=True)
        try:
            yield PageContext(f"https://localhost:{port}", here, login, context, settings)
        finally:
            context.close()


def test_an_operator_signs_in_applies_a_policy_and_signs_out(site: PageContext) -> None:
    with site.replica():
        page, said = site.sign_in("operators")
        assert page.url == f"{site.url}/shares/policy", "through the provider, and back to what was asked for"
        (cookie,) = site.context.cookies()
        assert cookie["name"] == f"__Host-gputally-{urlsplit(site.url).port}"
        assert (cookie["httpOnly"], cookie["secure"], cookie["sameSite"]) == (True, True, "Lax")
        assert page.evaluate("document.cookie") == "", "no script could read it"
        page.locator('[name="queues.0.weight"]').fill("7")
        page.get_by_role("button", name="Review the change").click()
        with page.expect_navigation(wait_until="networkidle"):
            page.get_by_role("button", name="Apply it now").click()
        assert page.locator("h1").inner_text() == "Applied"
        assert re.search(r"weight: 7\b", site.stage.file.read_text())
        assert page.locator(".person").inner_text().startswith("ann@example.com")
        page.get_by_role("button", name="Sign out").click()
        page.wait_for_url("**/signed-out")
        assert site.context.cookies() == []
        asked = len(site.login.asked)
        page.get_by_role("link", name="Sign in again").click()
        page.wait_for_url(f"{site.url}/shares")
        assert len(site.login.asked) == asked + 1
        assert said == []


def test_a_reader_looks_at_the_policy_and_cannot_apply_one(site: PageContext) -> None:
    before = site.stage.file.read_text()
    with site.replica():
        page, said = site.sign_in("readers")
        assert page.url == f"{site.url}/shares/policy"
        assert page.locator('[name="queues.0.weight"]').is_disabled()
        assert page.get_by_role("button", name="Review the change").is_disabled()
        assert said == []
        status = page.evaluate(
            """async text => {
                const own = name => document.querySelector(`[name=${name}]`).value;
                const body = new URLSearchParams({form_token: own("form_token"), base: own("base"), text});
                return (await fetch("/shares/policy/apply", {method: "POST", body})).status;
            }""",
            before + "\n# mine\n",
        )
        assert status == 403
        assert site.stage.file.read_text() == before


def test_a_lead_sees_own_queues_and_is_told_where_there_is_nothing_to_see(site: PageContext) -> None:
    with site.replica():
        page, said = site.sign_in("leads", path="/shares")
        assert page.locator("table.shares tbody tr").count() == 1
        assert page.locator("table.shares tbody th").inner_text() == "vision"
        page.get_by_role("link", name="vision").click()
        assert page.locator("h1").inner_text() == "vision"
        for name in ("language", "students", "research"):
            assert name not in page.content()
        assert said == []
        answer = page.goto(f"{site.url}/shares/policy")
        assert answer is not None
        assert answer.status == 403
        assert "you may see those of your teams" in page.inner_text("main")


def test_a_session_goes_on_at_the_replica_that_takes_over(site: PageContext) -> None:
    """A form that one replica served is accepted by the other."""
    with site.replica():
        page, _ = site.sign_in("operators")
        page.locator('[name="queues.0.weight"]').fill("9")
    with site.replica():
        page.get_by_role("button", name="Review the change").click()
        with page.expect_navigation(wait_until="networkidle"):
            page.get_by_role("button", name="Apply it now").click()
        assert page.locator("h1").inner_text() == "Applied"
        assert len(site.login.asked) == 1, "nobody had to sign in again"
    assert re.search(r"weight: 9\b", site.stage.file.read_text())
