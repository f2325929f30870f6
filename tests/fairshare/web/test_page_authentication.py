"""Sign-in to the pages of the controller: roles, sessions, and refused sign-ins."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest
from starlette.routing import Route

from fairshare.composition import serve_pages
from fairshare.controller.policy_file import digest
from fairshare.core.settings import ControllerSettings
from fairshare.usage.accountant_client import AccountantApi
from fairshare.web import queue_pages
from fairshare.web.page_authentication import SignInFault
from fairshare.web.page_routing import link
from gputally.base.clock import VirtualClock
from gputally.base.yaml_file import FileFault
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import CONFIG_MAP
from gputally.server.sign_in import CookieSigner, Session, SignIn
from tests.fairshare.conftest import NOW_MS
from tests.fairshare.web.browser_sessions import (
    HERE,
    NAME,
    OTHERS,
    SIGNER,
    Browser,
    Login,
    PageContext,
    callers,
    key,
    signing_in,
    site_in,
)
from tests.fairshare.web.controller_pages import addresses, stage, text
from tests.fakes.provider import provider


def test_a_person_signs_in_sees_the_page_asked_for_and_signs_out(context: PageContext) -> None:
    browser = context.browser()
    context.login.claims |= {"groups": ["readers", "chess"]}
    done = browser.sign_in("/shares/decisions?queue=vision&days=1")
    assert (done.status, done.headers["Location"]) == (303, "/shares/decisions?queue=vision&days=1")
    assert set(browser.cookies) == {NAME}, "what was under way is over"
    (kept,) = (cookie for cookie in done.cookies if cookie.startswith(NAME))
    assert re.search("; HttpOnly; Max-Age=3600; Path=/; SameSite=lax; Secure$", kept)
    page = browser.get("/shares/decisions")
    assert "ann@example.com" in text(page)
    assert "form-action 'self'" in page.headers["Content-Security-Policy"]
    assert browser.post("/sign-out", mark="0" * 64).status == 403
    assert browser.post("/sign-out", sec_fetch_site="cross-site").status == 403
    assert browser.get("/shares/decisions").status == 200
    assert browser.post("/sign-out").headers["Location"] == "/signed-out"
    assert browser.cookies == {}
    assert "Sign in again" in text(browser.get("/signed-out"))
    assert browser.get("/shares/decisions").headers["Location"] == "/sign-in?next=%2Fshares%2Fdecisions"


def test_a_session_and_a_sign_in_under_way_are_known_to_every_replica(context: PageContext) -> None:
    context.login.claims |= {"groups": ["operators"]}
    browser = context.browser()
    address = browser.leave()
    browser.site = context.second.site
    assert browser.get(browser.back(address)).status == 303, "begun at the one, ended at the other"
    mark = browser.mark()
    browser.site = context.first.site
    assert browser.post("/shares/policy/file", {"text": context.first.file.read_text()}, mark=mark).status == 200
    assert browser.post("/sign-out", mark=mark).status == 303


def test_signing_out_ends_a_copied_cookie_at_every_replica(context: PageContext) -> None:
    browser = context.browser("readers")
    copied = Browser(context.second.site, dict(browser.cookies), dict(browser.paths))
    mark = browser.mark()
    assert copied.get("/shares").status == 200
    assert browser.post("/sign-out", mark=mark).status == 303
    copied.site = context.first.site
    assert copied.get("/shares").status == 303
    context.ended[1].read()
    copied.site = context.second.site
    assert copied.get("/shares").status == 303
    assert context.browser("readers").get("/shares").status == 200, "others stay signed in"


def test_who_has_no_grant_signs_out(context: PageContext) -> None:
    browser = context.browser("chess")
    assert browser.get("/shares").status == 403
    assert browser.post("/sign-out").headers["Location"] == "/signed-out"
    assert browser.cookies == {}


@pytest.mark.parametrize("role", ["nobody", "stranger", "reader"])
def test_a_form_is_read_only_when_its_sender_is_known_and_may_send_it(context: PageContext, role: str) -> None:
    browser = context.browser(*ROLES.get(role, ()))
    cookies = [f"{name}={value}" for name, value in browser.cookies.items()]
    headers = {"cookie": "; ".join(cookies), "content-type": "application/x-www-form-urlencoded"}
    scope: dict[str, Any] = {
        "type": "http", "method": "POST", "path": "/shares/policy/apply", "raw_path": b"/shares/policy/apply",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()], "client": ("127.0.0.1", 1),
    }  # fmt: skip
    statuses: list[int] = []

    async def unread() -> Any:
        raise AssertionError("the body is read")

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    asyncio.run(context.first.site.app(scope, unread, send))
    assert statuses == [401 if role == "nobody" else 403]


def test_the_form_of_a_sender_who_is_not_known_is_small(context: PageContext) -> None:
    assert context.browser("readers").post("/sign-out", {"more": "x" * 2_000}).status == 413


def test_tokens_go_on_beside_it_and_a_machine_is_not_sent_to_sign_in(context: PageContext) -> None:
    assert context.first.get("/shares", "read").status == 200
    refused = context.first.get("/shares")
    assert (refused.status, refused.headers["WWW-Authenticate"]) == (401, 'Bearer realm="gputally"'), "no dialog"
    asked = context.first.get("/shares/preview/0/state", accept="*/*")
    assert asked.status == 401, "nor is a script of a page whose session is over"
    # A token that is wrong is not made good by a session.
    wrong = context.browser("readers").get("/shares", authorization="Bearer wrong")
    assert wrong.headers.get("Location", "").startswith("/sign")


ROLES: dict[str, tuple[str, ...]] = {
    "stranger": ("chess",), "reader": ("readers",), "operator": ("operators",), "admin": ("admins",),
    "lead": ("leads",), "bold lead": ("bold-leads",),
}  # fmt: skip


READ = frozenset({"reader", "operator", "admin"})
ACT = frozenset({"operator", "admin"})
TEAMS = frozenset({"lead", "bold lead"})
PASSES: dict[tuple[str, str], frozenset[str]] = {
    ("GET", "/shares"): READ | TEAMS,
    ("GET", "/shares/queue/"): READ | TEAMS,
    ("GET", "/shares/decisions"): READ,
    ("GET", "/shares/shares.csv"): READ | TEAMS,
    ("GET", "/shares/decision"): READ,
    ("GET", "/shares/policy"): READ,
    ("GET", "/shares/preview/"): READ,
    ("POST", "/shares/policy"): ACT,
    ("POST", "/shares/policy/check"): ACT,
    ("POST", "/shares/policy/file"): ACT,
    ("POST", "/shares/policy/preview"): ACT,
    ("POST", "/shares/policy/apply"): ACT,
    ("POST", "/shares/preview/"): ACT,
}
"""Who passes, by route. A new route has to be in this table."""
OF_TOKENS = {
    "read": "reader", "both": "operator", "admin": "admin", "team": "lead", "policy": "stranger", "ingest": "stranger",
    "progress": "stranger",
}  # fmt: skip
"""The role of a token with these scopes. One that may only change the policy sees no form, and so has no form's
token."""
PUBLIC = {
    ("GET", "/sign-in"): 303, ("GET", "/sign-in/done"): 401, ("POST", "/sign-out"): 303, ("GET", "/signed-out"): 200,
    ("GET", "/"): 303,
    ("GET", "/shares/static/style.css"): 200, ("GET", "/shares/static/pages.js"): 200, ("GET", "/favicon.ico"): 200,
}  # fmt: skip
"""Routes that ask for no scope, and what they answer to an empty request without a session."""


def test_every_route_is_in_a_table(context: PageContext) -> None:
    routes = [route for route in context.first.site.app.routes if isinstance(route, Route)]
    listed = {
        (method, route.path.removesuffix("{rest:path}"))
        for route in routes
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert listed == PASSES.keys() | PUBLIC.keys()


@pytest.mark.parametrize("route", sorted(PUBLIC), ids=" ".join)
def test_a_public_route_answers_everybody_alike_who_has_no_session(
    context: PageContext, route: tuple[str, str]
) -> None:
    method, path = route
    for token in ("", "read", "admin", "team"):
        found = context.first.get(path, token) if method == "GET" else context.first.post(path, {}, token, mark="")
        assert found.status == PUBLIC[route], token


@pytest.mark.parametrize("role", ["nobody", *ROLES])
def test_every_route_as_every_role(context: PageContext, role: str) -> None:
    browser = context.browser(*ROLES.get(role, ()))
    mark = browser.mark()
    assert bool(mark) == (role != "nobody"), "who may see nothing can sign out too"
    for (method, prefix), passing in PASSES.items():
        url = addresses(context.first)[method, prefix]
        found = browser.get(url) if method == "GET" else browser.post(url, mark=mark)
        if role in passing:
            assert found.status not in (401, 403, 500), (role, url, text(found))
            assert "/sign-in" not in found.headers.get("Location", "")
        elif role == "nobody":
            assert found.status == (303 if method == "GET" else 401), url
        else:
            assert found.status == 403, (role, url)


@pytest.mark.parametrize("token", ["", "unknown", *OF_TOKENS])
def test_every_route_with_every_token(context: PageContext, token: str) -> None:
    here = context.first
    here.tokens["unknown"] = "unknown"
    for (method, prefix), passing in PASSES.items():
        url = addresses(here)[method, prefix]
        found = here.get(url, token) if method == "GET" else here.post(url, {}, token)
        if OF_TOKENS.get(token, "nobody") in passing:
            assert found.status not in (401, 403, 500), (token, url, text(found))
        else:
            assert found.status == (401 if token in ("", "unknown") else 403), (token, url)


def test_an_operator_applies_a_policy_and_a_reader_cannot(context: PageContext) -> None:
    before = context.first.file.read_text()
    form = {"text": before.replace("k: 1.0", "k: 3.0"), "base": digest(before)}
    reader = context.browser("readers")
    assert reader.post("/shares/policy/apply", form).status == 403
    assert '<fieldset class="all" disabled>' in text(reader.get("/shares/policy"))
    assert context.first.file.read_text() == before
    assert context.browser("operators").post("/shares/policy/apply", form).status == 200
    assert context.first.file.read_text() == form["text"]
    assert context.first.applied[-1][0] == "ann@example.com", "and it is told who did"


def test_a_lead_sees_own_queues_and_no_word_of_anothers(context: PageContext) -> None:
    lead = context.browser("leads")
    shown = [lead.get(url) for url in ("/shares", "/shares/queue/vision")]
    for page in shown:
        assert page.status == 200
        assert "vision" in text(page)
    assert re.search(r"due [\d.]+ GPUs now, holds 24, asks for 40", text(shown[1]))
    elsewhere = [lead.get(url) for (method, _), url in addresses(context.first).items() if method == "GET"]
    for page in (*shown, *elsewhere):
        for name in OTHERS:
            assert not re.search(rf"\b{name}\b", text(page)), name
    for name in (*OTHERS, "nobody"):
        refused = lead.get(link("/shares/queue/", name))
        assert refused.status == 404, "theirs is told as none is"
        assert text(refused).replace(name, "") == text(lead.get("/shares/queue/nobody")).replace("nobody", "")
    assert "your teams have no queue" in text(refused)
    assert "/shares/policy" not in text(shown[0]).partition("</nav>")[0]


def test_a_queue_belongs_to_a_team_with_all_that_is_below_it(context: PageContext) -> None:
    snapshot = context.first.scene.now()
    policy = snapshot.policy
    assert queue_pages.owned(policy, ["vision"]) == {"vision"}
    both = queue_pages.owned(policy, ["vision", "language"])
    assert both == {"vision", "language"}, "what is above them names no team"
    teams = {"research": "lab", "language": None}
    queues = [queue.model_copy(update={"team": teams.get(queue.name, queue.team)}) for queue in policy.queues]
    inherited = policy.model_copy(update={"queues": tuple(queues)})
    assert queue_pages.owned(inherited, ["lab"]) == {"language"}, "research holds vision's as well"
    assert queue_pages.owned(inherited, ["lab", "vision"]) == {"research", "vision", "language"}
    assert queue_pages.owned(policy, []) == frozenset()


def test_without_a_queue_of_theirs_a_lead_is_told_so(tmp_path: Path, login: Login) -> None:
    others = "queues:\n  - {name: research, refs: ['fake:research'], team: other}\n"
    here = signing_in(tmp_path, callers(tmp_path, login[0]), text=others, cycles=1)
    session = SIGNER.encode_session(
        Session(login[0].url, "ann", ("leads",), "id", here.clock.wall_ms()), here.clock.wall_ms(), 60
    )
    shown = text(Browser(here.site, {NAME: session}, {NAME: "/"}).get("/shares"))
    assert "No queue belongs, with all queues below it, to vision." in shown
    assert "research" not in shown


def test_what_one_may_is_asked_at_every_request(tmp_path: Path, login: Login) -> None:
    here = site_in(tmp_path, *login)
    browser = here.browser("operators")
    assert browser.get("/shares/policy").status == 200
    granted = here.file.read_text()
    here.file.write_text(granted.replace('"operators"', '"others"'))
    here.first.clock.advance(2_000)
    assert browser.get("/shares/policy").status == 403
    here.file.write_text("schema: 1\ngrants: 7\n")
    here.first.clock.advance(2_000)
    assert browser.get("/shares/policy").status == 403, "a broken version changes nothing"
    assert "callers.yaml:2" in here.faults[0]
    without = json.loads(granted)
    del without["issuers"][0]["login"]
    here.file.write_text(json.dumps(without))
    here.first.clock.advance(2_000)
    assert browser.get("/shares/policy").status == 401, "and that provider has no sign-in any more"
    assert browser.get("/sign-in").status == 404
    assert here.first.get("/shares", "read").status == 200


@pytest.fixture
def serve(tmp_path: Path) -> Callable[..., Any]:
    """Return a function that builds the controller's pages from settings."""
    here = stage(tmp_path, cycles=1)

    def made(clock: VirtualClock, **given: Any) -> Any:
        client = AccountantApi("http://127.0.0.1:1")
        settings = ControllerSettings(policy=here.file, pages_listen="127.0.0.1:0", status_namespace="", **given)
        return serve_pages(settings, here.scene, client, clock, MemoryCluster((CONFIG_MAP,), []))

    return made


