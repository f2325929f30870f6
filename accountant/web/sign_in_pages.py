"""Gives the sign-in pages (`gputally.server.sign_in`) the accountant's look, refusals and bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request, Response

from accountant.api.access_control import bound_address
from accountant.api.dependencies import Deps
from accountant.api.problems import Refusal, retry_later
from accountant.api.query_parameters import invalid
from accountant.web import overview_pages
from gputally.server.sign_in import Kind, SignInService, sign_in_routes


class _Site:
    """gputally.server.sign_in.SignInSite"""

    def people(self, request: Request) -> SignInService:
        deps = _deps(request)
        bound_address(request, deps)
        people = deps.people()
        if people is None:
            raise Refusal("not-found", "sign-in is off here: ask with a token")
        return people

    async def form(self, request: Request) -> Mapping[str, Sequence[str]]:
        return {name: [value] for name, value in (await overview_pages.read_form(request)).items()}

    def page(self, request: Request, template: str, /, **values: Any) -> Response:
        shown = overview_pages.page(request, "", template, _deps(request), **values)
        return Response(shown, media_type=overview_pages.HTML)

    def refusal(self, kind: Kind, detail: str) -> Exception:
        if kind == "authority-unavailable":
            return retry_later(kind, detail)
        if kind in ("no-provider", "too-long"):
            return invalid("with" if kind == "no-provider" else "query", detail)
        return Refusal(kind, detail)


def _deps(request: Request) -> Deps:
    found: Deps = request.app.state.deps
    return found


ROUTES = sign_in_routes(_Site())
