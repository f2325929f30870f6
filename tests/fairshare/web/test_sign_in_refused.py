"""Faulty sign-ins are refused with a message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from fairshare.controller.policy_file import digest
from fairshare.web.page_authentication import PROGRAM, SignIns
from fairshare.web.page_routing import link
from gputally.base.clock import VirtualClock
from gputally.server.sign_in import CookieSigner, Session, SignIn
from tests.fairshare.conftest import NOW_MS
from tests.fairshare.web.browsing import HERE, NAME, SIGNER, Browser, PageContext, site_in
from tests.fairshare.web.granting import callers, key
from tests.fairshare.web.staging import stage, text
from tests.fakes.provider import Provider, provider


@pytest.mark.parametrize(
    "spoil",
    [
        {"nonce": "another"}, {"aud": "somebody-else"}, {"iss": "https://evil"}, {"exp": NOW_MS // 1000 - 3_600},
        {"nbf": NOW_MS // 1000 + 36_000}, {"email": ""},
    ],
    ids=str,
)  # fmt: skip
def test_a_token_that_is_not_for_this_sign_in_is_refused(context: PageContext, spoil: dict[str, Any]) -> None:
    context.login.claims |= {"groups": ["operators"]}
    context.login.spoil = spoil
    browser = context.browser()
    done = browser.sign_in()
    assert (done.status, NAME in browser.cookies) == (401, False)
    assert 'href="/sign-in"' in text(done)
    assert browser.get("/").status == 303


def test_an_answer_to_another_browser_does_not_sign_in(context: PageContext) -> None:
    """Login CSRF: an attacker's code must not sign a victim in as the attacker."""
    context.login.claims |= {"groups": ["operators"]}
    attacker, victim = context.browser(), context.browser()
    stolen = attacker.back(attacker.leave())
    assert victim.get(stolen).status == 401, "no sign-in is under way here"
    victim.leave()
    assert victim.get(stolen).status == 401, "another one is"
    assert NAME not in victim.cookies


def test_a_code_is_good_once_and_a_refusal_is_told(context: PageContext) -> None:
    browser = context.browser()
    back = browser.back(browser.leave())
    under_way = dict(browser.cookies)
    assert browser.get(back).status == 303
    browser.cookies.update(under_way)
    assert browser.get(back).status == 401
    context.login.refuse = True
    assert "refused the sign-in" in text(context.browser().sign_in())


def test_cookies_that_are_forged_swapped_or_over_are_none(context: PageContext) -> None:
    now = context.first.clock.wall_ms()
    session = Session(context.login.url, "eve", ("operators", "admins"), "id")
    ours, forged = SIGNER, CookieSigner(b"x" * 32, PROGRAM)
    under_way = SignIn(context.login.url, "s", "n", "v", "/")
    valid = ours.encode_session(session, now, 60)
    browser = Browser(context.first.site, {NAME: valid}, {NAME: "/"})
    assert browser.get("/").status == 200
    wrong = {
        "another key": forged.encode_session(session, now, 60),
        "the accountant's": CookieSigner(b"k" * 32).encode_session(session, now, 60),
        "a sign-in": ours.encode_sign_in(under_way, now, 60),
        "over": ours.encode_session(session, now - 60_000, 60),
        "another issuer's": ours.encode_session(Session("https://gone", "eve", ("operators",), "id"), now, 60),
        "cut": valid[:-3],
        "no signature": valid.rpartition(".")[0] + ".",
        "nothing": "x",
    }
    for why, cookie in wrong.items():
        browser.cookies[NAME] = cookie
        assert browser.get("/").status == 303, why
        assert browser.post("/policy/apply", {"text": "", "base": ""}, mark=ours.form_token(session)).status == 401, why


