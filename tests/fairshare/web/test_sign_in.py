"""People sign in to the controller's pages: who may do what there, and what is not quite right is turned away."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import httpx2
import pytest

from accountant.signin.cookies import Seal, Session, SignIn
from agent.clock import VirtualClock
from agent.yamlfile import FileFault
from fairshare.client import AccountantClient
from fairshare.kube.kinds import CONFIG_MAP
from fairshare.kube.memory import MemoryCluster
from fairshare.settings import Settings
from fairshare.web import teams
from fairshare.web.callers import HOUSE, NoSessions, SignIns
from fairshare.web.http import MARK, Answer, Request
from fairshare.web.keeping import digest
from fairshare.web.opening import NobodyComesIn, pages
from fairshare.web.routes import ROUTES
from fairshare.web.site import link
from tests.fairshare.conftest import NOW_MS
from tests.fairshare.web.granting import callers, key
from tests.fairshare.web.staging import Stage, stage
from tests.fakes.provider import Provider, provider

PAGE = {"accept": "text/html"}
HERE = "https://fairshare.example"
NAME, UNDER_WAY = f"__Host-{HOUSE}", f"__Secure-{HOUSE}-sign-in"
SEAL = Seal(b"k" * 32, HOUSE)
"""With the key of `granting.key`."""
OTHERS = ("research", "language", "robotics", "serving", "students")
"""Queues that a lead of vision must not read a word of; the first is above theirs."""


class Faults(list[str]):
    """What a controller would log."""


@dataclass
class Browser:
    """Keeps cookies as browsers do, and asks one site."""

    site: Any
    cookies: dict[str, str] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)

    def ask(self, method: str, url: str, form: Mapping[str, str] | None = None, **headers: str) -> Answer:
        asked = urlsplit(url)
        sent = {"host": "fairshare.example", **PAGE, **{k.replace("_", "-"): v for k, v in headers.items()}}
        kept = [f"{n}={v}" for n, v in self.cookies.items() if asked.path.startswith(self.paths[n])]
        if kept:
            sent["cookie"] = "; ".join(["theme=dark", *kept])
        found: Answer = self.site.answer(
            Request(method, unquote(asked.path), parse_qs(asked.query), {k: [v] for k, v in (form or {}).items()}, sent)
        )
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
        """mark None: that of the page at "/"."""
        return self.ask("POST", url, {MARK: self.mark() if mark is None else mark, **(form or {})}, **headers)

    def mark(self) -> str:
        return self.get("/").body.decode().partition(f'name="{MARK}" value="')[2].partition('"')[0]

    def leave(self, path: str = "/decisions") -> str:
        """Ask for a page; the provider's address that one is sent to."""
        first = self.get(path)
        assert first.status == 303
        second = self.get(first.headers["Location"])
        assert second.status == 303
        return second.headers["Location"]

    def back(self, address: str) -> str:
        """What the provider sends a browser back to."""
        where = httpx2.get(address, follow_redirects=False).headers["location"]
        assert where.startswith(f"{HERE}/sign-in/done?")
        return str(where).removeprefix(HERE)

    def sign_in(self, path: str = "/decisions") -> Answer:
        return self.get(self.back(self.leave(path)))


@dataclass
class House:
    """Two replicas over one policy, and whom people sign in with."""

    first: Stage
    second: Stage
    login: Provider
    file: Path
    faults: Faults

    def browser(self, *groups: str) -> Browser:
        """Of somebody of these groups who has signed in; without any group: of nobody yet."""
        made = Browser(self.first.site)
        if groups:
            who = Session(self.login.url, "ann@example.com", groups, secrets.token_hex())
            made.cookies[NAME] = SEAL.session(who, self.first.clock.wall_ms(), 3_600)
            made.paths[NAME] = "/"
        return made


def house_in(folder: Path, login: Provider, clock: VirtualClock, **more: Any) -> House:
    file, secret, faults = callers(folder, login, **more), key(folder), Faults()

    def people(own: VirtualClock) -> SignIns:
        return SignIns(file, secret, HERE, 3_600, own, faults.append)

    stages = []
    for name in ("first", "second"):
        (folder / name).mkdir()
        stages.append(stage(folder / name, writable=True, guarded=True, people=people))
    # The provider's clock is the pages'.
    clock.advance(stages[0].clock.wall_ms() - clock.wall_ms())
    return House(stages[0], stages[1], login, file, faults)


