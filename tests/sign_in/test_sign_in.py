"""Users sign in with a provider, see what they may, and sign out; every invalid sign-in is refused."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
import jwt
import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import RedirectResponse
from starlette.testclient import TestClient

from accountant.api.dependencies import Deps
from accountant.composition import Service
from accountant.core.settings import Settings
from gputally.base.clock import VirtualClock
from gputally.base.errors import CannotStart
from gputally.server import openid_connect
from gputally.server.https_server import serve
from gputally.server.sign_in import CookieSigner, Session, SignIn, own_path, read_key, read_or_create_key
from gputally.server.tokens_and_grants import Unauthenticated
from tests import empty_ledger
from tests.deadlines import until
from tests.fakes.gated_ledger import Gate, GatedLedger
from tests.fakes.provider import Provider, provider

NOW_MS = 1_793_534_400_000
PAGE = {"Accept": "text/html"}
HERE = "http://127.0.0.1"


pytestmark = pytest.mark.usefixtures("logs")


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(NOW_MS)


@pytest.fixture
def login(clock: VirtualClock) -> Iterator[Provider]:
    with provider(clock) as running:
        yield running


class PageContext:
    """An accountant with sign-in, and one browser."""

    def __init__(
        self, tmp_path: Path, clock: VirtualClock, login: Provider, more: str = "", login_more: str = ""
    ) -> None:
        (tmp_path / "keys.json").write_bytes(login.keys())
        (tmp_path / "secret").write_text("client-s3cret\n")
        self.login, self.callers = login, tmp_path / "callers.yaml"
        self.callers.write_text(
            f"schema: 1\nissuers:\n  - issuer: {login.url}\n    audience: gputally\n"
            f"    jwks_file: {tmp_path}/keys.json\n    user: email\n"
            f"    login: {{client_id: gputally, client_secret_file: {tmp_path}/secret{login_more}}}\n{more}"
            "grants:\n  - {groups: [platform], scopes: [read, admin]}\n"
            "  - {groups: [leads], scopes: [read], teams: [vision]}\n"
        )
        data = tmp_path / "data"
        settings = Settings(
            data=data if data.exists() else empty_ledger.data(data), callers=self.callers, public_url=HERE
        )
        self.service = Service(settings, clock)
        self.trusted: ssl.SSLContext | bool = True
        """The authorities that the browser trusts."""
        self.browser = TestClient(self.service.app, base_url=HERE, follow_redirects=False)

    def leave(self, path: str = "/coverage") -> str:
        """Request a page and return the provider's address to which it redirects."""
        first = self.browser.get(path, headers=PAGE)
        assert first.status_code == 303
        second = self.browser.get(first.headers["location"], headers=PAGE)
        assert second.status_code == 303
        return str(second.headers["location"])

    def come_back(self, address: str) -> Any:
        back = httpx2.get(address, follow_redirects=False, verify=self.trusted).headers["location"]
        return self.browser.get(back.removeprefix(HERE), headers=PAGE)

    def sign_in(self, *groups: str, path: str = "/coverage") -> Any:
        """Sign in as a member of these groups."""
        if groups:
            self.login.claims |= {"groups": list(groups)}
        return self.come_back(self.leave(path))


def form_token_of(page: str) -> str:
    return page.split('name="form_token" value="')[1].split('"')[0]


@pytest.fixture
def site(tmp_path: Path, clock: VirtualClock, login: Provider) -> Iterator[PageContext]:
    built = PageContext(tmp_path, clock, login)
    yield built
    built.service.close()


def test_a_person_signs_in_sees_the_page_asked_for_and_signs_out(site: PageContext):
    back = site.sign_in("platform", "chess", path="/coverage")
    assert (back.status_code, back.headers["location"]) == (303, "/coverage")
    cookie = back.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=lax" in cookie
    page = site.browser.get("/coverage", headers=PAGE)
    assert page.status_code == 200
    assert "ann@example.com" in page.text
    assert site.browser.get("/v1/audit").status_code == 200, "the API too, for reading"
    form_token = form_token_of(page.text)
    assert site.browser.post("/sign-out", data={"form_token": "0" * 64}).status_code == 403
    assert site.browser.get("/coverage", headers=PAGE).status_code == 200
    assert site.browser.post("/sign-out", data={"form_token": form_token}).headers["location"] == "/signed-out"
    assert "Sign in again" in site.browser.get("/signed-out", headers=PAGE).text
    assert site.browser.get("/coverage", headers=PAGE).status_code == 303