def test_a_session_ends_and_so_does_a_sign_in_that_takes_too_long(
    tmp_path: Path, login: tuple[Provider, VirtualClock]
) -> None:
    here = site_in(tmp_path, *login)
    browser = here.browser("readers")
    here.first.clock.advance(3_599_000)
    assert browser.get("/").status == 200
    here.first.clock.advance(1_000)
    assert browser.get("/").headers["Location"] == "/sign-in?next=%2F"
    late = here.browser()
    back = late.back(late.leave())
    here.first.clock.advance(600_000)
    assert "has expired" in text(late.get(back))


@pytest.mark.parametrize(
    ("mark", "headers"),
    [
        ("", {}), ("0" * 64, {}), (None, {"sec_fetch_site": "cross-site"}), (None, {"sec_fetch_site": "same-site"}),
        (None, {"origin": "https://elsewhere.example"}),
    ],
)  # fmt: skip
def test_another_site_writes_nothing_with_a_users_session(
    context: PageContext, mark: str | None, headers: dict[str, str]
) -> None:
    before = context.first.file.read_text()
    browser = context.browser("operators")
    form = {"text": before + "\n# mine\n", "base": digest(before)}
    assert browser.post("/policy/apply", form, mark=mark, **headers).status == 403
    other = context.browser("operators")
    assert browser.post("/policy/apply", form, mark=other.mark()).status == 403, "a form of another session's"
    assert context.first.file.read_text() == before


@pytest.mark.parametrize(
    "following",
    ["https://evil.example", "//evil.example", "/\\evil.example", "\\\\evil.example", "javascript:alert(1)", "/a\nb"],
)
def test_no_redirect_leads_to_another_site(context: PageContext, following: str) -> None:
    browser = context.browser()
    address = browser.ask("GET", link("/sign-in", next=following)).headers["Location"]
    assert address.startswith(f"{context.login.url}/authorize?")
    assert parse_qs(urlsplit(address).query)["redirect_uri"] == [f"{HERE}/sign-in/done"]
    assert browser.get(browser.back(address)).headers["Location"] == "/"


def test_a_name_that_is_no_ascii_comes_back_as_an_address(context: PageContext) -> None:
    context.login.claims |= {"groups": ["readers"]}
    done = context.browser().sign_in(link("/queue/", "größe <b>"))
    assert done.headers["Location"] == "/queue/gr%C3%B6%C3%9Fe%20%3Cb%3E"


def test_what_is_too_long_or_not_there_is_refused(context: PageContext) -> None:
    browser = context.browser()
    for url in (
        "/sign-in?next=/" + "x" * 4_000,
        "/sign-in/done?code=" + "x" * 4_001,
        "/sign-in/done?code=a&state=" + "x" * 4_001,
    ):
        assert browser.get(url).status == 400
    assert browser.get("/sign-in?with=2").status == 404
    assert browser.get("/sign-in/done").status == 401


def test_a_provider_that_is_away_is_said(tmp_path: Path) -> None:
    clock = VirtualClock(NOW_MS)
    with provider(clock) as gone:
        pass
    file, secret = callers(tmp_path, gone), key(tmp_path)
    here = stage(tmp_path, cycles=0, people=lambda own: SignIns(file, secret, HERE, 60, own, lambda fault: None))
    answer = Browser(here.site).get("/sign-in")
    assert (answer.status, answer.headers["Retry-After"]) == (503, "5")


def test_several_providers_are_a_choice(tmp_path: Path, login: tuple[Provider, VirtualClock]) -> None:
    file = callers(tmp_path, login[0])
    said = json.loads(file.read_text())
    other = {
        **said["issuers"][0],
        "issuer": "https://other.example",
        "login": {"client_id": "us", "label": "The <b> one"},
    }
    file.write_text(json.dumps({**said, "issuers": [*said["issuers"], other]}))
    here = stage(tmp_path, cycles=0, people=lambda own: SignIns(file, key(tmp_path), HERE, 60, own, lambda fault: None))
    browser = Browser(here.site)
    page = browser.get("/sign-in?next=/policy")
    assert b"The &lt;b&gt; one" in page.body
    assert browser.get("/sign-in?with=1&next=/policy").headers["Location"].startswith(login[0].url)