def test_over_http_one_signs_in_by_the_settings(tmp_path: Path, login: Login, serve: Callable[..., Any]) -> None:
    state, clock = login
    state.claims |= {"groups": ["readers"]}
    given = {"pages_callers": callers(tmp_path, state), "pages_session_key": key(tmp_path)}
    with serve(clock, **given, pages_public_url="http://localhost") as url, httpx2.Client(base_url=url) as browser:
        left = browser.get("/shares/decisions", headers={"Accept": "text/html"})
        to = browser.get(left.headers["location"]).headers["location"]
        back = httpx2.get(to).headers["location"].removeprefix("http://localhost")
        done = browser.get(back)
        assert (done.status_code, done.headers["location"]) == (303, "/shares/decisions")
        assert done.headers.get_list("set-cookie")[0].startswith("gputally=")
        assert "ann@example.com" in browser.get("/shares").text
        assert httpx2.get(url + "/shares").status_code == 401


def test_without_a_key_or_any_permitted_user_it_does_not_start(
    tmp_path: Path, login: Login, serve: Callable[..., Any]
) -> None:
    state, clock = login
    file = callers(tmp_path, state)
    given = {"pages_callers": file, "pages_public_url": HERE, "pages_session_key": tmp_path / "none"}
    with pytest.raises(SignInFault, match=r"pages_session_key: .*none: No such file"), serve(clock, **given):
        pass
    file.write_text("schema: 1\n")
    given["pages_session_key"] = key(tmp_path)
    with pytest.raises(SignInFault, match="no issuer has a login"), serve(clock, **given):
        pass
    file.write_text("schema: 2\n")
    with pytest.raises(FileFault, match=r"callers\.yaml:1"), serve(clock, **given):
        pass


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
    assert browser.get("/shares").status == 303


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
    session = Session(context.login.url, "eve", ("operators", "admins"), "id", now)
    ours, forged = SIGNER, CookieSigner(b"x" * 32, HERE)
    under_way = SignIn(context.login.url, "s", "n", "v", "/shares")
    valid = ours.encode_session(session, now, 60)
    browser = Browser(context.first.site, {NAME: valid}, {NAME: "/"})
    assert browser.get("/shares").status == 200
    wrong = {
        "another key": forged.encode_session(session, now, 60),
        "of another address": CookieSigner(b"k" * 32, "https://other.example").encode_session(session, now, 60),
        "a sign-in": ours.encode_sign_in(under_way, now, 60),
        "over": ours.encode_session(session, now - 60_000, 60),
        "another issuer's": ours.encode_session(Session("https://gone", "eve", ("operators",), "id", now), now, 60),
        "cut": valid[:-3],
        "no signature": valid.rpartition(".")[0] + ".",
        "nothing": "x",
    }
    for why, cookie in wrong.items():
        browser.cookies[NAME] = cookie
        assert browser.get("/shares").status == 303, why
        assert (
            browser.post("/shares/policy/apply", {"text": "", "base": ""}, mark=ours.form_token(session)).status == 401
        ), why


