"""The tools of an assistant: usage, cost, jobs, holders, and the explanation of a statement, a weight and a wait.

Each tool asks the same question as the API and returns the same figures, as exact decimal texts with their unit. It
never decides what a caller may see: the API does, by the caller's token. Names (of jobs, users, teams, …) are written
by users. They are returned as values, in one line and cut to a length, and never as text to follow."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, TypeVar
from urllib.parse import quote, urlencode

from pydantic import Field, TypeAdapter

from accountant.api.bookkeeping_models import ChangesAnswer, Period
from accountant.assistant.protocol import AssistantTool
from accountant.billing.statements import SCHEMA, canonical, from_canonical
from accountant.core.periods import Month, utc, zone
from accountant.wire.dimensions import DECLARED
from accountant.wire.option_types import JobKind, JobState, WaitGroup
from accountant.wire.policy_models import Decision
from accountant.wire.typed_accountant_client import AccountantClient
from accountant.wire.usage_cost_and_job_models import (
    Accounts,
    BudgetState,
    CostAnswer,
    GpuErrorLine,
    GuaranteesAnswer,
    Job,
    JobAnswer,
    JobsAnswer,
    JobSort,
    JobsStops,
    JobStops,
    NodesAnswer,
    NodeSort,
    UnusedAnswer,
    UsageAnswer,
    WaitLine,
    longest_first,
)
from gputally.base.accountant_connection import Unanswered
from gputally.base.instants import duration_seconds, in_calendar, parse_edge
from gputally.base.money import gpu_hours, plain
from gputally.base.units import MS_PER_MINUTE, MS_PER_SECOND
from gputally.base.untrusted_text import as_name

R = TypeVar("R")
MOST_ROWS: Final = 100
"""Rows of one answer."""
_LONGEST = 300
"""Characters of a text in an answer."""
_DEEPEST = 6
_OF_NODE = {
    "cluster",
    "node",
    "pool",
    "gpu_models",
    "gpus",
    "silent",
    "agent_version",
    "agent_older",
    "gpu_errors_unread",
    "gpu_needs",
}
_OF_STATEMENT = ("status", "cost", "due", "due_total", "not_billed", "price_book_version")
_FORBIDDEN = 403

By = Annotated[
    str,
    Field(
        max_length=200,
        description=f"Dimensions of the rows, joined by commas: {', '.join(DECLARED)}, "
        "label:NAME of an exported pod label.",
    ),
]
Start = Annotated[
    str | None,
    Field(max_length=40, description="Start of the span: 7d (before its end), 2026-10-01 or RFC 3339. Default: month."),
]
End = Annotated[str | None, Field(max_length=40, description="End of the span, exclusive. Default: now.")]
Where = Annotated[
    dict[str, str] | None, Field(description='Only these values of dimensions: {"team": "vision"}', max_length=10)
]
Limit = Annotated[int, Field(ge=1, le=MOST_ROWS, description="Rows of one page.")]
Page = Annotated[str | None, Field(max_length=4096, description="next_page of the previous answer of this question.")]


def usage(
    accountant: AccountantClient,
    by: By = "team",
    start: Start = None,
    end: End = None,
    where: Where = None,
    limit: Limit = 20,
    page: Page = None,
) -> dict[str, Any]:
    """GPU-hours by account and group: held (busy + idle + unknown), unallocated, unmetered, down. The rows of all pages
    add up to the capacity, unless a filter or the caller's teams limit them."""
    query = _grouped(by, start, end, where, limit, page)
    found = accountant.ask(UsageAnswer, "/v1/usage", query)
    rows = [
        {**line.key, "held": _hours(line.accounts_gpu_us.allocated)}
        | {name: _hours(amount) for name, amount in line.accounts_gpu_us.model_dump().items()}
        for line in found.lines
    ]
    return _page(accountant, "GPU-hours", found, rows, "/v1/usage", query)


def cost(
    accountant: AccountantClient,
    by: By = "team",
    start: Start = None,
    end: End = None,
    where: Where = None,
    limit: Limit = 20,
    page: Page = None,
) -> dict[str, Any]:
    """The exact cost by group, and the total of all pages. `unheld_cost` is the part of time that nobody held, and
    `held_cost` the rest. A cost is null where some of the time has no price."""
    query = _grouped(by, start, end, where, limit, page)
    found = accountant.ask(CostAnswer, "/v1/cost", query)
    rows = [
        {**line.key, "gpu_hours": _hours(line.gpu_us), "cost": _money(line.cost),
         "held_cost": _money(line.held_cost), "unheld_cost": _money(line.unheld_cost),
         "unpriced_gpu_hours": _hours(line.unpriced_gpu_us)}
        for line in found.lines
    ]  # fmt: skip
    return _page(
        accountant, found.currency or "no price book", found, rows, "/v1/cost", query, total=_money(found.total),
        price_book=found.price_book_version,
    )  # fmt: skip


