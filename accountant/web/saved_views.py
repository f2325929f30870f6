"""Saves views of the lists by name, lists them on their pages, and removes them."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from accountant.api.access_control import admit, check_form
from accountant.api.dependencies import AppDeps, Deps
from accountant.api.query_parameters import invalid
from accountant.core.errors import UnsupportedQuestion
from accountant.ledger.protocols import SavedView
from accountant.web import month_and_decision_pages
from accountant.web.list_bar import present_address
from gputally.base.untrusted_text import known_name
from gputally.server.config_loading import fault_text
from gputally.server.tokens_and_grants import Principal

router = APIRouter(include_in_schema=False)


def of(request: Request, deps: Deps, principal: Principal) -> dict[str, Any]:
    """The saved views of the caller, and whether the page may save one, as the template `_bar.html` needs them; neither
    for a ledger that keeps none."""
    try:
        views = [SavedView(one.name, present_address(one.address)) for one in deps.ledger.views(principal.name)]
    except UnsupportedQuestion:
        return {"views": (), "may_save": False}
    return {"views": views, "may_save": month_and_decision_pages.takes_forms(request, deps)}


@router.post("/views")
async def save_view(request: Request, deps: AppDeps) -> Response:
    """Saves a view of a list under a name, or removes the saved view of that name, when its owner sends the form."""
    principal = await admit(request, deps, "read", form=True)
    fields = await month_and_decision_pages.read_form(request)
    check_form(request, fields.pop("form_token", ""))
    deps.require_quota("acts", principal.name)
    try:
        form = _ViewForm.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise invalid(".".join(map(str, first["loc"])) or "form", fault_text(first)) from error
    if form.remove:
        await asyncio.to_thread(deps.ledger.remove_view, principal.name, form.name)
    else:
        view = SavedView(form.name, form.address)
        await asyncio.to_thread(deps.ledger.save_view, principal.name, view, deps.clock.wall_ms())
    return RedirectResponse(form.address, 303)


class _ViewForm(BaseModel):
    """name, address: of the view; address: the page that the browser then shows. remove: remove the view."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, AfterValidator(known_name)] = Field(min_length=1, max_length=60)
    address: str = Field(pattern=r"^/(explore|jobs|nodes)(\?[!-~]*)?$", max_length=2_000)
    remove: bool = False