@pytest.fixture(scope="module")
def login() -> Iterator[tuple[Provider, VirtualClock]]:
    clock = VirtualClock(NOW_MS)
    with provider(clock) as running:
        yield running, clock


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, login: tuple[Provider, VirtualClock]) -> House:
    return house_in(tmp_path_factory.mktemp("house"), *login)


@pytest.fixture
def house(shared: House) -> House:
    """With a provider that tells the truth."""
    shared.login.spoil, shared.login.refuse, shared.login.secret = {}, False, "client-s3cret"
    shared.login.claims = {"sub": "1", "email": "ann@example.com", "groups": []}
    return shared


def text(found: Answer) -> str:
    return unescape(found.body.decode())


def addresses(here: Stage) -> dict[tuple[str, str], str]:
    one = next(each for each in here.accountant.decisions if each.subject == "vision")
    examples = {
        "/queue/": "/queue/vision", "/preview/": "/preview/0000",
        "/decision": link("/decision", id=one.id, at=str(one.at_ms)),
    }  # fmt: skip
    return {(route.method, route.prefix): examples.get(route.prefix, route.prefix) for route in ROUTES}


# --- coming in, and going --------------------------------------------------------------------------


def test_a_person_signs_in_sees_the_page_asked_for_and_signs_out(house: House) -> None:
    browser = house.browser()
    house.login.claims |= {"groups": ["readers", "chess"]}
    done = browser.sign_in("/decisions?queue=vision&days=1")
    assert (done.status, done.headers["Location"]) == (303, "/decisions?queue=vision&days=1")
    assert set(browser.cookies) == {NAME}, "what was under way is over"
    (kept,) = (cookie for cookie in done.cookies if cookie.startswith(NAME))
    assert re.search("; Path=/; Max-Age=3600; HttpOnly; SameSite=lax; Secure$", kept)
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


def test_a_session_and_a_sign_in_under_way_are_known_to_every_replica(house: House) -> None:
    house.login.claims |= {"groups": ["operators"]}
    browser = house.browser()
    address = browser.leave()
    browser.site = house.second.site
    assert browser.get(browser.back(address)).status == 303, "begun at the one, ended at the other"
    mark = browser.mark()
    browser.site = house.first.site
    assert browser.post("/policy/file", {"text": house.first.file.read_text()}, mark=mark).status == 200
    assert browser.post("/sign-out", mark=mark).status == 303


def test_tokens_go_on_beside_it_and_a_machine_is_not_sent_to_sign_in(house: House) -> None:
    assert house.first.get("/", "read").status == 200
    refused = house.first.get("/")
    assert (refused.status, refused.headers["WWW-Authenticate"]) == (401, 'Bearer realm="gputally"'), "no dialog"
    asked = house.first.get("/preview/0/state", accept="*/*")
    assert asked.status == 401, "nor is a script of a page whose session is over"
    # A token that is wrong is not made good by a session.
    assert (
        house.browser("readers").get("/", authorization="Bearer wrong").headers.get("Location", "").startswith("/sign")
    )


# --- who may do what -------------------------------------------------------------------------------

ROLES: dict[str, tuple[str, ...]] = {
    "stranger": ("chess",), "reader": ("readers",), "operator": ("operators",), "admin": ("admins",),
    "lead": ("leads",), "bold lead": ("bold-leads",),
}  # fmt: skip


@pytest.mark.parametrize("role", ["nobody", *ROLES])
def test_every_route_as_every_role(house: House, role: str) -> None:
    browser = house.browser(*ROLES.get(role, ()))
    mark = browser.mark()
    assert bool(mark) == (role not in ("nobody", "stranger"))
    for route in ROUTES:
        url = addresses(house.first)[route.method, route.prefix]
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


def test_an_operator_applies_a_policy_and_a_reader_cannot(house: House) -> None:
    before = house.first.file.read_text()
    form = {"text": before.replace("k: 2.0", "k: 3.0"), "base": digest(before)}
    reader = house.browser("readers")
    assert reader.post("/policy/apply", form).status == 403
    assert '<fieldset class="all" disabled>' in text(reader.get("/policy"))
    assert house.first.file.read_text() == before
    assert house.browser("operators").post("/policy/apply", form).status == 200
    assert house.first.file.read_text() == form["text"]
    assert house.first.applied[-1][0] == "ann@example.com", "and it is told who did"


