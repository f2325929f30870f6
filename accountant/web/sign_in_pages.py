"""Serves the pages that sign a person in and out."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import ConfigDict, Field

from accountant.api.authorization import bound_address
from accountant.api.dependencies import Deps, Given
from accountant.api.problems import Refusal, retry_later
from accountant.api.query_parameters import Params, invalid
from accountant.web import overview_pages
from gputally.server.sign_in import CALLBACK, LEAVE, LEFT, LONGEST, OUT, CrossSite, Move, People, own_path
from gputally.server.tokens_and_grants import AuthorityUnavailable, Unauthenticated

router = APIRouter(include_in_schema=False)


class LeaveParams(Params):
    next: str = Field(default="/", max_length=LONGEST)
    with_: int = Field(default=0, ge=0, le=100, alias="with")


class DoneParams(Params):
    """What a provider sends along; it may send more than we ask for."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    state: str = Field(default="", max_length=LONGEST)
    code: str = Field(default="", max_length=LONGEST)
    error: str = Field(default="", max_length=LONGEST)


@router.get(LEAVE)
async def leave(request: Request, asked: Annotated[LeaveParams, Query()], deps: Given) -> Response:
    """To the provider; where there are several, a page to choose one."""
    people = _people(request, deps)
    if asked.with_ > len(people.providers):
        raise invalid("with", "there is no such provider")
    if not asked.with_ and len(people.providers) > 1:
        shown = overview_pages.page(
            request, "", "sign_in.html", deps, providers=people.providers, next=own_path(asked.next)
        )
        return Response(shown, media_type=overview_pages.HTML)
    provider = people.providers[max(asked.with_, 1) - 1]
    try:
        return _moved(await asyncio.to_thread(people.leave, provider, asked.next))
    except AuthorityUnavailable as error:
        raise retry_later("authority-unavailable", str(error)) from error


@router.get(CALLBACK)
async def done(request: Request, asked: Annotated[DoneParams, Query()], deps: Given) -> Response:
    """Back from the provider, with a code for a session."""
    people = _people(request, deps)
    code = "" if asked.error else asked.code
    try:
        return _moved(await asyncio.to_thread(people.arrive, request.cookies, asked.state, code))
    except Unauthenticated as error:
        raise Refusal("unauthenticated", f"{error}; go to /sign-in to begin again") from error
    except AuthorityUnavailable as error:
        raise retry_later("authority-unavailable", str(error)) from error


@router.post(OUT)
async def leave_for_good(request: Request, deps: Given) -> Response:
    """Forget the session in this browser."""
    people = _people(request, deps)
    brought = await overview_pages.read_form(request)
    try:
        return _moved(people.sign_out(request.cookies, brought.get("form_token", "")))
    except CrossSite as error:
        raise Refusal("cross-site", str(error)) from error


@router.get(LEFT)
async def left(request: Request, deps: Given) -> Response:
    """Where signing out ends."""
    _people(request, deps)
    return Response(overview_pages.page(request, "", "signed_out.html", deps), media_type=overview_pages.HTML)


def _people(request: Request, deps: Deps) -> People:
    bound_address(request, deps)
    people = deps.people()
    if people is None:
        raise Refusal("not-found", "nobody signs in here: ask with a token")
    return people


def _moved(move: Move) -> Response:
    answer = Response(status_code=303, headers={"Location": move.to})
    for cookie in move.cookies:
        answer.headers.append("Set-Cookie", cookie.header())
    return answer
