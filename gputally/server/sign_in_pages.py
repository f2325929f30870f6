"""Serves the pages that sign a person in and out; each program says how a page and a refusal of its own look.

What happens is in `gputally.server.sign_in`; here it gets addresses. These pages need no sign-in and show no data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gputally.server.sign_in import CALLBACK, LEAVE, LEFT, LONGEST, OUT, CrossSite, Redirect, SignInService, own_path
from gputally.server.tokens_and_grants import AuthorityUnavailable, Unauthenticated

MARK = "form_token"
"""Name of the field that carries a form's mark."""
PATHS = frozenset({LEAVE, CALLBACK, OUT, LEFT})
Kind = Literal["no-provider", "too-long", "unauthenticated", "cross-site", "authority-unavailable"]


class SignInSite(Protocol):
    """What these pages need of a program."""

    def people(self, request: Request, /) -> SignInService:
        """Raises a refusal where sign-in is not configured."""
        ...

    async def form(self, request: Request) -> Mapping[str, Sequence[str]]:
        """The fields of a form of our own. Raises a refusal for any other."""
        ...

    def page(self, request: Request, template: str, /, **values: Any) -> Response: ...

    def refusal(self, kind: Kind, detail: str) -> Exception:
        """What to raise."""
        ...


def sign_in_routes(site: SignInSite) -> list[Route]:
    """The routes of all sign-in pages."""

    def parameter(request: Request, name: str, default: str = "") -> str:
        text = request.query_params.get(name) or default
        if len(text) > LONGEST:
            raise site.refusal("too-long", f"no parameter of ours has more than {LONGEST} characters")
        return text

    async def leave(request: Request) -> Response:
        """To the provider; where there are several, a page to choose one."""
        people = site.people(request)
        following, chosen = parameter(request, "next", "/"), parameter(request, "with", "0")
        number = int(chosen) if chosen.isascii() and chosen.isdigit() and len(chosen) < 4 else -1
        if not 0 <= number <= len(people.providers):
            raise site.refusal("no-provider", "there is no such provider")
        if not number and len(people.providers) > 1:
            return await run_in_threadpool(
                site.page, request, "sign_in.html", providers=people.providers, next=own_path(following)
            )
        try:
            return _moved(await run_in_threadpool(people.leave, people.providers[max(number, 1) - 1], following))
        except AuthorityUnavailable as error:
            raise site.refusal("authority-unavailable", str(error)) from error

    async def done(request: Request) -> Response:
        """Back from the provider, with a code for a session."""
        people = site.people(request)
        code = "" if parameter(request, "error") else parameter(request, "code")
        try:
            return _moved(await run_in_threadpool(people.arrive, request.cookies, parameter(request, "state"), code))
        except Unauthenticated as error:
            raise site.refusal("unauthenticated", f"{error}; go to {LEAVE} to begin again") from error
        except AuthorityUnavailable as error:
            raise site.refusal("authority-unavailable", str(error)) from error

    async def leave_for_good(request: Request) -> Response:
        """Forget the session in this browser."""
        people = site.people(request)
        mark = (await site.form(request)).get(MARK) or ("",)
        try:
            return _moved(people.sign_out(request.cookies, mark[0]))
        except CrossSite as error:
            raise site.refusal("cross-site", str(error)) from error

    async def left(request: Request) -> Response:
        """Where signing out ends."""
        site.people(request)
        return await run_in_threadpool(site.page, request, "signed_out.html")

    return [
        Route(LEAVE, leave),
        Route(CALLBACK, done),
        Route(OUT, leave_for_good, methods=["POST"]),
        Route(LEFT, left),
    ]


def _moved(move: Redirect) -> Response:
    answer = Response(status_code=303, headers={"Location": move.to})
    for cookie in move.cookies:
        answer.headers.append("Set-Cookie", cookie.header())
    return answer