def test_a_lead_sees_own_queues_and_no_word_of_anothers(house: House) -> None:
    lead = house.browser("leads")
    shown = [lead.get(url) for url in ("/", "/queue/vision")]
    for page in shown:
        assert page.status == 200
        assert "vision" in text(page)
    assert re.search(r"due [\d.]+ GPUs now, holds 24, asks for 40", text(shown[1]))
    elsewhere = [lead.get(url) for (method, _), url in addresses(house.first).items() if method == "GET"]
    for page in (*shown, *elsewhere):
        for name in OTHERS:
            assert not re.search(rf"\b{name}\b", text(page)), name
    for name in (*OTHERS, "nobody"):
        refused = lead.get(link("/queue/", name))
        assert refused.status == 404, "theirs is told as none is"
        assert text(refused).replace(name, "") == text(lead.get("/queue/nobody")).replace("nobody", "")
    assert "your teams have no queue" in text(refused)
    assert "/policy" not in text(shown[0]).partition("</nav>")[0]


def test_a_queue_belongs_to_a_team_with_all_that_is_below_it(house: House) -> None:
    snapshot = house.first.scene.now()
    assert snapshot is not None
    policy = snapshot.policy
    assert teams.owned(policy, ["vision"]) == {"vision"}
    assert teams.owned(policy, ["vision", "language"]) == {"vision", "language"}, "what is above them names no team"
    queues = [
        queue.model_copy(update={"team": "lab"} if queue.name == "research" else {"team": None})
        if queue.name in ("research", "language")
        else queue
        for queue in policy.queues
    ]
    inherited = policy.model_copy(update={"queues": tuple(queues)})
    assert teams.owned(inherited, ["lab"]) == {"language"}, "research holds vision's as well"
    assert teams.owned(inherited, ["lab", "vision"]) == {"research", "vision", "language"}
    assert teams.owned(policy, []) == frozenset()


def test_without_a_queue_of_theirs_a_lead_is_told_so(tmp_path: Path, login: tuple[Provider, VirtualClock]) -> None:
    text_of_policy = "queues:\n  - {name: research, refs: ['kai:research'], team: other}\n"
    file, secret = callers(tmp_path, login[0]), key(tmp_path)
    here = stage(
        tmp_path, text=text_of_policy, cycles=1,
        people=lambda clock: SignIns(file, secret, HERE, 60, clock, lambda fault: None),
    )  # fmt: skip
    session = SEAL.session(Session(login[0].url, "ann", ("leads",), "id"), here.clock.wall_ms(), 60)
    shown = text(Browser(here.site, {NAME: session}, {NAME: "/"}).get("/"))
    assert "No queue belongs to vision" in shown
    assert "research" not in shown


def test_what_one_may_is_asked_at_every_request(tmp_path: Path, login: tuple[Provider, VirtualClock]) -> None:
    here = house_in(tmp_path, *login)
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
    assert browser.get("/policy").status == 401, "and nobody signs in with that provider any more"
    assert browser.get("/sign-in").status == 404
    assert here.first.get("/", "read").status == 200


