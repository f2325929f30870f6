"""Serves the pages that sign a person in and out of the controller.

How it is done is `gputally.server.sign_in`'s; here it gets addresses. These need nobody to be known, and say nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import Response

from fairshare.web.http_messages import MARK, Refusal
from fairshare.web.page_authentication import same_site
from fairshare.web.page_context import Page, RequestContext, redirect
from gputally.server.sign_in import CALLBACK, LEAVE, LEFT, LONGEST, OUT, CrossSite, Move, own_path
from gputally.server.tokens_and_grants import AuthorityUnavailable, Unauthenticated

if TYPE_CHECKING:
    from gputally.server.sign_in import People


def leave(visit: RequestContext) -> Response:
    """To the provider; where there are several, a page to choose one."""
    people = _people(visit)
    following, chosen = _short(visit.asked("next", "/")), visit.asked("with")
    number = int(chosen) if chosen.isascii() and chosen.isdigit() and len(chosen) < 4 else 0
    if number > len(people.providers):
        raise Refusal(404, "No such provider", "nobody signs in with it here")
    if not number and len(people.providers) > 1:
        return visit.page("sign_in.html", providers=people.providers, next=own_path(following))
    try:
        return _moved(people.leave(people.providers[max(number, 1) - 1], following))
    except AuthorityUnavailable as error:
        raise _away(error) from error


def done(visit: RequestContext) -> Response:
    """Back from the provider, with a code for a session."""
    people = _people(visit)
    code = "" if visit.asked("error") else _short(visit.asked("code"))
    try:
        return _moved(people.arrive(visit.request.cookies, _short(visit.asked("state")), code))
    except Unauthenticated as error:
        raise Refusal(401, "Not signed in", f"{error}; go to {LEAVE} to begin again") from error
    except AuthorityUnavailable as error:
        raise _away(error) from error


def leave_for_good(visit: RequestContext) -> Response:
    """POST: forget the session in this browser."""
    people = _people(visit)
    same_site(visit.request)
    try:
        return _moved(people.sign_out(visit.request.cookies, visit.sent(MARK)))
    except CrossSite as error:
        raise Refusal(403, "An old form", str(error)) from error


def left(visit: RequestContext) -> Response:
    """Where signing out ends."""
    _people(visit)
    return visit.page("signed_out.html")


OPENINGS = (
    Page("GET", LEAVE, None, leave),
    Page("GET", CALLBACK, None, done),
    Page("POST", OUT, None, leave_for_good),
    Page("GET", LEFT, None, left),
)


def _people(visit: RequestContext) -> People:
    found = visit.site.people()
    if found is None:
        raise Refusal(404, "No such page", "nobody signs in here: ask with a token")
    return found


def _moved(move: Move) -> Response:
    answer = redirect(move.to)
    for cookie in move.cookies:
        answer.headers.append("Set-Cookie", cookie.header())
    return answer


def _short(text: str) -> str:
    if len(text) > LONGEST:
        raise Refusal(400, "Too long", f"no parameter of ours has more than {LONGEST} characters")
    return text


def _away(error: AuthorityUnavailable) -> Refusal:
    return Refusal(503, "The provider does not answer", str(error), {"Retry-After": "5"})