def test_what_one_may_see_is_asked_at_every_request(site: PageContext, clock: VirtualClock):
    site.sign_in("leads", path="/")
    assert site.browser.get("/team/vision", headers=PAGE).status_code == 200
    assert site.browser.get("/team/language", headers=PAGE).status_code == 403
    assert site.browser.get("/v1/audit").status_code == 403
    site.callers.write_text(site.callers.read_text().replace("teams: [vision]", "teams: [language]"))
    clock.advance(60_000)
    site.service.maintain()
    assert site.browser.get("/team/vision", headers=PAGE).status_code == 403, "no new sign-in is needed"
    assert site.browser.get("/team/language", headers=PAGE).status_code == 200


def test_a_session_changes_nothing_but_by_its_own_forms(site: PageContext):
    site.sign_in("platform")
    refused = site.browser.post("/v1/corrections")
    assert refused.status_code == 401, "a cookie alone is what another site's page could make a browser send"


def test_a_session_ends(tmp_path: Path, clock: VirtualClock, login: Provider):
    site = PageContext(tmp_path, clock, login, login_more=", groups_valid: 30d")
    site.sign_in("platform")
    clock.advance(8 * 3_600_000 - 1)
    assert site.browser.get("/coverage", headers=PAGE).status_code == 200
    clock.advance(1)
    assert site.browser.get("/coverage", headers=PAGE).headers["location"] == "/sign-in?next=%2Fcoverage"
    site.service.close()


def test_who_leaves_a_group_loses_it_within_the_hour_and_forms_that_are_open_stay_valid(
    site: PageContext, clock: VirtualClock, login: Provider
):
    site.sign_in("platform", path="/nodes")
    form_token = form_token_of(site.browser.get("/nodes", headers=PAGE).text)
    form = {"gpu": "GPU-1", "reason": "card swapped", "form_token": form_token}
    clock.advance(1_800_000)
    assert site.browser.get("/v1/audit").status_code == 200, "only a page can ask the provider"
    assert site.sign_in(path="/nodes").headers["location"] == "/nodes", "the person need not do anything"
    assert site.browser.get("/nodes", headers=PAGE).status_code == 200
    assert site.browser.post("/node/prod/node-2/gpus", data=form).status_code == 409
    login.claims |= {"groups": []}
    clock.advance(3_600_000)
    assert site.browser.get("/v1/audit").status_code == 401
    assert site.browser.post("/node/prod/node-2/gpus", data=form).status_code == 401
    site.sign_in(path="/nodes")
    assert site.browser.get("/nodes", headers=PAGE).status_code == 403


def test_signing_out_ends_a_copied_cookie_too(tmp_path: Path, site: PageContext, clock: VirtualClock, login: Provider):
    site.sign_in("platform", path="/prices")
    copied = dict(site.browser.cookies)
    page = site.browser.get("/prices", headers=PAGE)
    assert page.headers["cache-control"] == "no-store", "else the back button shows it"
    assert site.browser.get("/static/style.css").headers["cache-control"] != "no-store"
    site.browser.post("/sign-out", data={"form_token": form_token_of(page.text)})

    def refused(context: PageContext) -> bool:
        context.browser.cookies.clear()
        context.browser.cookies.update(copied)
        return context.browser.get("/prices", headers=PAGE).status_code == 303

    assert refused(site)
    site.service.close()
    restarted = PageContext(tmp_path, clock, login)
    assert refused(restarted)
    restarted.browser.cookies.clear()
    restarted.sign_in("platform")
    assert restarted.browser.get("/coverage", headers=PAGE).status_code == 200
    restarted.service.close()


def test_pages_that_a_browser_opens_at_once_all_come_back(site: PageContext, login: Provider):
    login.claims |= {"groups": ["platform"]}
    pages = ["/coverage", "/prices", "/nodes", "/jobs", "/month"]
    left = [site.leave(page) for page in pages]
    back = [site.come_back(address) for address in left]
    assert [answer.headers["location"] for answer in back] == pages
    assert len(site.browser.cookies) == 1, "what was under way is over"
    form_token = form_token_of(site.browser.get("/nodes", headers=PAGE).text)
    for _ in range(30):
        site.browser.get("/sign-in?next=/prices", headers=PAGE)
    assert len(site.browser.cookies) <= 12
    assert form_token_of(site.browser.get("/nodes", headers=PAGE).text) == form_token


