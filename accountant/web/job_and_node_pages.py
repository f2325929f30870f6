"""Serves the pages of jobs, with their attempts and the decisions about them, and of nodes, both with timelines of
GPUs; moves a GPU."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Final, NamedTuple
from urllib.parse import quote
from xml.etree import ElementTree as ET
from zoneinfo import ZoneInfo

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import Field, TypeAdapter, ValidationError

from accountant.api.access_control import (
    Reader,
    admit,
    check_form,
    require_all_teams,
    team_filter,
)
from accountant.api.dependencies import AppDeps, Deps
from accountant.api.operator_routes import Move
from accountant.api.problems import Refusal
from accountant.api.query_parameters import Params, edge, invalid
from accountant.api.usage_cost_and_job_routes import decisions_about, job_span, unknown_job, with_attempts
from accountant.billing import job_costs
from accountant.core import periods
from accountant.core.record_age import is_old
from accountant.ledger.protocols import GpuMove, JobKey, Moment
from accountant.ledger.usage import ACCOUNTS, Where, added, sum_of_usage_lines
from accountant.reports import figure_formatting, node_list
from accountant.web import gpu_holders, month_and_decision_pages, page_queries, page_rows
from accountant.web.page_queries import records
from accountant.wire import decision_text
from accountant.wire.policy_models import Decision
from accountant.wire.usage_cost_and_job_models import Accounts, Dimension, Job, JobAnswer, UsageLine
from gputally.base.instants import in_calendar
from gputally.base.units import BUCKET_MS, MS_PER_DAY, MS_PER_HOUR, MS_PER_SECOND, US_PER_MS
from gputally.base.version import __version__, is_older
from gputally.server.config_loading import fault_text
from gputally.server.page_layout import drawn, rect, root, text

router = APIRouter(include_in_schema=False)

MOST_STRIPS: Final = 32
_OF_GPUS: Final[tuple[Dimension, ...]] = ("node", "gpu", "gpu_model")
_MOST_CELLS: Final = 96
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 1040, 190, 8, 6, 26
_ROW, _GAP = 26, 8
_LABELS = 6
_SHORT = 18
"""Maximum number of characters of a device's name."""


@dataclass(frozen=True, slots=True)
class GpuTimeline:
    """The timeline of one GPU. cells: its accounts in each cell, in GPU-µs."""

    name: str
    detail: str
    cells: tuple[Accounts, ...]

    @property
    def whole(self) -> Accounts:
        return added(self.cells)


@dataclass(frozen=True, slots=True)
class NodeTimeline:
    """The timelines of a node's GPUs.

    starts: local starts of the cells, each `hours` long.
    more: number of GPUs that are not shown."""

    starts: tuple[datetime, ...]
    hours: int
    strips: tuple[GpuTimeline, ...]
    more: int


class TimelineCells(NamedTuple):
    """The cells of a span.

    starts: their local starts, each `hours` long.
    edges: instants that split the span so that each piece lies in one cell.
    places: for each piece, the index of its cell. When clocks are set back, two pieces belong to one cell."""

    starts: tuple[datetime, ...]
    hours: int
    edges: tuple[int, ...]
    places: tuple[int, ...]


def cells(start_ms: int, end_ms: int, tz: ZoneInfo) -> TimelineCells:
    """Divides [start_ms, end_ms) into at most 96 cells of whole local hours."""
    first = _local(start_ms, tz)
    span = max(1, math.ceil((end_ms - start_ms) / MS_PER_HOUR) + 1)
    hours = next(
        (size for size in (1, 2, 3, 4, 6, 12, 24) if span <= size * _MOST_CELLS), math.ceil(span / _MOST_CELLS)
    )
    count = math.ceil(span / hours)
    edges, places = [start_ms], list[int]()
    at = start_ms
    while at < end_ms:
        passed = _local(at, tz) - first
        index = min(count - 1, max(0, int(passed / timedelta(hours=hours))))
        if places and places[-1] != index:
            edges.append(at)
        if not places or places[-1] != index:
            places.append(index)
        # Offsets of time zones are multiples of a quarter of an hour.
        at = at - at % BUCKET_MS + BUCKET_MS
    edges.append(max(start_ms, end_ms))
    starts = tuple(first + timedelta(hours=hours * i) for i in range(count))
    return TimelineCells(starts, hours, tuple(edges), tuple(places or [0]))