def jobs(
    accountant: AccountantClient,
    start: Start = None,
    end: End = None,
    state: Annotated[JobState | None, Field(description="Only jobs in this state.")] = None,
    kind: Annotated[JobKind | None, Field(description="Only notebooks, services or batch jobs (training).")] = None,
    team: Annotated[str | None, Field(max_length=253, description="Only jobs that this team pays for.")] = None,
    idle: Annotated[
        bool, Field(description="Only running jobs whose GPUs did nothing in the span; default: 30m.")
    ] = False,
    stopped: Annotated[
        bool, Field(description="Only jobs of which a scheduler, or something else that evicts, stopped pods.")
    ] = False,
    lost: Annotated[
        bool, Field(description="With the GPU-hours since the last checkpoint that stops lost; sort: lost_gpu_hours.")
    ] = False,
    search: Annotated[
        str, Field(max_length=253, description="Only jobs with this text in their path or in a pod's name.")
    ] = "",
    sort: JobSort = "cost",
    limit: Limit = 20,
    page: Page = None,
) -> dict[str, Any]:
    """Jobs with their GPU-hours, idle GPU-hours, cost so far, cost per hour (of all GPUs that it holds) and wait."""
    start = "30m" if idle and start is None else start
    query = {
        "start": start, "end": end, "state": state, "kind": kind, "where.team": team,
        "idle": "true" if idle else None, "stopped": "true" if stopped else None, "lost": "true" if lost else None,
        "search": search or None,
        "sort": sort, "limit": str(limit), "page": page,
    }  # fmt: skip
    found = accountant.ask(JobsAnswer, "/v1/jobs", query)
    rows = [_job(accountant, job) for job in found.jobs]
    return _page(
        accountant, f"GPU-hours; {found.currency or 'no price book'}", found, rows, "/v1/jobs", query,
        jobs=found.count, jobs_that_held_a_gpu=found.held_count,
        gpu_hours=_hours(found.total_gpu_us), total_cost=_money(found.total_cost),
        total_cost_per_hour=_money(found.total_burn_per_hour), **_lost(found.stops),
    )  # fmt: skip


def nodes(
    accountant: AccountantClient,
    start: Start = "1d",
    end: End = None,
    search: Annotated[str, Field(max_length=253, description="Only nodes with this text in CLUSTER/NODE.")] = "",
    sort: NodeSort = "name",
    limit: Limit = 20,
    page: Page = None,
) -> dict[str, Any]:
    """Nodes: until when each has reported (`silent`: too long ago to describe the present), why it is down, the release
    of its agent (null: unknown) and whether that is older than the accountant, the errors of its GPUs (null: unknown)
    and what they need, and its GPU-hours by account. Needs a
    token that may see all teams."""
    query = {
        "start": start, "end": end, "search": search or None, "sort": sort, "limit": str(limit), "page": page,
    }  # fmt: skip
    found = accountant.ask(NodesAnswer, "/v1/nodes", query)
    rows = [
        {**line.model_dump(mode="json", include=_OF_NODE),
         "newest_record": None if line.newest_ms is None else utc(line.newest_ms),
         "gpu_errors": None if line.gpu_errors is None else [_gpu_error(error) for error in line.gpu_errors],
         **{name: _hours(amount) for name, amount in line.accounts_gpu_us.model_dump().items()}}
        | {"down": line.down, "down_gpu_hours": _hours(line.accounts_gpu_us.down),
           "link": f"{accountant.public_url}/node/{quote(line.cluster, safe='')}/{quote(line.node, safe='')}"}
        for line in found.lines
    ]  # fmt: skip
    return _page(accountant, "GPU-hours", found, rows, "/v1/nodes", query, nodes=found.count)


