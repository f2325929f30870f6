"""Serves the pages that sign a person in and out of the controller.

How it is done is `gputally.server.sign_in`'s; here it gets addresses. These need nobody to be known, and say nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fairshare.web.http_messages import MARK, Answer, Refusal, Request
from fairshare.web.page_authentication import same_site
from fairshare.web.page_context import PublicRoute, Site
from gputally.server.sign_in import CALLBACK, LEAVE, LEFT, LONGEST, OUT, CrossSite, Move, own_path
from gputally.server.tokens_and_grants import AuthorityUnavailable, Unauthenticated

if TYPE_CHECKING:
    from gputally.server.sign_in import People


def leave(site: Site, request: Request) -> Answer:
    """To the provider; where there are several, a page to choose one."""
    people = _people(site)
    following, chosen = _short(request.asked("next", "/")), request.asked("with")
    number = int(chosen) if chosen.isascii() and chosen.isdigit() and len(chosen) < 4 else 0
    if number > len(people.providers):
        raise Refusal(404, "No such provider", "nobody signs in with it here")
    if not number and len(people.providers) > 1:
        return site.page("sign_in.html", None, providers=people.providers, next=own_path(following))
    try:
        return _moved(people.leave(people.providers[max(number, 1) - 1], following))
    except AuthorityUnavailable as error:
        raise _away(error) from error


def done(site: Site, request: Request) -> Answer:
    """Back from the provider, with a code for a session."""
    people = _people(site)
    code = "" if request.asked("error") else _short(request.asked("code"))
    try:
        return _moved(people.arrive(request.cookies, _short(request.asked("state")), code))
    except Unauthenticated as error:
        raise Refusal(401, "Not signed in", f"{error}; go to {LEAVE} to begin again") from error
    except AuthorityUnavailable as error:
        raise _away(error) from error


def leave_for_good(site: Site, request: Request) -> Answer:
    """POST: forget the session in this browser."""
    people = _people(site)
    same_site(request)
    try:
        return _moved(people.sign_out(request.cookies, request.sent(MARK)))
    except CrossSite as error:
        raise Refusal(403, "An old form", str(error)) from error


def left(site: Site, request: Request) -> Answer:  # noqa: ARG001  # an opening's
    """Where signing out ends."""
    _people(site)
    return site.page("signed_out.html", None)


OPENINGS = (
    PublicRoute("GET", LEAVE, leave),
    PublicRoute("GET", CALLBACK, done),
    PublicRoute("POST", OUT, leave_for_good),
    PublicRoute("GET", LEFT, left),
)


def _people(site: Site) -> People:
    found = site.people()
    if found is None:
        raise Refusal(404, "No such page", "nobody signs in here: ask with a token")
    return found


def _moved(move: Move) -> Answer:
    return Answer(
        b"", status=303, headers={"Location": move.to}, cookies=tuple(cookie.header() for cookie in move.cookies)
    )


def _short(text: str) -> str:
    if len(text) > LONGEST:
        raise Refusal(400, "Too long", f"no parameter of ours has more than {LONGEST} characters")
    return text


def _away(error: AuthorityUnavailable) -> Refusal:
    return Refusal(503, "The provider does not answer", str(error), {"Retry-After": "5"})