def test_a_session_and_a_slow_sign_in_end(tmp_path: Path, login: Login) -> None:
    here = site_in(tmp_path, *login)
    browser = here.browser("readers")
    here.first.clock.advance(1_799_000)
    assert browser.get("/shares").status == 200
    here.first.clock.advance(1_000)
    assert browser.get("/shares").headers["Location"] == "/sign-in?next=%2Fshares"
    assert browser.get("/shares", accept="*/*").status == 200, "only a page can ask the provider for the present groups"
    here.first.clock.advance(1_800_000)
    assert browser.get("/shares", accept="*/*").status == 401
    late = here.browser()
    back = late.back(late.leave())
    here.first.clock.advance(600_000)
    assert "has expired" in text(late.get(back))


@pytest.mark.parametrize(
    ("mark", "headers"),
    [
        ("", {}), ("0" * 64, {}), (None, {"sec_fetch_site": "cross-site"}), (None, {"sec_fetch_site": "same-site"}),
        (None, {"origin": "https://elsewhere.example"}), (None, {"origin": "https://[elsewhere"}),
    ],
)  # fmt: skip
def test_another_site_writes_nothing(context: PageContext, mark: str | None, headers: dict[str, str]) -> None:
    before = context.first.file.read_text()
    browser = context.browser("operators")
    form = {"text": before + "\n# mine\n", "base": digest(before)}
    assert browser.post("/shares/policy/apply", form, mark=mark, **headers).status == 403
    other = context.browser("operators")
    assert browser.post("/shares/policy/apply", form, mark=other.mark()).status == 403, "a form of another session's"
    assert context.first.file.read_text() == before