def holds(
    accountant: AccountantClient,
    at: Annotated[str, Field(max_length=40, description="The instant: 2026-10-03T14:00:00Z, or 2h (ago).")],
    gpu: Annotated[str | None, Field(max_length=253, description="UUID of one GPU.")] = None,
    node: Annotated[str | None, Field(max_length=253, description="A node: all its GPUs.")] = None,
    cluster: Annotated[str | None, Field(max_length=253, description="Only this cluster.")] = None,
    limit: Limit = 50,
    page: Page = None,
) -> dict[str, Any]:
    """Who held a GPU, or the GPUs of a node, in the minute of an instant: pod, namespace, team, user and how much of
    the GPU. A row without a pod is a part that nobody held."""
    if gpu is None and node is None:
        raise ValueError("give a gpu or a node")
    if at[-1:] in ("w", "d", "h", "m", "s"):
        at_ms = in_calendar(_now_ms(accountant) - duration_seconds(at) * MS_PER_SECOND)
    else:
        at_ms = parse_edge(at, zone("UTC"), 0)
    at_ms -= at_ms % MS_PER_MINUTE
    query: dict[str, str | None] = {
        "by": "node,gpu,namespace,pod,team,user", "start": str(at_ms), "end": str(at_ms + MS_PER_MINUTE),
        "where.gpu": gpu, "where.node": node, "where.cluster": cluster, "limit": str(limit), "page": page,
    }  # fmt: skip
    found = accountant.ask(UsageAnswer, "/v1/usage", query)
    of_minute = MS_PER_MINUTE * 1000
    rows = [
        {**line.key, "held_gpus": round(of.allocated / of_minute, 4),
         "busy_gpus": None if _unknown(of) else round(of.busy / of_minute, 4),
         "unknown_gpus": round(of.allocated_unknown / of_minute, 4),
         "state": "held" if of.allocated else _unheld(of.model_dump())}
        for line in found.lines
        for of in (line.accounts_gpu_us,)
    ]  # fmt: skip
    return _page(accountant, "GPUs", found, rows, "/v1/usage", query)


def explain_statement(
    accountant: AccountantClient,
    month: Annotated[str, Field(pattern=r"^\d{4}-\d{2}$", description="The month: 2026-10.")],
    team: Annotated[str | None, Field(max_length=253, description="The team whose lines to explain.")] = None,
    gpu_model: Annotated[str | None, Field(max_length=253, description="Only lines of this GPU model.")] = None,
    account: Annotated[str | None, Field(max_length=40, description="Only lines of this account, as `busy`.")] = None,
    offset: Annotated[int, Field(ge=0, le=1_000_000, description="Lines to skip: `next_offset`.")] = 0,
    limit: Limit = 20,
) -> dict[str, Any]:
    """Why a month's statement says what it says: each line is GPU-hours times the price of a row of the price book, and
    the five jobs that cost most. `due` is what each team owes, with corrections, credits and rounding; `not_billed` is
    the amount of what no team is billed for."""
    month_of = Month.parse(month)
    stated = from_canonical(accountant.get("/v1/statement", {"month": month, "team": team}))
    statement: dict[str, Any] = json.loads(canonical(replace(stated, schema=SCHEMA)))
    lines = [
        line
        for line in statement["lines"]
        if gpu_model in (None, line["gpu_model"]) and account in (None, line["account"])
    ]
    shown, following = from_offset(lines, offset, limit)
    start_ms, end_ms = month_of.span(zone(statement.get("timezone", "UTC")))
    dearest = accountant.ask(
        JobsAnswer, "/v1/jobs",
        {"start": str(start_ms), "end": str(min(end_ms, _now_ms(accountant))), "where.team": team,
         "sort": "cost", "limit": "5"},
    )  # fmt: skip
    return envelope(
        accountant, f"GPU-hours × {statement['currency'] or 'no price book'} per GPU-hour", start_ms, end_ms,
        statement["coverage"], shown, f"/v1/statement?{_of({'month': month, 'team': team})}",
        lines=len(lines), next_offset=following, next_page=None,
        **{name: statement[name] for name in _OF_STATEMENT},
        dearest_jobs=[_job(accountant, job) for job in dearest.jobs],
    )  # fmt: skip


def explain_weight(
    accountant: AccountantClient,
    queue: Annotated[str, Field(min_length=1, max_length=500, description="The queue, by its full name.")],
    start: Start = "1d",
    end: End = None,
    limit: Limit = 10,
) -> dict[str, Any]:
    """Why a queue has its weight: the decisions about it, newest first, with value, value before, reason and inputs.
    Needs a token that may see all teams."""
    span = _span(accountant, start or "1d", end)
    query = {"start": str(span.start_ms), "end": str(span.end_ms), "subject": queue, "limit": str(limit)}
    decisions = accountant.ask(tuple[Decision, ...], "/v1/decisions", query)
    rows = [{"at": utc(one.at_ms), **one.model_dump(mode="json", exclude={"at_ms", "id"})} for one in decisions]
    return envelope(
        accountant, "weight", span.start_ms, span.end_ms, span.coverage, rows,
        _api("/v1/decisions", query, span.start_ms, span.end_ms), next_page=None,
    )  # fmt: skip


