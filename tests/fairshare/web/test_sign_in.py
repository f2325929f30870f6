"""Sign-in to the controller's pages: roles, sessions, and refused sign-ins."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from fairshare.composition import serve_pages
from fairshare.controller.policy_file import digest
from fairshare.core.settings import Settings
from fairshare.usage.accountant_client import AccountantApi
from fairshare.web import queue_pages
from fairshare.web.page_authentication import PROGRAM, SignInFault, SignIns
from fairshare.web.page_routing import link
from fairshare.web.policy_pages import ROUTES
from gputally.base.clock import VirtualClock
from gputally.base.yaml_file import FileFault
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import CONFIG_MAP
from gputally.server.sign_in import Session
from tests.fairshare.web.browsing import HERE, NAME, OTHERS, SIGNER, Browser, PageContext, site_in
from tests.fairshare.web.granting import callers, key
from tests.fairshare.web.staging import addresses, stage, text
from tests.fakes.provider import Provider

# --- coming in, and going --------------------------------------------------------------------------


def test_a_person_signs_in_sees_the_page_asked_for_and_signs_out(context: PageContext) -> None:
    browser = context.browser()
    context.login.claims |= {"groups": ["readers", "chess"]}
    done = browser.sign_in("/decisions?queue=vision&days=1")
    assert (done.status, done.headers["Location"]) == (303, "/decisions?queue=vision&days=1")
    assert set(browser.cookies) == {NAME}, "what was under way is over"
    (kept,) = (cookie for cookie in done.cookies if cookie.startswith(NAME))
    assert re.search("; HttpOnly; Max-Age=3600; Path=/; SameSite=lax; Secure$", kept)
    page = browser.get("/decisions")
    assert "ann@example.com" in text(page)
    assert "form-action 'self'" in page.headers["Content-Security-Policy"]
    assert browser.post("/sign-out", mark="0" * 64).status == 403
    assert browser.post("/sign-out", sec_fetch_site="cross-site").status == 403
    assert browser.get("/decisions").status == 200
    assert browser.post("/sign-out").headers["Location"] == "/signed-out"
    assert browser.cookies == {}
    assert "Sign in again" in text(browser.get("/signed-out"))
    assert browser.get("/decisions").headers["Location"] == "/sign-in?next=%2Fdecisions"


def test_a_session_and_a_sign_in_under_way_are_known_to_every_replica(context: PageContext) -> None:
    context.login.claims |= {"groups": ["operators"]}
    browser = context.browser()
    address = browser.leave()
    browser.site = context.second.site
    assert browser.get(browser.back(address)).status == 303, "begun at the one, ended at the other"
    mark = browser.mark()
    browser.site = context.first.site
    assert browser.post("/policy/file", {"text": context.first.file.read_text()}, mark=mark).status == 200
    assert browser.post("/sign-out", mark=mark).status == 303


def test_tokens_go_on_beside_it_and_a_machine_is_not_sent_to_sign_in(context: PageContext) -> None:
    assert context.first.get("/", "read").status == 200
    refused = context.first.get("/")
    assert (refused.status, refused.headers["WWW-Authenticate"]) == (401, 'Bearer realm="gputally"'), "no dialog"
    asked = context.first.get("/preview/0/state", accept="*/*")
    assert asked.status == 401, "nor is a script of a page whose session is over"
    # A token that is wrong is not made good by a session.
    assert (
        context.browser("readers")
        .get("/", authorization="Bearer wrong")
        .headers.get("Location", "")
        .startswith("/sign")
    )


# --- who may do what -------------------------------------------------------------------------------

ROLES: dict[str, tuple[str, ...]] = {
    "stranger": ("chess",), "reader": ("readers",), "operator": ("operators",), "admin": ("admins",),
    "lead": ("leads",), "bold lead": ("bold-leads",),
}  # fmt: skip


@pytest.mark.parametrize("role", ["nobody", *ROLES])
def test_every_route_as_every_role(context: PageContext, role: str) -> None:
    browser = context.browser(*ROLES.get(role, ()))
    mark = browser.mark()
    assert bool(mark) == (role not in ("nobody", "stranger"))
    for route in ROUTES:
        url = addresses(context.first)[route.method, route.prefix]
        found = browser.get(url) if route.method == "GET" else browser.post(url, mark=mark)
        passed = {
            "nobody": False, "stranger": False, "reader": route.scope == "read", "operator": True, "admin": True,
            "lead": route.for_teams, "bold lead": route.for_teams,
        }[role]  # fmt: skip
        if passed:
            assert found.status not in (401, 403, 500), (role, url, text(found))
            assert "/sign-in" not in found.headers.get("Location", "")
        elif role == "nobody":
            assert found.status == (303 if route.method == "GET" else 401), url
        else:
            assert found.status == 403, (role, url)


def test_an_operator_applies_a_policy_and_a_reader_cannot(context: PageContext) -> None:
    before = context.first.file.read_text()
    form = {"text": before.replace("k: 2.0", "k: 3.0"), "base": digest(before)}
    reader = context.browser("readers")
    assert reader.post("/policy/apply", form).status == 403
    assert '<fieldset class="all" disabled>' in text(reader.get("/policy"))
    assert context.first.file.read_text() == before
    assert context.browser("operators").post("/policy/apply", form).status == 200
    assert context.first.file.read_text() == form["text"]
    assert context.first.applied[-1][0] == "ann@example.com", "and it is told who did"


def test_a_lead_sees_own_queues_and_no_word_of_anothers(context: PageContext) -> None:
    lead = context.browser("leads")
    shown = [lead.get(url) for url in ("/", "/queue/vision")]
    for page in shown:
        assert page.status == 200
        assert "vision" in text(page)
    assert re.search(r"due [\d.]+ GPUs now, holds 24, asks for 40", text(shown[1]))
    elsewhere = [lead.get(url) for (method, _), url in addresses(context.first).items() if method == "GET"]
    for page in (*shown, *elsewhere):
        for name in OTHERS:
            assert not re.search(rf"\b{name}\b", text(page)), name
    for name in (*OTHERS, "nobody"):
        refused = lead.get(link("/queue/", name))
        assert refused.status == 404, "theirs is told as none is"
        assert text(refused).replace(name, "") == text(lead.get("/queue/nobody")).replace("nobody", "")
    assert "your teams have no queue" in text(refused)
    assert "/policy" not in text(shown[0]).partition("</nav>")[0]


def test_a_queue_belongs_to_a_team_with_all_that_is_below_it(context: PageContext) -> None:
    snapshot = context.first.scene.now()
    assert snapshot is not None
    policy = snapshot.policy
    assert queue_pages.owned(policy, ["vision"]) == {"vision"}
    assert queue_pages.owned(policy, ["vision", "language"]) == {"vision", "language"}, (
        "what is above them names no team"
    )
    queues = [
        queue.model_copy(update={"team": "lab"} if queue.name == "research" else {"team": None})
        if queue.name in ("research", "language")
        else queue
        for queue in policy.queues
    ]
    inherited = policy.model_copy(update={"queues": tuple(queues)})
    assert queue_pages.owned(inherited, ["lab"]) == {"language"}, "research holds vision's as well"
    assert queue_pages.owned(inherited, ["lab", "vision"]) == {"research", "vision", "language"}
    assert queue_pages.owned(policy, []) == frozenset()


def test_without_a_queue_of_theirs_a_lead_is_told_so(tmp_path: Path, login: tuple[Provider, VirtualClock]) -> None:
    text_of_policy = "queues:\n  - {name: research, refs: ['kai:research'], team: other}\n"
    file, secret = callers(tmp_path, login[0]), key(tmp_path)
    here = stage(
        tmp_path, text=text_of_policy, cycles=1,
        people=lambda clock: SignIns(file, secret, HERE, 60, clock, lambda fault: None),
    )  # fmt: skip
    session = SIGNER.encode_session(Session(login[0].url, "ann", ("leads",), "id"), here.clock.wall_ms(), 60)
    shown = text(Browser(here.site, {NAME: session}, {NAME: "/"}).get("/"))
    assert "No queue belongs to vision" in shown
    assert "research" not in shown


def test_what_one_may_is_asked_at_every_request(tmp_path: Path, login: tuple[Provider, VirtualClock]) -> None:
    here = site_in(tmp_path, *login)
    browser = here.browser("operators")
    assert browser.get("/policy").status == 200
    granted = here.file.read_text()
    here.file.write_text(granted.replace('"operators"', '"others"'))
    here.first.clock.advance(2_000)
    assert browser.get("/policy").status == 403
    here.file.write_text("schema: 1\ngrants: 7\n")
    here.first.clock.advance(2_000)
    assert browser.get("/policy").status == 403, "a broken version changes nothing"
    assert "callers.yaml:2" in here.faults[0]
    without = json.loads(granted)
    del without["issuers"][0]["login"]
    here.file.write_text(json.dumps(without))
    here.first.clock.advance(2_000)
    assert browser.get("/policy").status == 401, "and that provider has no sign-in any more"
    assert browser.get("/sign-in").status == 404
    assert here.first.get("/", "read").status == 200


# --- composed from settings ------------------------------------------------------------------------


@pytest.fixture
def serve(tmp_path: Path) -> Callable[..., Any]:
    """The pages of a controller, from settings."""
    here = stage(tmp_path, cycles=1)

    def made(clock: VirtualClock, **given: Any) -> Any:
        client = AccountantApi("http://127.0.0.1:1")
        settings = Settings(policy=here.file, pages_listen="127.0.0.1:0", status_namespace="", **given)
        return serve_pages(settings, here.scene, client, clock, MemoryCluster((CONFIG_MAP,), []))

    return made


def test_over_http_one_signs_in_by_the_settings(
    tmp_path: Path, login: tuple[Provider, VirtualClock], serve: Callable[..., Any]
) -> None:
    state, clock = login
    state.claims |= {"groups": ["readers"]}
    given = {"pages_callers": callers(tmp_path, state), "pages_session_key": key(tmp_path)}
    with serve(clock, **given, pages_public_url="http://localhost") as url, httpx2.Client(base_url=url) as browser:
        left = browser.get("/decisions", headers={"Accept": "text/html"})
        to = browser.get(left.headers["location"]).headers["location"]
        back = httpx2.get(to).headers["location"].removeprefix("http://localhost")
        done = browser.get(back)
        assert (done.status_code, done.headers["location"]) == (303, "/decisions")
        assert done.headers.get_list("set-cookie")[0].startswith(f"{PROGRAM}=")
        assert "ann@example.com" in browser.get("/").text
        assert httpx2.get(url).status_code == 401


def test_without_a_key_or_any_permitted_user_it_does_not_start(
    tmp_path: Path, login: tuple[Provider, VirtualClock], serve: Callable[..., Any]
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
