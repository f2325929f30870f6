"""The pages of machines: `/nodes`, and `/node/…` with the timeline of each of its GPUs and who held them."""

from __future__ import annotations

import asyncio
from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import Field, TypeAdapter, ValidationError

from accountant.api.access import Reading, admit, check_form, of_everyone
from accountant.api.conditional import tagged
from accountant.api.deps import Given
from accountant.api.gpus import Move
from accountant.api.params import Params, invalid
from accountant.api.problems import Refusal
from accountant.ledger import GpuMove
from accountant.web import asking, pages, views
from accountant.web.paging import paged
from accountant.web.timeline import drawn, timeline
from accountant.wire import Dimension
from agent.units import MS_PER_DAY

router = APIRouter(include_in_schema=False)
NODES_A_PAGE = 200
MOST_HOLDERS = 50
_MOVE = TypeAdapter(Move)


class SpanParams(Params):
    days: int = Field(default=7, ge=1, le=92)


class NodesParams(SpanParams):
    page: int = Field(default=1, ge=1, le=10_000)


@router.get("/nodes")
async def listed(request: Request, asked: Annotated[NodesParams, Query()], deps: Given, principal: Reading) -> Response:
    of_everyone(principal)

    def make() -> bytes:
        found, whole, as_of_ms = asking.machines(deps, asked.days)
        shown = paged(found, asked.page, NODES_A_PAGE, f"/nodes?days={asked.days}&page=")
        return pages.page(
            request, "/nodes", "nodes.html", deps, days=asked.days, nodes=shown.rows, shown=shown, whole=whole,
            gpus=sum(one.gpus for one in found), end_ms=as_of_ms or deps.clock.wall_ms(), as_of_ms=as_of_ms,
        )  # fmt: skip

    return tagged(request, await asyncio.to_thread(make), pages.HTML)


@router.get("/node/{cluster}/{node}")
async def one(
    request: Request, cluster: str, node: str, asked: Annotated[SpanParams, Query()], deps: Given, principal: Reading
) -> Response:
    of_everyone(principal)
    at, timezone = deps.clock.wall_ms(), deps.settings.timezone

    def make() -> bytes:
        start = at - asked.days * MS_PER_DAY
        here: dict[Dimension, tuple[str, ...]] = {"cluster": (cluster,), "node": (node,)}
        facts = next((one for one in deps.ledger.nodes() if (one.cluster, one.name) == (cluster, node)), None)
        with deps.ledger.moment(start, at) as moment:
            strips, of_gpus = timeline(moment, start, at, here, timezone)
            holders = moment.usage(start, at, ("team", "namespace", "job", "cluster"), here, timezone)
        register = asking.gpus_of(deps, cluster, node)
        if not of_gpus and facts is None and not register:
            raise Refusal("not-found", f"no node {node[:200]!r} of cluster {cluster[:200]!r} in that time")
        return pages.page(
            request, "/nodes", "node.html", deps, cluster=cluster, node=node, days=asked.days, facts=facts,
            strips=strips, timeline=drawn(strips, f"What each GPU of {node} did") if strips.strips else "",
            holders=views.held_by(holders)[:MOST_HOLDERS], start_ms=start, end_ms=at,
            whole=views.summed(of_gpus), register=register,
            may_move=principal.may("admin"), forms=deps.settings.auth == "off" or pages.person_of(request) is not None,
        )  # fmt: skip

    return tagged(request, await asyncio.to_thread(make), pages.HTML)


@router.post("/node/{cluster}/{node}/gpus")
async def move(request: Request, cluster: str, node: str, deps: Given) -> Response:
    """The form of the node's page: a GPU moved to this node. An admin's act."""
    principal = await admit(request, deps, "admin", form=True)
    fields = await pages.read_form(request)
    check_form(request, fields.pop("form_token", ""))
    gpu = fields.pop("gpu", "")
    try:
        asked = _MOVE.validate_python({"cluster": cluster, "node": node, "gpus": [gpu], **fields})
    except ValidationError as error:
        first = error.errors()[0]
        raise invalid(".".join(map(str, first["loc"])) or "form", first["msg"]) from error
    chosen = GpuMove(asked.node, asked.gpus, asked.cluster)
    await asyncio.to_thread(deps.ledger.move_gpus, chosen, deps.clock.wall_ms(), principal.name, asked.reason)
    return RedirectResponse(f"/node/{quote(cluster, safe='')}/{quote(node, safe='')}", 303)