@pytest.mark.parametrize(
    ("path", "kind", "of_one"),
    [
        ("/v1/usage?start=2026-10-01&end=2026-10-02", "reads", "reads_by_caller"),
        ("/v1/statement?start=2026-10-01&end=2026-10-02&team=vision", "documents", None),
    ],
)
def test_a_person_is_one_caller_with_however_many_sessions_and_tokens(
    site: PageContext, clock: VirtualClock, login: Provider, path: str, kind: str, of_one: str | None
):
    """Two browsers and two ID tokens of one person have the turns of one caller, and leave the others theirs."""
    deps: Deps = site.service.app.state.deps
    gate, turns = Gate(), deps.turns._pools[kind]
    object.__setattr__(deps, "ledger", GatedLedger(deps.ledger, gate))
    most = getattr(deps.settings.limits, of_one) if of_one else 1

    def token(email: str) -> dict[str, str]:
        now = clock.wall_ms() // 1000
        claims = {**login.claims, "email": email, "iss": login.url, "aud": "gputally", "iat": now, "exp": now + 300}
        encoded = jwt.encode({**claims, "nonce": email}, login.key, algorithm="RS256", headers={"kid": "k1"})
        return {"Authorization": f"Bearer {encoded}"}

    ways = []
    for _ in range(2):
        site.browser = TestClient(site.service.app, base_url=HERE, follow_redirects=False)
        assert site.sign_in("leads", path="/prices").status_code == 303
        ways.append({"Cookie": "; ".join(f"{name}={value}" for name, value in site.browser.cookies.items())})
        clock.advance(1000)
        ways.append(token("ann@example.com"))
    assert len({str(way) for way in ways}) == 4
    with serve(site.service.app, "127.0.0.1", 0) as url, ThreadPoolExecutor(16) as senders, ExitStack() as at_the_end:
        at_the_end.callback(gate.open)

        def ask(headers: dict[str, str]) -> Future[httpx2.Response]:
            return senders.submit(httpx2.get, url + path, headers=headers, timeout=60)

        asked = [ask(way) for way in ways for _ in range(2)]
        until(lambda: turns.running + turns.waiting == len(asked), "all requests should run or wait")
        assert (turns.running, turns.waiting) == (most, len(asked) - most)
        asked.append(ask(token("bob@example.com")))
        until(lambda: turns.running == most + 1, "another person should have a turn")
        gate.open()
        assert {each.result().status_code for each in asked} == {200}


def test_only_groups_with_grants_count_however_many_there_are(site: PageContext, login: Provider):
    back = site.sign_in("platform", *(f"a-group-with-a-rather-long-name-{number}" for number in range(3_000)))
    assert back.status_code == 303
    assert site.browser.get("/coverage", headers=PAGE).status_code == 200


