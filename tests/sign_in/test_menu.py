"""The menu of accountant and controller has exactly the pages that the caller may open."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape

import pytest
from starlette.routing import Route
from starlette.testclient import TestClient
from starlette.types import ASGIApp

from accountant.composition import Service
from accountant.core.settings import Settings
from gputally.base.clock import VirtualClock
from gputally.server.menu import ENTRIES
from gputally.server.one_address import OneAddress
from gputally.server.tokens_and_grants import Principal, Scope, new_token
from tests import empty_ledger
from tests.fairshare.web.controller_pages import NOW_MS, stage
from tests.fake_scheduler import fake_scheduler as fake_scheduler
from tests.http.addresses import FIGURES, NO_FIGURES

PAGE = {"Accept": "text/html", "Host": "127.0.0.1"}
pytestmark = [pytest.mark.usefixtures("logs"), pytest.mark.usefixtures("fake_scheduler")]
ROLES: dict[str, tuple[tuple[Scope, ...], tuple[str, ...] | None]] = {
    "reader": (("read",), None),
    "admin": (("admin",), None),
    "policy": (("read", "policy"), None),
    "lead": (("read",), ("vision",)),
    "two teams": (("read",), ("vision", "language")),
}
WITHOUT_ENTRY = {
    "/month/{month}", "/month/{month}/lines", "/month/{month}/lines.csv", "/team/{team:path}", "/invoice/{month}",
    "/invoice/{month}/lines.csv", "/invoices/{month}", "/invoices.csv", "/audit.csv", "/jobs.csv", "/jobs.parquet",
    "/nodes.csv", "/nodes.parquet",
    "/explore.csv", "/explore.parquet", "/node/{cluster}/{node}", "/job/{id:path}", "/act/{number}", "/group",
    "/proposals", "/waits", "/waits.csv", "/savings", "/savings.csv",
    "/decisions/{at_ms}/{id:path}", "/", "/metrics", "/leading", "/livez", "/readyz", "/openapi.json",
    "/static/style.css", "/static/zoom.js", "/favicon.ico", "/sign-in", "/sign-in/done", "/signed-out",
    "/shares/queue/{rest:path}", "/shares/decisions", "/shares/decision", "/shares/shares.csv",
    "/shares/preview/{rest:path}", "/shares/static/style.css", "/shares/static/pages.js",
}  # fmt: skip
"""Addresses that the menu does not name: pages that others lead to, files, probes, and the sign-in."""


Both = tuple[ASGIApp, dict[str, str], set[str]]
"""The pages of both programs at one address, the token of each role, and every path of the pages."""


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    tmp_path = tmp_path_factory.mktemp("both")
    made = {role: new_token(role, scopes, teams=teams) for role, (scopes, teams) in ROLES.items()}
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text("tokens:\n" + "".join(entry for _, entry in made.values()))
    controller = stage(tmp_path, token_file=tokens, accountant_pages="/").site
    settings = Settings(data=empty_ledger.data(tmp_path / "data"), tokens=tokens, controller_pages="/")
    with Service(settings, VirtualClock(NOW_MS)) as service:
        paths = {
            route.path for route in controller.app.routes if isinstance(route, Route) and "GET" in (route.methods or ())
        }
        paths |= {path for path in (*FIGURES, *NO_FIGURES) if not path.startswith("/v1/")}
        yield OneAddress(service.app, controller.observed()), {role: token for role, (token, _) in made.items()}, paths


@pytest.mark.parametrize("role", ROLES)
def test_every_entry_of_a_menu_answers_and_no_other_page_does(both: Both, role: str) -> None:
    site, tokens, _ = both
    asking = TestClient(site, headers={**PAGE, "Authorization": f"Bearer {tokens[role]}"})
    scopes, teams = ROLES[role]
    whoever = Principal(role, frozenset(scopes), teams=frozenset(teams) if teams else None)
    seen = set()
    for program in ("accountant", "controller"):
        first = asking.get("/month" if program == "accountant" else "/shares")
        assert first.status_code == 200, first.text
        menu = first.text.partition('<nav class="site"')[2].partition("</nav>")[0]
        links = dict(re.findall(r'<li><a href="([^"]*)"[^>]*>([^<]*)</a>', menu))
        seen.add(tuple(links.items()))
        assert role in unescape(menu)
        of_teams = re.findall(r'class="tag" href="([^"]*)"', menu)
        assert of_teams == [f"/team/{team}" for team in sorted(teams or ())]
        for address in (*links, *of_teams, *re.findall(r'class="brand" href="([^"]*)"', menu)):
            assert asking.get(address).status_code == 200, address
    assert len(seen) == 1, "one menu"
    shown = dict(seen.pop())
    for entry in ENTRIES:
        if entry.program == "fleet":
            continue
        assert (entry.path in shown) == entry.open_to(whoever)
        if entry.path not in shown and entry.path != "/":  # the first page leads each caller to its own
            assert asking.get(entry.path).status_code == 403, entry.path


def test_every_page_has_an_entry_or_is_listed_without_one(both: Both) -> None:
    _, _, paths = both
    entries = {entry.path for entry in ENTRIES if entry.program != "fleet"}
    assert paths - entries == WITHOUT_ENTRY - entries


def test_a_caller_who_is_not_known_sees_no_entry(both: Both) -> None:
    site, _, _ = both
    for path in ("/coverage", "/shares"):
        refused = TestClient(site, headers=PAGE).get(path)
        assert refused.status_code == 401
        assert "<li><a" not in refused.text.partition("</nav>")[0]
