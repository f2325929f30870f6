"""Gives the sign-in pages (`gputally.server.sign_in`) the look and the refusals of the controller's pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from fairshare.web.http_messages import Fields, Refusal, read_form
from fairshare.web.page_authentication import same_site

if TYPE_CHECKING:
    from gputally.server.sign_in import Kind, SignInService

_REFUSED = {
    "no-provider": (404, "No such provider"),
    "too-long": (400, "Too long"),
    "unauthenticated": (401, "Not signed in"),
    "cross-site": (403, "An old form"),
    "authority-unavailable": (503, "The provider does not answer"),
}


class SignInPages:
    """gputally.server.sign_in.SignInSite"""

    def __init__(self, people: Callable[[], SignInService | None], page: Callable[..., Response]) -> None:
        self._people = people
        self._page = page

    def people(self, _: Request) -> SignInService:
        found = self._people()
        if found is None:
            raise Refusal(404, "No such page", "nobody signs in here: ask with a token")
        return found

    async def form(self, request: Request) -> Fields:
        same_site(request)
        return await read_form(request)

    def page(self, _: Request, template: str, /, **values: Any) -> Response:
        return self._page(template, None, **values)

    def refusal(self, kind: Kind, detail: str) -> Exception:
        status, title = _REFUSED[kind]
        return Refusal(status, title, detail, {"Retry-After": "5"} if status == 503 else None)
