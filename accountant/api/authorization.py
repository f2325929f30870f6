"""Requires a scope per route, and limits callers to their own teams and nodes.

Authorisation stands in front of the body: a request that may not pass is answered before a byte of
it is read. What a principal may see beyond its scope (teams, nodes) is asked of it by the routes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Depends, Request

from accountant.api.dependencies import Deps, deps_of
from accountant.api.problems import Refusal, retry_later
from accountant.wire.usage_models import Dimension
from gputally.server.sign_in import Person
from gputally.server.tokens_and_grants import (
    AuthorityUnavailable,
    Principal,
    Scope,
    TooManyUnknown,
    Unauthenticated,
    token_in,
)


def require(scope: Scope) -> Callable[..., Awaitable[Principal]]:
    """A dependency that lets only principals with `scope` pass."""

    async def check(request: Request, deps: Annotated[Deps, Depends(deps_of)]) -> Principal:
        return await admit(request, deps, scope)

    return check


async def admit(request: Request, deps: Deps, scope: Scope, *, form: bool = False) -> Principal:
    """Authenticate, bound the rate, authorise, in this order. form: the route takes a form of our pages, so a session
    counts too, and the route checks the form's token (`check_form`). Raises Refusal."""
    address = request.client.host if request.client else ""
    # A browser may send the token as the password of Basic, for reading only.
    token = token_in(request.headers.get("authorization", ""), basic=request.method in ("GET", "HEAD"))
    principal = deps.certified(_certificate(request)) if token is None else None
    try:
        if principal is None and token is None:
            principal = _signed_in(request, deps, form=form)
        principal = principal or await deps.authenticator.authenticate(token, address)
    except Unauthenticated as error:
        _bound(deps, ("", address))
        raise Refusal("unauthenticated", str(error), headers={"WWW-Authenticate": _challenge(request)}) from error
    except TooManyUnknown as error:
        raise retry_later("too-many-requests", str(error), error.seconds) from error
    except AuthorityUnavailable as error:
        _bound(deps, ("", address))
        raise retry_later("authority-unavailable", str(error)) from error
    request.state.principal = principal.name
    _bound(deps, (principal.name, address))
    if not principal.may(scope):
        raise Refusal("forbidden", f"{principal.name!r} lacks the scope {scope!r}")
    return principal


def of_everyone(principal: Principal) -> None:
    """For figures that are not those of one team. Raises Refusal."""
    if principal.teams is not None:
        raise Refusal("forbidden", f"{principal.name!r} may see its own teams only")


def team_for(principal: Principal, team: str | None) -> str | None:
    """The team whose figures to show, None: all. A principal of one team needs not name it."""
    if principal.teams is None:
        return team
    if team is None and len(principal.teams) == 1:
        return next(iter(principal.teams))
    if team is None or team not in principal.teams:
        raise Refusal("forbidden", f"{principal.name!r} may see its own teams only")
    return team


def teams_asked(principal: Principal, teams: tuple[str, ...]) -> dict[Dimension, tuple[str, ...]]:
    """The filter that leaves these teams, or all that the principal may see where none is named. Raises Refusal."""
    if principal.teams is None:
        return {"team": teams} if teams else {}
    if not set(teams) <= principal.teams:
        raise Refusal("forbidden", f"{principal.name!r} may see its own teams only")
    return {"team": tuple(sorted(teams or principal.teams))}


def bound_address(request: Request, deps: Deps) -> None:
    """The rate of an unknown caller. Raises Refusal."""
    _bound(deps, ("", request.client.host if request.client else ""))


def check_form(request: Request, form_token: str) -> None:
    """A form that a signed-in browser sends has to come from a page of its session. Raises Refusal."""
    person: Person | None = getattr(request.state, "person", None)
    if person is not None and not person.allows(form_token):
        raise Refusal("cross-site", "this form does not belong to this session")


def _signed_in(request: Request, deps: Deps, *, form: bool) -> Principal | None:
    """For reading and for our own forms: what a page of another site makes a browser send must change nothing."""
    people = deps.people() if form or request.method in ("GET", "HEAD") else None
    found: Person | None = people.person(request.cookies) if people is not None else None
    if found is None:
        return None
    request.state.person = found
    return found.principal


def _bound(deps: Deps, client: tuple[str, str]) -> None:
    wait = deps.rate.admit(client)
    if wait:
        raise retry_later("too-many-requests", "more requests than one client may make", wait)


def _certificate(request: Request) -> str:
    """The common name of the verified client certificate; "" where the client showed none."""
    extensions = request.scope.get("extensions") or {}
    return str((extensions.get("tls") or {}).get("client_cert_name") or "")


def _challenge(request: Request) -> str:
    if "text/html" in request.headers.get("accept", ""):
        return 'Basic realm="gputally: any name, the token as password", charset="UTF-8"'
    return 'Bearer realm="gputally"'


Ingesting = Annotated[Principal, Depends(require("ingest"))]
Importing = Annotated[Principal, Depends(require("import"))]
Reading = Annotated[Principal, Depends(require("read"))]
Progressing = Annotated[Principal, Depends(require("progress"))]
Governing = Annotated[Principal, Depends(require("policy"))]
Administering = Annotated[Principal, Depends(require("admin"))]