def why_waiting(
    accountant: AccountantClient,
    job: Annotated[
        str, Field(min_length=1, max_length=253, description="A part of the job's path, or of a pod's name.")
    ],
    start: Start = "7d",
    limit: Annotated[int, Field(ge=1, le=20, description="Rows of one page.")] = 5,
) -> dict[str, Any]:
    """Why a job waits: how long so far, the waits in its queue, the budgets of its teams, and (with a token that may
    see all teams) the last decisions about its queue."""
    query = {"start": start, "state": "waiting", "search": job, "sort": "name", "limit": str(limit)}
    found = accountant.ask(JobsAnswer, "/v1/jobs", query)
    span = {"start": str(found.start_ms), "end": str(found.end_ms)}
    waits = TypeAdapter(list[dict[str, Any]]).validate_json(accountant.get("/v1/waits", {**span, "by": "queue"}))
    budgets = accountant.ask(tuple[BudgetState, ...], "/v1/budgets")
    queues = sorted({queue for one in found.jobs for queue in one.queues})
    decided = {queue: _last_decisions(accountant, queue, span) for queue in queues}
    rows = [
        {
            **_job(accountant, one),
            "waits_of_queue_seconds": [wait for wait in waits if wait["key"] in one.queues],
            "budgets": [state.model_dump(mode="json") for state in budgets if state.team in one.teams],
            "decisions": [decision for queue in one.queues for decision in decided[queue]],
        }
        for one in found.jobs
    ]
    if not (rows or found.note):
        found = found.model_copy(
            update={"note": "no waiting job has this text in its path or in a pod's name: ask jobs for its state"}
        )
    return _page(accountant, "seconds", found, rows, "/v1/jobs", query, jobs=found.count)


def waits(
    accountant: AccountantClient,
    by: WaitGroup = "queue",
    start: Start = "7d",
    end: End = None,
    cluster: Annotated[str | None, Field(max_length=253, description="Only pods of this cluster.")] = None,
    offset: Annotated[int, Field(ge=0, le=1_000_000, description="Rows to skip: `next_offset`.")] = 0,
    limit: Limit = 50,
) -> dict[str, Any]:
    """How long pods waited in each queue, team or namespace: mean, median, 95th percentile and longest, in seconds, in
    the queue (`queued`) and from their placement until they ran (`starting`); how many still wait (null: unknown). The
    longest median first. `unused_gpu_hours`: what all waiting pods asked for, how much was free in the same hours at
    most, and how much of the rest was held idle at most (null if `unknown` says why)."""
    span = _span(accountant, start or "7d", end)
    query = {"by": by, "start": str(span.start_ms), "end": str(span.end_ms), "cluster": cluster}
    found = longest_first(accountant.ask(tuple[WaitLine, ...], "/v1/waits", query))
    shown, following = from_offset(found, offset, limit)
    unused = accountant.ask(UnusedAnswer, "/v1/waits/unused", {name: query[name] for name in query if name != "by"})
    rows = [
        {by: one.key, "pods": one.pods, "waiting": one.waiting, "note": one.note}
        | {f"{phase}_{name}_seconds": getattr(getattr(one, phase), name)
           for phase in ("queued", "starting") for name in ("mean", "median", "p95", "longest")}
        for one in shown
    ]  # fmt: skip
    return envelope(
        accountant, "seconds", span.start_ms, span.end_ms, span.coverage, rows, f"/waits?{_of(query)}",
        groups=len(found), next_offset=following, next_page=None, unused_gpu_hours=_unused(unused),
    )  # fmt: skip


def _unused(found: UnusedAnswer) -> dict[str, Any]:
    total = found.total
    figures = {
        name: None if total is None or (gpu_us := getattr(total, f"{name}_gpu_us")) is None else _hours(gpu_us)
        for name in ("asked", "free", "idle")
    }
    span_ms = 0 if total is None else total.end_ms - total.start_ms
    return {**figures, "known_part": total.known_ms / span_ms if total and span_ms else 0.0, "unknown": found.unknown}


