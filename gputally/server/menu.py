"""Lists the entries of the one menu on the pages of every program, and selects those that a caller may open.

A page with an entry is added here and nowhere else. Accountant and controller have different paths, so that both can be
served at one address: the controller's begin with `/shares`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote

from gputally.base.docs_address import docs_page
from gputally.server.sign_in import Person
from gputally.server.tokens_and_grants import Principal, Scope

Program = Literal["accountant", "controller", "fleet"]


@dataclass(frozen=True, slots=True)
class MenuEntry:
    """An entry of the menu.

    program: the program that serves the page.
    docs: the page of the documentation that explains it.
    scope: the scope that a caller needs to open it.
    for_teams: whether the page also answers a caller who may see only some teams."""

    path: str
    title: str
    program: Program
    docs: str
    for_teams: bool = False
    scope: Scope = "read"

    def open_to(self, principal: Principal) -> bool:
        """Return whether the caller may open the page."""
        return principal.may(self.scope) and (self.for_teams or principal.teams is None)


ENTRIES = (
    MenuEntry("/", "Overview", "accountant", "pages#pages-of-the-accountant"),
    MenuEntry("/explore", "Explore", "accountant", "reading-the-numbers", for_teams=True),
    MenuEntry("/month", "Month", "accountant", "reports#the-figures", for_teams=True),
    MenuEntry("/jobs", "Jobs", "accountant", "jobs", for_teams=True),
    MenuEntry("/nodes", "Nodes", "accountant", "jobs#nodes"),
    MenuEntry("/shares", "Shares", "controller", "controller-pages#the-pages", for_teams=True),
    MenuEntry("/decisions", "Decisions", "accountant", "explain#decisions-on-the-accountants-pages"),
    MenuEntry("/shares/policy", "Policy", "controller", "controller-pages#the-policy-as-a-form"),
    MenuEntry("/prices", "Prices", "accountant", "prices", for_teams=True),
    MenuEntry("/invoices", "Invoices", "accountant", "closing", for_teams=True),
    MenuEntry("/invoice", "Reconciliation", "accountant", "prices#the-providers-invoice"),
    MenuEntry("/coverage", "Coverage", "accountant", "reading-the-numbers#coverage-watermark-open-months"),
    MenuEntry("/audit", "Audit", "accountant", "closing", scope="admin"),
    MenuEntry("/fleet", "Fleet", "fleet", "fleet"),
    MenuEntry("/fleet/jobs", "Jobs", "fleet", "fleet", for_teams=True),
    MenuEntry("/fleet/nodes", "Nodes", "fleet", "fleet"),
)
"""All entries, in the order of the menu."""
_MOST_TEAMS = 12
"""The teams that the menu names; a caller with more of them finds the others through links of pages."""


@dataclass(frozen=True, slots=True)
class Menu:
    """The menu of one caller.

    home: the address behind the name of the product.
    links: (address, title) of each page that the caller may open.
    teams: (address, name) of each team, for a caller who may see only some.
    name: of the caller, "" for nobody and where nobody needs to sign in.
    form_token: of the form that signs out, "" if the caller is not signed in."""

    home: str = "/"
    links: tuple[tuple[str, str], ...] = ()
    teams: tuple[tuple[str, str], ...] = ()
    name: str = ""
    form_token: str = ""

    @staticmethod
    def docs_of(path: str) -> str:
        """The address of the documentation of the page with this entry; "" for a page without one."""
        return next((docs_page(entry.docs) for entry in ENTRIES if entry.path == path), "")


def menu(principal: Principal | None, sites: Mapping[Program, str], person: Person | None = None) -> Menu:
    """Return the menu of a caller.

    principal: None for a caller who is not known.
    sites: the addresses of the programs that the menu leads to, without a path; "" for this page's own.
    person: the signed-in person; None for a token."""
    if person is not None:
        principal = person.principal
    home = next((sites[entry.program] + entry.path for entry in ENTRIES if entry.program in sites), "/")
    if principal is None:
        return Menu(home)
    links = tuple(
        (sites[entry.program] + entry.path, entry.title)
        for entry in ENTRIES
        if entry.program in sites and entry.open_to(principal)
    )
    of_team = next((f"{sites[name]}{path}" for name, path in _TEAM_PAGES.items() if name in sites), None)
    teams = tuple(
        (f"{of_team}{quote(team, safe='')}", team)
        for team in sorted(principal.teams or ())[:_MOST_TEAMS]
        if of_team is not None
    )
    named = principal.name if person is not None or principal.name != ANONYMOUS else ""
    return Menu(home, links, teams, named, person.form_token if person is not None else "")


_TEAM_PAGES: Mapping[Program, str] = {"accountant": "/team/", "fleet": "/fleet/team/"}
ANONYMOUS = "anonymous"
"""The name of every caller where nobody needs to sign in."""


def site(address: str) -> str:
    """Return the prefix of another program's links. address: its URL in a browser, or "/" for this page's own."""
    return address.rstrip("/")