def timeline(
    ledger: Moment, start_ms: int, end_ms: int, where: Where, timezone: str
) -> tuple[NodeTimeline, Sequence[UsageLine]]:
    """The timeline of the GPUs that match a filter, over [start_ms, end_ms), and the usage of each GPU over the whole
    span. The timeline has the MOST_STRIPS GPUs with the most allocated time, sorted by node and name.

    Needs two queries whatever the length of the span, and memory in proportion to the number of cells."""
    tz = periods.zone(timezone)
    of_gpus = ledger.usage((start_ms, end_ms), _OF_GPUS, where, timezone).lines()
    largest = sorted(of_gpus, key=lambda line: -line.accounts_gpu_us.allocated)[:MOST_STRIPS]
    keys = [tuple(line.key.values()) for line in largest]
    division = cells(start_ms, end_ms, tz)
    cells_of_gpu: dict[tuple[str, ...], list[list[Accounts]]] = {key: [[] for _ in division.starts] for key in keys}
    if keys:
        only: Where = {"node": {key[0] for key in keys}, "gpu": {key[1] for key in keys}}
        filters = where if len(keys) == len(of_gpus) else {**where, **only}
        usage_of_pieces = ledger.usage(division.edges, _OF_GPUS, filters, timezone)
        for span, index in enumerate(division.places):
            for line in usage_of_pieces.lines(span):
                key = tuple(line.key.values())
                if key in cells_of_gpu:
                    cells_of_gpu[key][index].append(line.accounts_gpu_us)
    strips = [
        GpuTimeline(_short(gpu), f"{node}, {model}", tuple(added(parts) for parts in of_cells))
        for (node, gpu, model), of_cells in sorted(cells_of_gpu.items())
    ]
    strips.sort(key=lambda strip: (strip.detail, strip.name))
    return NodeTimeline(division.starts, division.hours, tuple(strips), len(of_gpus) - len(strips)), of_gpus