def attempts(
    accountant: AccountantClient,
    job: Annotated[
        str, Field(min_length=1, max_length=253, description="A part of the job's path, or of a pod's name.")
    ],
    start: Start = "7d",
    end: End = None,
    limit: Limit = 20,
) -> dict[str, Any]:
    """Each time in the span that a job ran: when, how long it waited before, what it held, how it ended, by whom and
    why it was stopped, and who held its GPUs next. `lost_gpu_hours` is what all stops lost
    since a checkpoint (null: unknown of one). Newest first, for the dearest job of the span with this text in its
    path or in the name of one of its pods."""
    query = {"start": start, "end": end, "search": job, "limit": "1"}
    found = accountant.ask(JobsAnswer, "/v1/jobs", query)
    if not found.jobs:
        found = found.model_copy(
            update={"note": found.note or "no job of the span has this text in its path or in a pod's name"}
        )
        return _page(accountant, "GPU-hours", found, (), "/v1/jobs", query, jobs=0)
    (listed,) = found.jobs
    span = {"start": str(found.start_ms), "end": str(found.end_ms)}
    one = accountant.ask(JobAnswer, f"/v1/jobs/{quote(listed.id, safe='~')}", span)
    known = one.attempts or ()
    otherwise = {"gpu_us", "lost_gpu_us", "checkpoint_ms", "start_ms", "end_ms", "waited_ms"}
    rows = [
        {**attempt.model_dump(mode="json", exclude=otherwise),
         "start": None if attempt.start_ms is None else utc(attempt.start_ms),
         "end_at": None if attempt.end_ms is None else utc(attempt.end_ms),
         "waited_seconds": None if attempt.waited_ms is None else attempt.waited_ms // MS_PER_SECOND,
         "gpu_hours": _hours(attempt.gpu_us),
         "lost_gpu_hours": None if attempt.lost_gpu_us is None else _hours(attempt.lost_gpu_us),
         "checkpoint_at": None if attempt.checkpoint_ms is None else utc(attempt.checkpoint_ms)}
        for attempt in reversed(known[-limit:])
    ]  # fmt: skip
    unknown = "the attempts are unknown here: ask the cluster's own accountant" if one.attempts is None else ""
    found = found.model_copy(update={"note": "; ".join(filter(None, (found.note, unknown)))})
    earlier = None if one.earlier_attempts is None else one.earlier_attempts + len(known) - len(rows)
    answer = _page(
        accountant, "GPU-hours", found, rows, "/v1/jobs", query, job=_job(accountant, listed), jobs=found.count,
        earlier_attempts=earlier,
        lost_gpu_hours=None if one.lost_gpu_us is None else _hours(one.lost_gpu_us),
        known_lost_gpu_hours=None if one.known_lost_gpu_us is None else _hours(one.known_lost_gpu_us),
    )  # fmt: skip
    return {**answer, "next_page": None, "link": answer["job"]["link"]}


def months(accountant: AccountantClient, limit: Limit = 24) -> dict[str, Any]:
    """Every month, newest first: open, closed or published, what that means and of which part nothing is known, by
    whom and when, and the hash of its statement. What a month costs is an answer of explain_statement."""
    periods = TypeAdapter(tuple[dict[str, Any], ...]).validate_json(accountant.get("/v1/periods"))
    rows = [
        {"month": one["month"], "status": one["status"], "state": one["state"], "hash": one["hash"],
         "closed_by": one["closed_by"],
         "closed_at": None if one["closed_ms"] is None else utc(one["closed_ms"])}
        for one in reversed(periods[-limit:])
    ]  # fmt: skip
    span = periods[0]["start_ms"], periods[-1]["end_ms"]
    covered = _span(accountant, str(span[0]), None).coverage
    return envelope(accountant, "month", *span, covered, rows, "/v1/periods", months=len(periods), next_page=None)


def closing(
    accountant: AccountantClient,
    month: Annotated[str, Field(pattern=r"^\d{4}-\d{2}$", description="The month: 2026-10.")],
) -> dict[str, Any]:
    """What closing a month asks: each thing that is looked at, whether it is clear, open, or objects to closing, what
    is known of it, and its page. Empty for a closed month. Needs a token that may see all teams."""
    found = accountant.ask(Period, f"/v1/periods/{quote(month)}")
    span = _span(accountant, f"{month}-01", f"{Month.parse(month).next}-01")
    rows = [{**one.model_dump(), "link": accountant.public_url + one.link} for one in found.checklist]
    return envelope(
        accountant, "month", span.start_ms, span.end_ms, span.coverage, rows, f"/invoices/{month}", month=month,
        state=found.state, next_page=None,
    )  # fmt: skip