# --- what is not quite right -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "spoil",
    [
        {"nonce": "another"}, {"aud": "somebody-else"}, {"iss": "https://evil"}, {"exp": NOW_MS // 1000 - 3_600},
        {"nbf": NOW_MS // 1000 + 36_000}, {"email": ""},
    ],
    ids=str,
)  # fmt: skip
def test_a_token_that_is_not_for_this_sign_in_is_refused(house: House, spoil: dict[str, Any]) -> None:
    house.login.claims |= {"groups": ["operators"]}
    house.login.spoil = spoil
    browser = house.browser()
    done = browser.sign_in()
    assert (done.status, NAME in browser.cookies) == (401, False)
    assert 'href="/sign-in"' in text(done)
    assert browser.get("/").status == 303


def test_another_browsers_answer_signs_nobody_in(house: House) -> None:
    """Login CSRF: an attacker's code must not sign a victim in as the attacker."""
    house.login.claims |= {"groups": ["operators"]}
    attacker, victim = house.browser(), house.browser()
    stolen = attacker.back(attacker.leave())
    assert victim.get(stolen).status == 401, "no sign-in is under way here"
    victim.leave()
    assert victim.get(stolen).status == 401, "another one is"
    assert NAME not in victim.cookies


def test_a_code_is_good_once_and_a_refusal_is_told(house: House) -> None:
    browser = house.browser()
    back = browser.back(browser.leave())
    under_way = dict(browser.cookies)
    assert browser.get(back).status == 303
    browser.cookies.update(under_way)
    assert browser.get(back).status == 401
    house.login.refuse = True
    assert "did not let you in" in text(house.browser().sign_in())


def test_cookies_that_are_forged_swapped_or_over_are_none(house: House) -> None:
    now = house.first.clock.wall_ms()
    session = Session(house.login.url, "eve", ("operators", "admins"), "id")
    ours, forged = SEAL, Seal(b"x" * 32, HOUSE)
    under_way = SignIn(house.login.url, "s", "n", "v", "/")
    valid = ours.session(session, now, 60)
    browser = Browser(house.first.site, {NAME: valid}, {NAME: "/"})
    assert browser.get("/").status == 200
    wrong = {
        "another key": forged.session(session, now, 60),
        "the accountant's": Seal(b"k" * 32).session(session, now, 60),
        "a sign-in": ours.sign_in(under_way, now, 60),
        "over": ours.session(session, now - 60_000, 60),
        "another issuer's": ours.session(Session("https://gone", "eve", ("operators",), "id"), now, 60),
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
    here = house_in(tmp_path, *login)
    browser = here.browser("readers")
    here.first.clock.advance(3_599_000)
    assert browser.get("/").status == 200
    here.first.clock.advance(1_000)
    assert browser.get("/").headers["Location"] == "/sign-in?next=%2F"
    late = here.browser()
    back = late.back(late.leave())
    here.first.clock.advance(600_000)
    assert "too long ago" in text(late.get(back))


@pytest.mark.parametrize(
    ("mark", "headers"),
    [
        ("", {}), ("0" * 64, {}), (None, {"sec_fetch_site": "cross-site"}), (None, {"sec_fetch_site": "same-site"}),
        (None, {"origin": "https://elsewhere.example"}),
    ],
)  # fmt: skip
def test_another_site_writes_nothing_with_somebodys_session(
    house: House, mark: str | None, headers: dict[str, str]
) -> None:
    before = house.first.file.read_text()
    browser = house.browser("operators")
    form = {"text": before + "\n# mine\n", "base": digest(before)}
    assert browser.post("/policy/apply", form, mark=mark, **headers).status == 403
    other = house.browser("operators")
    assert browser.post("/policy/apply", form, mark=other.mark()).status == 403, "a form of another session's"
    assert house.first.file.read_text() == before


@pytest.mark.parametrize(
    "following",
    ["https://evil.example", "//evil.example", "/\\evil.example", "\\\\evil.example", "javascript:alert(1)", "/a\nb"],
)
def test_nobody_is_led_to_another_site(house: House, following: str) -> None:
    browser = house.browser()
    address = browser.ask("GET", link("/sign-in", next=following)).headers["Location"]
    assert address.startswith(f"{house.login.url}/authorize?")
    assert parse_qs(urlsplit(address).query)["redirect_uri"] == [f"{HERE}/sign-in/done"]
    assert browser.get(browser.back(address)).headers["Location"] == "/"


def test_a_name_that_is_no_ascii_comes_back_as_an_address(house: House) -> None:
    house.login.claims |= {"groups": ["readers"]}
    done = house.browser().sign_in(link("/queue/", "größe <b>"))
    assert done.headers["Location"] == "/queue/gr%C3%B6%C3%9Fe%20%3Cb%3E"


def test_what_is_too_long_or_not_there_is_refused(house: House) -> None:
    browser = house.browser()
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


# --- composed from settings ------------------------------------------------------------------------


@pytest.fixture
def serve(tmp_path: Path) -> Callable[..., Any]:
    """The pages of a controller, from settings."""
    here = stage(tmp_path, cycles=1)

    def made(clock: VirtualClock, **given: Any) -> Any:
        client = AccountantClient("http://127.0.0.1:1")
        settings = Settings(policy=here.file, pages_listen="127.0.0.1:0", status_namespace="", **given)
        return pages(settings, here.scene, client, clock, MemoryCluster((CONFIG_MAP,), []))

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
        assert done.headers.get_list("set-cookie")[0].startswith(f"{HOUSE}=")
        assert "ann@example.com" in browser.get("/").text
        assert httpx2.get(url).status_code == 401


def test_without_a_key_or_anybody_it_does_not_start(
    tmp_path: Path, login: tuple[Provider, VirtualClock], serve: Callable[..., Any]
) -> None:
    state, clock = login
    file = callers(tmp_path, state)
    given = {"pages_callers": file, "pages_public_url": HERE, "pages_session_key": tmp_path / "none"}
    with pytest.raises(NoSessions, match=r"pages_session_key: .*none: No such file"), serve(clock, **given):
        pass
    file.write_text("schema: 1\n")
    given["pages_session_key"] = key(tmp_path)
    with pytest.raises(NobodyComesIn, match="no issuer has a login"), serve(clock, **given):
        pass
    file.write_text("schema: 2\n")
    with pytest.raises(FileFault, match=r"callers\.yaml:1"), serve(clock, **given):
        pass