@pytest.mark.parametrize(
    ("answer", "status", "named"),
    [
        ((401, b'{"error": "invalid_client"}'), 503, "client_secret_file"),
        ((400, b'{"error": "invalid_client"}'), 503, "client_secret_file"),
        ((400, b'{"error": "invalid_grant"}'), 401, "invalid_grant"),
        ((429, b"slow down"), 503, "too many requests"),
        ((500, b""), 503, "500"),
        ((200, b"{"), 503, "not JSON"),
        ((200, b'{"id_token": "x"}'), 503, "not a JWT"),
        ((200, b" " * 300_000), 503, "more than"),
    ],
)
def test_each_fault_of_a_provider_has_a_text_of_its_own(
    site: PageContext, login: Provider, logs: list[Any], answer: tuple[int, bytes], status: int, named: str
):
    login.token_answer = answer
    refused = site.sign_in("platform")
    assert (refused.status_code, named in refused.text) == (status, True)
    assert "token" not in refused.text.partition("<h1>")[2].partition("</h1>")[0]
    assert any(named in entry.get("reason", "") for entry in logs), "the operator finds it in the log"


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        ({"groups": "platform"}, "not a list"),
        ({"groups": [{"name": "platform"}]}, "not names"),
        ({"groups": None, "_claim_names": {"groups": "src1"}}, "too many groups"),
        ({"nbf": NOW_MS // 1000 + 120}, "clocks"),
        ({"exp": NOW_MS // 1000 - 120}, "120 s"),
        ({"aud": "another"}, "(aud)"),
    ],
)
def test_each_fault_of_an_id_token_has_a_text_of_its_own(
    site: PageContext, login: Provider, logs: list[Any], spoil: dict[str, Any], named: str
):
    login.spoil = spoil
    refused = site.sign_in("platform")
    assert (refused.status_code, named in refused.text) == (401, True)
    assert any(named in entry.get("reason", "") for entry in logs)


def test_a_claim_of_groups_that_is_a_text_takes_nothing_from_a_person_with_grants_of_its_own(
    site: PageContext, login: Provider, clock: VirtualClock, logs: list[Any]
):
    site.callers.write_text(site.callers.read_text() + "  - {users: [ann@example.com], scopes: [read]}\n")
    clock.advance(60_000)
    site.service.maintain()
    login.spoil = {"groups": "platform"}
    assert site.sign_in().status_code == 303
    assert site.browser.get("/coverage", headers=PAGE).status_code == 200
    assert any("not a list" in entry.get("reason", "") for entry in logs)


def test_while_a_provider_hangs_everything_else_is_answered(site: PageContext, login: Provider):
    """Fifty visitors at once; each waits for a moment and is refused."""

    async def visit() -> tuple[list[int], list[int]]:
        transport = httpx2.ASGITransport(app=site.service.app)
        async with httpx2.AsyncClient(transport=transport, base_url=HERE, timeout=60) as client:
            visitors = [asyncio.create_task(client.get("/sign-in", headers=PAGE)) for _ in range(50)]
            while not login.waiting:
                await asyncio.sleep(0)
            others = [(await client.get(path)).status_code for path in ("/readyz", "/livez", "/leading") * 3]
            done, _ = await asyncio.wait(visitors, return_when=asyncio.FIRST_COMPLETED)
            assert {task.result().status_code for task in done} == {503}
            login.hang.set()
            return others, [(await visitor).status_code for visitor in visitors]

    login.hang.clear()
    others, found = asyncio.run(visit())
    assert set(others) == {200}
    assert found.count(303) >= 4, "who got a turn is sent to the provider once it answers"
    assert set(found) == {303, 503}


def test_a_provider_that_sends_a_byte_now_and_then_is_left_and_named(
    site: PageContext, login: Provider, logs: list[Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(openid_connect, "_PROVIDER_TIMEOUT_SECONDS", 0.5)
    login.trickles = True
    refused = site.sign_in("platform")
    assert (refused.status_code, "no whole answer within" in refused.text) == (503, True)
    assert any("no whole answer within" in entry.get("reason", "") for entry in logs)
    login.trickles = False
    assert site.sign_in("platform").status_code == 303, "its turn is free again"


def test_a_provider_with_a_private_authority_needs_the_issuers_ca_file(tmp_path: Path, clock: VirtualClock):
    """The keys come from its URL, and codes are exchanged there, both by TLS of that authority."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    with provider(clock, authority) as login:
        for trusted, status in ((False, 503), (True, 303)):
            site = PageContext(tmp_path, clock, login)
            text = site.callers.read_text()
            keys = f"jwks_url: {login.url}/keys" + (f"\n    ca_file: {tmp_path}/ca.crt" if trusted else "")
            site.callers.write_text(text.replace(f"jwks_file: {tmp_path}/keys.json", keys))
            clock.advance(60_000)
            site.service.maintain()
            if trusted:
                site.trusted = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
                assert site.sign_in("platform").status_code == status
                assert site.browser.get("/coverage", headers=PAGE).status_code == 200
            else:
                refused = site.browser.get("/sign-in", headers=PAGE)
                assert (refused.status_code, "certificate" in refused.text.lower()) == (status, True)
            site.service.close()


def test_an_issuer_nobody_signs_in_with_any_more_has_no_sessions(site: PageContext, clock: VirtualClock):
    site.sign_in("platform")
    text = site.callers.read_text()
    site.callers.write_text(text[: text.index("    login:")] + text[text.index("grants:") :])
    clock.advance(60_000)
    site.service.maintain()
    assert site.browser.get("/coverage", headers=PAGE).status_code == 401
    assert site.browser.get("/sign-in").status_code == 404


@pytest.mark.parametrize(
    "spoil",
    [
        {"nonce": "another"}, {"aud": "somebody-else"}, {"iss": "https://evil"}, {"exp": 1_793_530_000},
        {"nbf": 1_793_540_000}, {"email": ""}, {"email": None}, {"email_verified": False}, {"azp": "another-client"},
        {"aud": ["gputally", "another-client"]},
    ],
    ids=str,
)  # fmt: skip
def test_a_token_that_is_not_for_this_sign_in_is_refused(site: PageContext, login: Provider, spoil: dict[str, Any]):
    login.spoil = spoil
    back = site.sign_in()
    assert back.status_code == 401
    assert "gputally=" not in back.headers.get("set-cookie", "")
    assert site.browser.get("/coverage", headers=PAGE).status_code == 303


def test_another_browsers_answer_is_refused(site: PageContext, login: Provider):
    """Login CSRF: an attacker's code must not sign a victim in as the attacker."""
    login.claims |= {"groups": ["platform"]}
    attackers = site.leave()
    site.browser.cookies.clear()
    assert site.come_back(attackers).status_code == 401, "no sign-in is under way here"
    site.leave()
    assert site.come_back(attackers).status_code == 401, "another one is"


def test_a_code_is_good_once_and_a_refusal_is_told(site: PageContext, login: Provider):
    address = site.leave()
    back = httpx2.get(address, follow_redirects=False).headers["location"].removeprefix(HERE)
    cookies = dict(site.browser.cookies)
    assert site.browser.get(back).status_code == 303
    site.browser.cookies.update(cookies)
    assert site.browser.get(back).status_code == 401
    site.browser.cookies.clear()
    login.refuse = True
    assert "refused the sign-in" in site.sign_in().text


def test_who_takes_too_long_begins_again(site: PageContext, clock: VirtualClock):
    address = site.leave()
    clock.advance(600_000)
    assert "has expired" in site.come_back(address).text


def test_a_public_client_and_a_wrong_secret(tmp_path: Path, site: PageContext, login: Provider, clock: VirtualClock):
    login.secret = "another"
    assert site.sign_in().status_code == 401
    login.secret = None
    site.callers.write_text(site.callers.read_text().replace(f", client_secret_file: {tmp_path}/secret", ""))
    clock.advance(60_000)
    site.service.maintain()
    assert site.sign_in().headers["location"] == "/coverage"


def test_a_provider_that_is_away_is_said(tmp_path: Path, clock: VirtualClock):
    with provider(clock) as gone:
        pass
    site = PageContext(tmp_path, clock, gone)
    answer = site.browser.get("/sign-in")
    site.service.close()
    assert answer.status_code == 503
    assert "does not answer" in answer.text


def test_several_providers_are_a_choice(tmp_path: Path, clock: VirtualClock, login: Provider):
    other = (
        f"  - issuer: https://other.example.com\n    audience: gputally\n    jwks_file: {tmp_path}/keys.json\n"
        "    login: {client_id: us, label: 'The <other> one'}\n"
    )
    site = PageContext(tmp_path, clock, login, other)
    page = site.browser.get("/sign-in?next=/prices", headers=PAGE)
    assert page.status_code == 200
    assert "The &lt;other&gt; one" in page.text
    assert site.browser.get("/sign-in?with=3").status_code == 422
    first = site.browser.get("/sign-in?with=1&next=/prices")
    assert first.headers["location"].startswith(login.url)
    asked = parse_qs(urlsplit(first.headers["location"]).query)
    assert asked["redirect_uri"] == [f"{HERE}/sign-in/done"]
    site.service.close()


def test_without_a_way_back_it_does_not_start(tmp_path: Path, clock: VirtualClock, login: Provider):
    (tmp_path / "keys.json").write_bytes(login.keys())
    (tmp_path / "callers.yaml").write_text(
        f"schema: 1\nissuers:\n  - {{issuer: '{login.url}', audience: g, jwks_file: {tmp_path}/keys.json,"
        " login: {client_id: g}}\n"
    )
    with pytest.raises(CannotStart, match="set public_url"):
        Service(Settings(data=empty_ledger.data(tmp_path / "data"), callers=tmp_path / "callers.yaml"), clock)


def test_the_key_is_kept_and_private(tmp_path: Path):
    first = read_or_create_key(tmp_path)
    assert read_or_create_key(tmp_path) == first
    assert len(first) == 32
    assert (tmp_path / "session.key").stat().st_mode & 0o077 == 0
    (tmp_path / "session.key").write_bytes(b"short")
    with pytest.raises(CannotStart, match="the key is too short"):
        read_or_create_key(tmp_path)


def test_a_key_from_elsewhere_is_one_or_is_refused(tmp_path: Path):
    given = tmp_path / "mounted"
    with pytest.raises(CannotStart, match="mounted: No such file"):
        read_key(given)
    given.write_bytes(b"k" * 32)
    assert read_key(given) == b"k" * 32
    given.write_bytes(b"k" * 31)
    with pytest.raises(CannotStart, match="at least 32 bytes"):
        read_key(given)


SESSION = Session("https://login", "ann", ("a", "b"), "id-1", NOW_MS)


def test_a_cookie_is_what_it_was_made_as_and_of_this_house():
    signer, other = CookieSigner(b"k" * 32, HERE), CookieSigner(b"x" * 32, HERE)
    session = signer.encode_session(SESSION, NOW_MS, 60)
    assert signer.decode_session(session, NOW_MS) == SESSION
    under_way = signer.encode_sign_in(SignIn("https://login", "s", "n", "v", "/"), NOW_MS, 60)
    for open_it, text in (
        (signer.decode_sign_in, session),
        (signer.decode_session, under_way),
        (other.decode_session, session),
        (signer.decode_session, session[:-2]),
        (signer.decode_session, ""),
    ):
        with pytest.raises(Unauthenticated):
            open_it(text, NOW_MS)
    with pytest.raises(Unauthenticated, match="more than a session can hold"):
        signer.encode_session(Session("i", "u", tuple(f"group-{n}" for n in range(900)), "id", 0), NOW_MS, 60)


@given(st.text())
def test_nobody_is_led_to_another_site(text: str):
    path = own_path(text)
    assert path.startswith("/")
    assert not path.startswith(("//", "/\\"))
    assert not urlsplit(path).netloc
    assert path in ("/", text)
    address = RedirectResponse(path, 303).headers["location"]
    assert address.isascii()
    assert RedirectResponse(address, 303).headers["location"] == address


def test_a_form_of_the_page_needs_the_sessions_token_and_the_right(site: PageContext):
    form = {"gpu": "GPU-1", "reason": "card swapped"}
    site.sign_in("leads", path="/")
    assert site.browser.post("/node/prod/node-2/gpus", data=form).status_code == 403
    site.browser.cookies.clear()
    site.sign_in("platform", path="/nodes")
    form_token = form_token_of(site.browser.get("/nodes", headers=PAGE).text)
    for wrong in ("", "0" * 64):
        refused = site.browser.post("/node/prod/node-2/gpus", data=form | {"form_token": wrong})
        assert (refused.status_code, "does not belong to this session" in refused.text) == (403, True)
    passed = site.browser.post("/node/prod/node-2/gpus", data=form | {"form_token": form_token})
    assert (passed.status_code, "no node 'node-2'" in passed.text) == (409, True)
    assert site.browser.post("/v1/gpus/move", json=form).status_code == 401, "a session acts by a page's form alone"


def test_a_view_is_saved_by_who_is_signed_in_from_a_page_of_the_session(site: PageContext):
    form = {"name": "mine", "address": "/explore?by=team"}
    site.sign_in("leads", path="/explore")
    page = site.browser.get("/explore?by=team", headers=PAGE).text
    assert site.browser.post("/views", data=form).status_code == 403
    assert site.browser.post("/views", data=form | {"form_token": "0" * 64}).status_code == 403
    assert site.browser.post("/views", data=form | {"form_token": form_token_of(page)}).status_code == 303
    assert ">mine<" in site.browser.get("/explore?by=team", headers=PAGE).text
