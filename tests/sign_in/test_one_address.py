"""Accountant and controller at one address: people sign in and out once for both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
from starlette.testclient import TestClient

from accountant.composition import Service
from accountant.core.settings import Settings
from fairshare.usage.accountant_client import AccountantApi
from fairshare.web.ended_session_stores import AccountantSessions
from fairshare.web.page_authentication import SignIns
from gputally.base.clock import VirtualClock
from gputally.server.ended_sessions import EndedSessions
from gputally.server.https_server import serve
from gputally.server.one_address import OneAddress
from gputally.server.tokens_and_grants import AuthorityUnavailable, new_token
from tests import empty_ledger
from tests.fairshare.web.browser_sessions import callers, key
from tests.fairshare.web.controller_pages import NOW_MS, stage
from tests.fake_scheduler import fake_scheduler as fake_scheduler
from tests.fakes.provider import Provider, provider

HERE = "https://gpus.example"
PAGE = {"Accept": "text/html"}
pytestmark = [pytest.mark.usefixtures("logs"), pytest.mark.usefixtures("fake_scheduler")]


@dataclass
class Site:
    """Both programs at one address. ended: what the controller knows of ended sessions."""

    app: OneAddress
    login: Provider
    ended: EndedSessions

    def browser(self) -> TestClient:
        return TestClient(self.app, base_url=HERE, headers=PAGE, follow_redirects=False)

    def sign_in(self, *groups: str, path: str) -> TestClient:
        self.login.claims |= {"groups": list(groups)}
        browser = self.browser()
        away = browser.get(browser.get(path).headers["location"]).headers["location"]
        back = httpx2.get(away, follow_redirects=False).headers["location"]
        assert browser.get(back.removeprefix(HERE)).headers["location"] == path
        return browser


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    token, entry = new_token("controller", ("read", "policy"))
    (tmp_path / "tokens.yaml").write_text(f"tokens:\n{entry}")
    (tmp_path / "token").write_text(token)
    clock = VirtualClock(NOW_MS)
    with ExitStack() as after:
        login = after.enter_context(provider(clock))
        file, secret = callers(tmp_path, login), key(tmp_path)
        settings = Settings(
            data=empty_ledger.data(tmp_path / "data"), tokens=tmp_path / "tokens.yaml", callers=file, public_url=HERE,
            session_key=secret, controller_pages="/",
        )  # fmt: skip
        service = after.enter_context(Service(settings, clock))
        url = after.enter_context(serve(service.app, "127.0.0.1", 0))
        client = after.enter_context(AccountantApi(url, token_file=tmp_path / "token"))
        ended: list[EndedSessions] = []

        def people(own: VirtualClock) -> SignIns:
            ended.append(EndedSessions(own, AccountantSessions(client)))
            return SignIns(file, secret, HERE, 3_600, own, lambda fault: None, ended[-1])

        controller = stage(tmp_path, people=people, accountant_pages="/", cycles=1)
        clock.advance_to(controller.clock.wall_ms())
        yield Site(OneAddress(service.app, controller.site.observed()), login, ended[-1])


@pytest.mark.parametrize("first", ["/coverage", "/shares"])
def test_one_sign_in_opens_the_pages_of_both_and_one_sign_out_closes_them(site: Site, first: str) -> None:
    browser = site.sign_in("operators", path=first)
    assert [name for name in browser.cookies if name.startswith("__Host-")] == ["__Host-gputally"]
    pages = [browser.get(path) for path in ("/coverage", "/shares", "/shares/policy")]
    assert [page.status_code for page in pages] == [200] * 3
    assert all("ann@example.com" in page.text for page in pages)
    copied = site.browser()
    copied.cookies.update(browser.cookies)
    mark = pages[1].text.partition('name="form_token" value="')[2].partition('"')[0]
    assert browser.post("/sign-out", data={"form_token": "0" * 64}).status_code == 403
    assert browser.post("/sign-out", data={"form_token": mark}).headers["location"] == "/signed-out"
    assert {browser.get(path).status_code for path in ("/coverage", "/shares")} == {303}
    site.ended.read()
    assert {copied.get(path).status_code for path in ("/coverage", "/shares")} == {303}, "a copied cookie too"


def test_a_team_lead_opens_its_own_month_and_shares_and_signs_out_from_a_refusal(site: Site) -> None:
    lead = site.sign_in("leads", path="/shares")
    assert lead.get("/month").headers["location"] == "/team/vision"
    assert lead.get("/team/vision").status_code == 200
    for path in ("/shares/policy", "/coverage"):
        refused = lead.get(path)
        assert refused.status_code == 403
        assert 'name="form_token"' in refused.text


def test_who_may_not_see_all_teams_does_not_read_ended_sessions_and_the_controller_ends_none(site: Site) -> None:
    lead = site.sign_in("leads", path="/shares")
    assert lead.get("/v1/sessions/ended").status_code == 403
    with pytest.raises(AuthorityUnavailable):
        site.ended.end("a session", NOW_MS)