def changes(
    accountant: AccountantClient,
    month: Annotated[str, Field(pattern=r"^\d{4}-\d{2}$", description="The month: 2026-10.")],
    since: Annotated[
        str | None,
        Field(max_length=40, description="Of an open month: its newest draft at this instant or before (7d, a date)."),
    ] = None,
    limit: Limit = 20,
) -> dict[str, Any]:
    """What changed of a month, by team, cause and amount. Of an open month since its newest draft: late records, use
    since then, prices, corrections, credits and charges; `draft_to_now` has each team's amount then and now. Of a
    closed month since it was closed: corrections after late records, credits and charges, and proposals that nobody
    decided yet (`waiting`)."""
    span = _span(accountant, f"{month}-01", f"{Month.parse(month).next}-01")
    currency = accountant.ask(CostAnswer, "/v1/cost", {"by": "cluster", "start": f"{month}-01", "limit": "1"}).currency
    periods = TypeAdapter(tuple[dict[str, Any], ...]).validate_json(accountant.get("/v1/periods"))
    if since is not None or any(one["month"] == month and one["hash"] is None for one in periods):
        found = accountant.ask(ChangesAnswer, f"/v1/periods/{quote(month)}/changes", {"since": since})
        told = [{**one.model_dump(mode="json"), "at": None if one.at_ms is None else utc(one.at_ms)}
                for one in found.changes]  # fmt: skip
        note = "" if found.draft is not None else "no draft was kept by then: what late records changed is not known"
        return envelope(
            accountant, found.currency or "no price book", span.start_ms, span.end_ms, span.coverage, told[:limit],
            f"/v1/periods/{month}/changes?{_of({'since': since})}", note, changes=len(told), next_page=None,
            since=utc(found.since_ms), draft=None if found.draft is None else found.draft.model_dump(mode="json"),
            draft_to_now=[one.model_dump(mode="json") for one in found.teams[:limit]],
        )  # fmt: skip
    booked = [
        *(("correction", one) for one in _listed(accountant, "/v1/corrections")),
        *(("credit or charge", one) for one in _listed(accountant, "/v1/adjustments")),
        *(
            ("waiting", {**proposal, **effect})
            for proposal in _listed(accountant, "/v1/proposals")
            for effect in proposal["effects"]
        ),
    ]
    rows = [
        {"cause": cause, "team": one["team"], "amount": one["amount"], "booked_in": one["booked_in"],
         "gpu_hours": None if one.get("gpu_us") is None else _hours(one["gpu_us"]), "reason": one.get("reason", "")}
        for cause, one in booked
        if one["month"] == month
    ]  # fmt: skip
    return envelope(
        accountant, f"GPU-hours; {currency or 'no price book'}", span.start_ms, span.end_ms, span.coverage,
        rows[:limit], f"/v1/statement?{_of({'month': month})}", changes=len(rows), next_page=None,
    )  # fmt: skip


def budgets(accountant: AccountantClient, limit: Limit = 50) -> dict[str, Any]:
    """The budgets of this month: limit, what is spent, and the part of it that is used."""
    states = accountant.ask(tuple[BudgetState, ...], "/v1/budgets")
    rows = [state.model_dump(mode="json") for state in states[:limit]]
    span = _span(accountant, f"{states[0].month}-01" if states else "1h", None)
    return envelope(
        accountant, "the unit of each row", span.start_ms, span.end_ms, span.coverage, rows, "/v1/budgets",
        budgets=len(states), next_page=None,
    )  # fmt: skip


def guarantees(
    accountant: AccountantClient,
    offset: Annotated[int, Field(ge=0, le=1_000_000, description="Rows to skip: `next_offset`.")] = 0,
    limit: Limit = 50,
) -> dict[str, Any]:
    """Whether a team or queue is above its guarantee: what each queue is guaranteed (null: unlimited), held on
    average in the span of the answer (the last minutes on record; the page Shares counts what is held at an instant
    instead), and how many GPUs of it are above."""
    found = accountant.ask(GuaranteesAnswer, "/v1/guarantees")
    shown, following = from_offset(found.queues, offset, limit)
    rows = [one.model_dump(mode="json") for one in shown]
    return envelope(
        accountant, "GPUs", found.start_ms, found.end_ms, found.coverage, rows, "/v1/guarantees",
        queues=len(found.queues), next_offset=following, next_page=None,
    )  # fmt: skip