@pytest.mark.parametrize(
    "following",
    [
        "https://evil.example",
        "//evil.example",
        "//[evil",
        "/\\evil.example",
        "\\\\evil.example",
        "javascript:alert(1)",
        "/a\nb",
    ],
)
def test_no_redirect_leads_to_another_site(context: PageContext, following: str) -> None:
    browser = context.browser()
    address = browser.ask("GET", link("/sign-in", next=following)).headers["Location"]
    assert address.startswith(f"{context.login.url}/authorize?")
    assert parse_qs(urlsplit(address).query)["redirect_uri"] == [f"{HERE}/sign-in/done"]
    assert browser.get(browser.back(address)).headers["Location"] == "/"


def test_a_name_that_is_no_ascii_comes_back_as_an_address(context: PageContext) -> None:
    context.login.claims |= {"groups": ["readers"]}
    done = context.browser().sign_in(link("/shares/queue/", "größe <b>"))
    assert done.headers["Location"] == "/shares/queue/gr%C3%B6%C3%9Fe%20%3Cb%3E"


def test_what_is_too_long_or_not_there_is_refused(context: PageContext) -> None:
    browser = context.browser()
    for path in ("?next=/", "/done?code=", "/done?code=a&state="):
        assert browser.get(f"/sign-in{path}{'x' * 4_001}").status == 400
    assert browser.get("/sign-in?with=2").status == 404
    assert browser.get("/sign-in/done").status == 401