def _local(at_ms: int, tz: ZoneInfo) -> datetime:
    """The start of the instant's local hour, without a time zone."""
    local = datetime.fromtimestamp(at_ms // MS_PER_SECOND, tz)
    return local.replace(minute=0, second=0, microsecond=0, tzinfo=None, fold=0)


def timeline_svg(timeline: NodeTimeline, title: str) -> str:
    """An SVG with a row for each GPU and a column for each cell. A column shows the accounts, busy time at the
    bottom."""
    height = _TOP + len(timeline.strips) * (_ROW + _GAP) + _BOTTOM
    svg = root("timeline", _WIDTH, height, title, _described(timeline))
    pitch = (_WIDTH - _LEFT - _RIGHT) / max(1, len(timeline.starts))
    most = max((cell.total for strip in timeline.strips for cell in strip.cells), default=0) or 1
    for number, strip in enumerate(timeline.strips):
        top = _TOP + number * (_ROW + _GAP)
        group = ET.SubElement(svg, "g")
        ET.SubElement(group, "title").text = f"{strip.name}, {strip.detail}: {_shares(strip.whole)}"
        text(group, "tick", 0, top + 12, strip.name)
        text(group, "tick sub", 0, top + 25, strip.detail[:30])
        for index, cell in enumerate(strip.cells):
            below = top + float(_ROW)
            for account in ACCOUNTS:
                tall = _ROW * getattr(cell, account) / most
                if tall:
                    below -= tall
                    rect(group, f"a-{account}", _LEFT + pitch * index, below, max(pitch - 0.6, 0.6), tall)
    label_every = max(1, math.ceil(len(timeline.starts) / _LABELS))
    for index, start in enumerate(timeline.starts):
        if index % label_every == 0:
            text(svg, "tick", _LEFT + pitch * index, height - 8, f"{start:%-d %b %H:%M}")
    return drawn(svg)


def _described(timeline: NodeTimeline) -> str:
    gpus = "; ".join(f"{strip.name}: {_shares(strip.whole)}" for strip in timeline.strips[:8])
    return f"{len(timeline.strips)} GPUs in cells of {timeline.hours} h. {gpus}"


def _shares(accounts: Accounts) -> str:
    parts = [
        f"{figure_formatting.ACCOUNT_NAMES[name]} {figure_formatting.hours(getattr(accounts, name))} GPU-h"
        for name in ACCOUNTS
        if getattr(accounts, name)
    ]
    return ", ".join(parts) or "nothing"


def _short(gpu: str) -> str:
    """A GPU's UUID, shortened so that it is still distinct in a cluster. The instance of a MIG row stays."""
    head, slash, rest = gpu.partition("/")
    return (head if len(head) <= _SHORT else "-".join(head.split("-")[:2])[:_SHORT]) + slash + rest


_TIMELINE_MS = 31 * MS_PER_DAY
"""Longest timeline; for a longer job the timeline shows the last part."""


@router.get("/job/{id:path}")
def job_page(request: Request, id: str, deps: AppDeps, principal: Reader) -> Response:
    try:
        key = JobKey.parse(id)
    except ValueError as error:
        raise invalid("id", str(error)) from error
    at, timezone = deps.clock.wall_ms(), deps.settings.timezone
    where = team_filter(principal, ())
    span = job_span(deps, principal, key, None, at, cut=True)
    with deps.ledger.moment(span.start_ms, span.end_ms) as moment:
        job = job_costs.job(moment, deps.book(), key, (span.start_ms, at), at, where or None, timezone)
        if job is None:
            raise unknown_job(deps, principal, key)
        begin, end = _life(job.job, job.start_ms, at)
        if end - begin > _TIMELINE_MS:
            begin, end = moment.status().recent_span(end, _TIMELINE_MS)
        filters = {**where, **job_costs.only_job(key)}
        strips, of_gpus = timeline(moment, begin, end, filters, timezone)
        decisions = decisions_about(moment, key, span.start_ms, at)
        job = with_attempts(job, moment, span, decisions, principal)
    waiting = job.job.state == "waiting"
    shares = decision_text.shares(records(deps.ledger, at, job.job.queues), job.job.queues) if waiting else []
    used = sum_of_usage_lines({}, of_gpus) if of_gpus else None
    free = free_gpus(deps, key.cluster) if waiting and principal.teams is None else None
    return _render_job(request, deps, job, strips, used, decisions, shares, free, everyone=principal.teams is None)


@dataclass(frozen=True, slots=True)
class UnheldGpus:
    """The GPUs of a cluster that nobody held in the newest metered span, which is that of Overview.

    gpus, nodes: GPUs that were free as a whole all the time, and their nodes. most: of them, the most on one node.
    rest: what else was free on average, in GPUs: parts of GPUs, and GPUs for a part of the time."""

    start_ms: int
    end_ms: int
    gpus: int
    nodes: int
    most: int
    rest: float


def free_gpus(deps: Deps, cluster: str) -> UnheldGpus | None:
    """None if nothing is known of the cluster."""
    held = page_queries.current_demand(deps).value.held
    span = held.start_ms, held.end_ms
    with deps.ledger.moment(*span) as moment:
        lines = moment.usage(span, ("node", "gpu"), {"cluster": (cluster,)}, deps.settings.timezone).lines()
    of_nodes, rest_us, is_known = Counter[str](), 0, False
    for line in lines:
        accounts = line.accounts_gpu_us
        is_known |= accounts.is_known
        if accounts.unallocated and accounts.unallocated == accounts.total:
            of_nodes[line.key["node"]] += 1
        else:
            rest_us += accounts.unallocated
    if not is_known:
        return None
    most = max(of_nodes.values(), default=0)
    return UnheldGpus(*span, of_nodes.total(), len(of_nodes), most, rest_us / ((span[1] - span[0]) * US_PER_MS))


def _render_job(
    request: Request,
    deps: Deps,
    answer: JobAnswer,
    strips: NodeTimeline,
    used: UsageLine | None,
    decisions: list[Decision],
    shares: list[decision_text.QueueStanding],
    free: UnheldGpus | None,
    *,
    everyone: bool,
) -> Response:
    """The page of one job.

    used: the usage of its GPUs in the time of the timeline; None without a GPU.
    free: None if it is not known, or not for the reader.
    everyone: whether the reader may see all teams, and therefore the pages of decisions."""
    title = f"What each GPU did for {answer.job.job}"
    return month_and_decision_pages.page(
        request, "/jobs", "job.html", deps, found=answer, job=answer.job, strips=strips, line=used,
        decided=decisions, shares=shares, free=free, timeline=timeline_svg(strips, title) if strips.strips else "",
        utilisation=page_rows.utilisation, currency=answer.currency,
        address=month_and_decision_pages.address if everyone else None,
    )  # fmt: skip


def _life(job: Job, start_ms: int, now_ms: int) -> tuple[int, int]:
    """The span from the job's start to its end, or to now."""
    end = job.held_until_ms if job.state in ("ended", "failed") and job.held_until_ms is not None else now_ms
    return start_ms, max(end, start_ms + 1)


MOST_HOLDERS = 50
_MOVE = TypeAdapter(Move)


class NodeParams(Params):
    days: int = Field(default=7, ge=1, le=92)
    at: str | None = Field(default=None, max_length=40)


@router.get("/node/{cluster}/{node}")
def node_page(
    request: Request,
    cluster: str,
    node: str,
    params: Annotated[NodeParams, Query()],
    deps: AppDeps,
    principal: Reader,
) -> Response:
    require_all_teams(principal)
    now, timezone, length_ms = deps.clock.wall_ms(), deps.settings.timezone, params.days * MS_PER_DAY
    here: dict[Dimension, tuple[str, ...]] = {"cluster": (cluster,), "node": (node,)}
    with deps.ledger.moment(now - length_ms, now) as moment:
        status = moment.status()
        facts = next((facts for facts in status.nodes if (facts.cluster, facts.name) == (cluster, node)), None)
        start, at = status.recent_span(now, length_ms)
        strips, of_gpus = timeline(moment, start, at, here, timezone)
        holders = moment.usage((start, at), ("team", "namespace", "job", "cluster"), here, timezone).lines()
        newest_ms, agent = status.newest_by_node.get((cluster, node)), status.agents.get((cluster, node))
    told = (agent.gpus or ()) if agent is not None else ()
    tz = periods.zone(timezone)
    chosen = _instant_of(params.at, tz, now) if params.at is not None else max(0, (newest_ms or now) - 1)
    if chosen >= now:
        raise invalid("at", f"{params.at} is not in the past")
    day = gpu_holders.day_of(chosen, now, tz)
    with deps.ledger.moment(*day) as moment:
        held = gpu_holders.holders_of(moment, cluster, node, chosen, day, timezone)
    whole = added(line.accounts_gpu_us for line in of_gpus)
    register = page_queries.gpus_of(deps, cluster, node)
    if not of_gpus and facts is None and not register:
        raise Refusal(
            "not-found", f"the ledger has no records of a node {node[:200]!r} of cluster {cluster[:200]!r} in that time"
        )
    return month_and_decision_pages.page(
        request, "/nodes", "node.html", deps, cluster=cluster, node=node, days=params.days, facts=facts,
        strips=strips, timeline=timeline_svg(strips, f"What each GPU of {node} did") if strips.strips else "",
        holders=page_rows.held_by(holders)[:MOST_HOLDERS], start_ms=start, end_ms=at,
        whole=whole, metered=whole.total > whole.unmetered + whole.down, register=register,
        held=held, held_svg=gpu_holders.day_svg(held, tz, f"Who held the GPUs of {node}") if held.holds else "",
        newest_ms=newest_ms, agent=agent, told=told,
        errors=node_list.errors_of(told), needs=node_list.needs_of(told),
        older=agent is not None and is_older(agent.version), own_version=__version__,
        now_ms=now, chosen=datetime.fromtimestamp(chosen // MS_PER_SECOND, tz),
        quiet=newest_ms is not None and is_old(newest_ms, now),
        may_move=principal.may("admin"), forms=month_and_decision_pages.takes_forms(request, deps),
    )  # fmt: skip


def _instant_of(text: str, tz: ZoneInfo, now_ms: int) -> int:
    """The instant that a form of a browser sends, in local time, or that a link names. Raises Refusal."""
    with suppress(ValueError):
        local = datetime.strptime(text, "%Y-%m-%dT%H:%M").replace(tzinfo=tz)
        return in_calendar(round(local.timestamp()) * MS_PER_SECOND)
    return edge("at", text, tz, now_ms)


@router.post("/node/{cluster}/{node}/gpus")
async def move_gpu(request: Request, cluster: str, node: str, deps: AppDeps) -> Response:
    """Moves a GPU to this node when an administrator sends the form of the node's page."""
    principal = await admit(request, deps, "admin", form=True)
    fields = await month_and_decision_pages.read_form(request)
    check_form(request, fields.pop("form_token", ""))
    gpu = fields.pop("gpu", "")
    try:
        form = _MOVE.validate_python({"cluster": cluster, "node": node, "gpus": [gpu], **fields})
    except ValidationError as error:
        first = error.errors()[0]
        raise invalid(".".join(map(str, first["loc"])) or "form", fault_text(first)) from error
    gpu_move = GpuMove(form.node, form.gpus, form.cluster)
    await asyncio.to_thread(deps.ledger.move_gpus, gpu_move, deps.clock.wall_ms(), principal.actor, form.reason)
    return RedirectResponse(f"/node/{quote(cluster, safe='')}/{quote(node, safe='')}", 303)