def provider_invoice(
    accountant: AccountantClient,
    month: Annotated[str, Field(pattern=r"^\d{4}-\d{2}$", description="The month: 2026-10.")],
    offset: Annotated[int, Field(ge=0, le=1_000_000, description="Lines to skip: `next_offset`.")] = 0,
    limit: Limit = 20,
) -> dict[str, Any]:
    """Whether the newest stored invoice of the provider agrees with the bills of a month. Each line, and the `total`:
    invoice = teams + idle + unused_commitments + unmatched; what is unmatched the bills do not explain. Needs a token
    that may see all teams."""
    span = _span(accountant, f"{month}-01", f"{Month.parse(month).next}-01")
    text = accountant.get(f"/invoice/{quote(month)}/lines.csv").decode()
    *lines, total = (
        {name: value for name, value in line.items() if name != "month"} for line in csv.DictReader(io.StringIO(text))
    )
    shown, following = from_offset(lines, offset, limit)
    return envelope(
        accountant, f"GPU-hours; {total['currency']}", span.start_ms, span.end_ms, span.coverage, shown,
        f"/invoice/{quote(month)}", total=total, lines=len(lines), next_offset=following, next_page=None,
    )  # fmt: skip


TOOLS: Final = tuple(
    AssistantTool(tool.__name__, tool)
    for tool in (
        usage, cost, jobs, waits, attempts, nodes, holds, explain_statement, explain_weight, why_waiting, months,
        closing, changes, budgets, guarantees, provider_invoice,
    )
)  # fmt: skip


def ledgers(accountant: AccountantClient) -> dict[str, Any]:
    """The ledgers of the fleet, one for each cluster or group of clusters, and until when each has published figures.
    `fault` says why one cannot be read and is left out. Needs a token that may see all teams."""
    found = TypeAdapter(list[dict[str, Any]]).validate_json(accountant.get("/v1/ledgers"))
    begun = [one["first_ms"] for one in found if one["first_ms"]]
    ended = [one["until_ms"] for one in found if one["until_ms"]]
    rows = [
        {name.removesuffix("_ms"): (utc(value) if value else None) if name.endswith("_ms") else value
         for name, value in one.items()}
        for one in found
    ]  # fmt: skip
    return envelope(accountant, "ledgers", min(begun, default=0), max(ended, default=0), None, rows, "/fleet")


OF_LEDGERS: Final = (AssistantTool("ledgers", ledgers),)
"""The tools of the fleet alone."""


def envelope(
    accountant: AccountantClient,
    unit: str,
    start_ms: int,
    end_ms: int,
    covered: float | None,
    rows: Iterable[Mapping[str, Any]],
    link: str,
    note: str = "",
    **more: Any,
) -> dict[str, Any]:
    """An answer with what every answer has, within the limits of `bounded`.

    link: the path of the page, or of the API, with the same figures."""
    found = {
        "unit": unit,
        "period": {"start": utc(start_ms), "end": utc(end_ms)},
        "coverage": covered,
        "note": note,
        **more,
        "rows": list(rows),
    }
    return {**bounded(found), "link": accountant.public_url + link}


def from_offset(rows: Sequence[R], offset: int, limit: int) -> tuple[Sequence[R], int | None]:
    """One page of rows, and the offset of the next one; None if there is none."""
    following = offset + limit
    return rows[offset:following], following if following < len(rows) else None


def _page(
    accountant: AccountantClient,
    unit: str,
    found: UsageAnswer | CostAnswer | JobsAnswer | NodesAnswer,
    rows: Iterable[Mapping[str, Any]],
    path: str,
    query: Mapping[str, str | None],
    **more: Any,
) -> dict[str, Any]:
    """The answer that a page of the API is. path, query: the question."""
    span = found.start_ms, found.end_ms
    of_span = found if isinstance(found, UsageAnswer) else _span(accountant, str(span[0]), str(span[1]))
    answer = envelope(
        accountant, unit, *span, of_span.coverage, rows, _api(path, query, *span), found.note, **more
    )  # fmt: skip
    return {**answer, "next_page": found.next_page}