def test_a_provider_that_is_away_is_said(tmp_path: Path) -> None:
    with provider(VirtualClock(NOW_MS)) as gone:
        pass
    answer = Browser(signing_in(tmp_path, callers(tmp_path, gone), cycles=0).site).get("/sign-in")
    assert (answer.status, answer.headers["Retry-After"]) == (503, "5")


def test_several_providers_are_a_choice(tmp_path: Path, login: Login) -> None:
    file = callers(tmp_path, login[0])
    said = json.loads(file.read_text())
    labelled = {"issuer": "https://other.example", "login": {"client_id": "us", "label": "The <b> one"}}
    file.write_text(json.dumps({**said, "issuers": [*said["issuers"], {**said["issuers"][0], **labelled}]}))
    browser = Browser(signing_in(tmp_path, file, cycles=0).site)
    assert b"The &lt;b&gt; one" in browser.get("/sign-in?next=/shares/policy").body
    assert browser.get("/sign-in?with=1&next=/shares/policy").headers["Location"].startswith(login[0].url)


def test_a_session_that_only_the_accountant_accepts_is_refused_in_words_instead_of_going_round(
    tmp_path: Path, login: Login
) -> None:
    """The accountant signs in at one address with the controller, and each has a callers file of its own."""
    pages = signing_in(tmp_path, callers(tmp_path, login[0]), accountant_pages="/")
    browser, now_ms = Browser(pages.site), pages.clock.wall_ms()

    def signed_in_by(issuer: str, id_: str) -> None:
        session = Session(issuer, "ann@example.com", ("readers",), id_, now_ms)
        browser.cookies[NAME] = SIGNER.encode_session(session, now_ms, 3_600)
        browser.paths[NAME] = "/"

    assert browser.get("/shares").headers["Location"] == "/sign-in?next=%2Fshares"
    assert browser.get("/shares/policy").status == 303, "another tab, before anybody has signed in"
    signed_in_by("https://of-the-accountant-alone.example", "first")
    refused = browser.get("/shares")
    assert (refused.status, "pages_callers" in text(refused)) == (401, True)
    assert browser.get("/shares").status == 401, "however often it is asked"
    signed_in_by(login[0].url, "second")
    assert browser.get("/shares").status == 200