def bounded(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The answer with plain values in which every text is one line of at most _LONGEST characters and every list and
    mapping has at most MOST_ROWS entries, because names come from users. Its note says how many entries that leaves
    out."""
    left_out: list[int] = []
    found: dict[str, Any] = _bounded(answer, left_out, 0)
    if left_out:
        cut = f"{sum(left_out)} entries are left out: the answer would be too long or too deep"
        found["note"] = "; ".join(filter(None, (found.get("note"), cut)))
    return found


def _bounded(value: Any, left_out: list[int], depth: int) -> Any:
    if isinstance(value, str):
        return as_name(value, _LONGEST)
    if not isinstance(value, Mapping | list | tuple):
        return value
    if depth >= _DEEPEST and value:
        left_out.append(len(value))
        return "…"
    if len(value) > MOST_ROWS:
        left_out.append(len(value) - MOST_ROWS)
    if isinstance(value, Mapping):
        shown = list(value.items())[:MOST_ROWS]
        return {as_name(str(key), _LONGEST): _bounded(each, left_out, depth + 1) for key, each in shown}
    return [_bounded(each, left_out, depth + 1) for each in value[:MOST_ROWS]]


def _grouped(
    by: str, start: str | None, end: str | None, where: Mapping[str, str] | None, limit: int, page: str | None
) -> dict[str, str | None]:
    filters = {f"where.{name}": value for name, value in (where or {}).items()}
    return {"by": by, "start": start, "end": end, "limit": str(limit), "page": page, **filters}


def _lost(stops: JobStops | None) -> dict[str, Any]:
    """What stops lost, if that was asked."""
    if stops is None:
        return {}
    lost_us = stops.lost_gpu_us
    told: dict[str, Any] = {"lost_gpu_hours": None if lost_us is None else _hours(lost_us),
                            "known_lost_gpu_hours": _hours(stops.known_lost_gpu_us)}  # fmt: skip
    return told | ({"jobs_of_unknown_loss": stops.unknown_jobs} if isinstance(stops, JobsStops) else {})


def _job(accountant: AccountantClient, job: Job) -> dict[str, Any]:
    held = job.accounts_gpu_us
    return {
        "job": f"{job.cluster}/{job.namespace}/{job.job}", "state": job.state, "teams": job.teams,
        "queues": job.queues, "users": job.users, "gpu_models": job.gpu_models,
        "gpu_hours": _hours(held.allocated), "busy_gpu_hours": None if _unknown(held) else _hours(held.busy),
        "idle_gpu_hours": None if _unknown(held) else _hours(held.allocated_idle),
        "unknown_gpu_hours": _hours(held.allocated_unknown), "cost": _money(job.cost),
        "gpus_now": _money(job.gpus), "asks_gpus": job.asks_gpus, "cost_an_hour": _money(job.burn_per_hour),
        "created": None if job.created_ms is None else utc(job.created_ms),
        "waited_seconds": None if job.waited_ms is None else job.waited_ms // MS_PER_SECOND,
        "waiting_seconds": None if job.waiting_ms is None else job.waiting_ms // MS_PER_SECOND,
        "link": f"{accountant.public_url}/job/{quote(as_name(job.id, _LONGEST), safe='~')}",
        **_lost(job.stops),
    }  # fmt: skip


def _gpu_error(error: GpuErrorLine) -> dict[str, Any]:
    return {
        "gpu": error.gpu, "kind": error.kind, "count": error.count,
        "since": None if error.since_ms is None else utc(error.since_ms),
        "last": None if error.last_ms is None else utc(error.last_ms),
    }  # fmt: skip


def _listed(accountant: AccountantClient, path: str) -> list[dict[str, Any]]:
    return TypeAdapter(list[dict[str, Any]]).validate_json(accountant.get(path))


def _last_decisions(accountant: AccountantClient, queue: str, span: Mapping[str, str]) -> list[dict[str, Any]]:
    """The last decisions about a queue; none for a caller that may not see all teams."""
    try:
        found = accountant.ask(tuple[Decision, ...], "/v1/decisions", {**span, "subject": queue, "limit": "3"})
    except Unanswered as error:
        if error.status != _FORBIDDEN:
            raise
        return []
    return [{"at": utc(one.at_ms), "kind": one.kind, "value": one.value, "reason": one.reason} for one in found]


def _now_ms(accountant: AccountantClient) -> int:
    """The time of the accountant's clock."""
    return _span(accountant, "1h", None).end_ms


def _span(accountant: AccountantClient, start: str, end: str | None) -> UsageAnswer:
    """A span as the accountant reads its edges, with its clock and time zone, and its coverage."""
    return accountant.ask(UsageAnswer, "/v1/usage", {"by": "cluster", "start": start, "end": end, "limit": "1"})


def _unknown(accounts: Accounts) -> bool:
    """Whether it is known of none of the held time how busy it was."""
    return 0 < accounts.allocated_unknown == accounts.allocated


def _unheld(accounts: Mapping[str, int]) -> str:
    return max(("unallocated", "unmetered", "down"), key=lambda name: accounts[name])


def _api(path: str, query: Mapping[str, str | None], start_ms: int, end_ms: int) -> str:
    given = {name: value for name, value in query.items() if name not in ("page", "limit", "start", "end")}
    return f"{path}?{_of({**given, 'start': str(start_ms), 'end': str(end_ms)})}"


def _of(query: Mapping[str, str | None]) -> str:
    return urlencode({name: value for name, value in query.items() if value is not None})


def _hours(gpu_us: int) -> str:
    return plain(gpu_hours(gpu_us))


def _money(amount: Any) -> str | None:
    return None if amount is None else format(amount, "f")
