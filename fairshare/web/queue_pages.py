"""Serves the pages of shares, queues and decisions, with only the queues that the caller may see.

The numbers come from the last cycle (`fairshare.controller.cycle_report`).

A queue belongs to the team that it or the nearest queue above it names, as in the accountant's ledger. A caller with
some teams sees a queue only if all queues below it belong to these teams too, because its figures contain theirs. Such
a caller does not see sentences that can name siblings, parents and waiting workloads."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from starlette.responses import Response

from accountant.wire import decision_text
from accountant.wire.list_order import PageTables, TableSorting
from accountant.wire.policy_models import Decision, Policy, QueuePolicy, UsageWindow
from fairshare.controller.cycle_report import CycleReport, TargetReport, WriteOutcome
from fairshare.controller.policy_difference import duration_text
from fairshare.core.queues_and_weights import UNLIMITED, Condition, PolicyTree, Standing, Weight
from fairshare.explain.conclusions import of_weight
from fairshare.explain.queue_and_pod_explanation import QueueAccount, explain_queue
from fairshare.explain.try_weight import TriedQueue, try_weight
from fairshare.explain.weight_change_causes import change_table, with_change
from fairshare.laws.weight_calculation import static_parts
from fairshare.web import queue_history, svg_plots
from fairshare.web.page_authentication import PageRefusal
from fairshare.web.page_routing import RequestContext, link
from fairshare.web.queue_history import LastCycle
from fairshare.web.svg_plots import PlotLine
from gputally.base.errors import AccountantUnavailable, FairshareError
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR
from gputally.base.untrusted_text import for_cell

State = Literal["published", "steady", "tried", "held", "trouble", "none"]
"""The state of a queue's weight: written, unchanged in its interval, only planned (dry-run), held with all weights,
refused by the cluster, or without an object."""
_TROUBLE = frozenset({"contested", "refused", "gone", "unavailable", "deferred"})
_LEAST_ABOVE = 0.0005
"""GPUs; less is a rounding."""
_WORDS: Mapping[State, str] = {
    "published": "published",
    "steady": "in force",
    "tried": "dry-run",
    "held": "held",
    "trouble": "not effective",
    "none": "no object",
}


@dataclass(frozen=True, slots=True)
class QueueRow:
    """One queue at one target.

    entitled: its part of the cluster (0..1) by quotas and weights if all queues request GPUs.
    used: the part of the window's capacity that it and the queues below it used; None without a window.
    due, held, asked: the GPUs that it is due, holds and requests now; None if the target does not show them.
    owed_gpu_h: the GPU-hours that it is owed, which count for its next turn; None if they are not counted.
    exhausted: its budget is used up.
    state, why: the state of its weight, and the reason."""

    name: str
    depth: int
    queue: QueuePolicy
    entitled: float
    used: float | None
    due: float | None
    held: float | None
    asked: float | None
    weight: float | None
    owed_gpu_h: float | None
    exhausted: bool
    state: State
    why: str

    @property
    def above(self) -> float | None:
        """The GPUs that it holds above its guarantee; None if it does not."""
        guaranteed = self.queue.deserved
        if self.held is None or guaranteed == UNLIMITED or self.held <= guaranteed + _LEAST_ABOVE:
            return None
        return self.held - guaranteed

    @property
    def word(self) -> str:
        """The state as the pages show it."""
        return _WORDS[self.state]


TABLES: Final = PageTables(
    {
        "shares": {
            "queue": lambda row: row.name, "used": lambda row: row.used, "entitled": lambda row: row.entitled,
            "guaranteed": lambda row: math.inf if row.queue.deserved == UNLIMITED else row.queue.deserved,
            "due": lambda row: row.due, "held": lambda row: row.held, "asked": lambda row: row.asked,
            "owed": lambda row: row.owed_gpu_h, "weight": lambda row: row.weight, "state": lambda row: row.word,
        },
        "try": {
            "queue": lambda row: row.queue, "weight": lambda row: row.weight_then, "part": lambda row: row.part,
            "part_then": lambda row: row.part_then, "gpus_then": lambda row: row.gpus_then,
            "change": lambda row: row.gpus_then - row.gpus,
        },
    },
    frozenset({"queue", "state"}),
)  # fmt: skip
"""The tables of the page that can be sorted: one for each target. Without an order, a queue stands above those below
it."""


@dataclass(frozen=True, slots=True)
class TargetView:
    """One target with its queues. unassigned: the part of the window's capacity that no queue of the policy used."""

    name: str
    mode: str
    gpus: float
    rows: tuple[QueueRow, ...]
    conditions: tuple[Condition, ...]
    degraded: Mapping[str, str]
    unassigned: float | None


def targets(policy: Policy, report: CycleReport) -> tuple[TargetView, ...]:
    """Return the targets in the order of the report. Entitlements are 0 at a target that knows no GPUs."""
    return tuple(_target(policy, report, target) for target in report.targets)


def used_part(window: UsageWindow | None, queue: str) -> float | None:
    """Return the part of the window's capacity that a queue and the queues below it used; None if unknown."""
    if window is None or window.capacity <= 0:
        return None
    return window.usage.get(queue, 0) / window.capacity


def _target(policy: Policy, report: CycleReport, target: TargetReport) -> TargetView:
    parts = static_parts(policy, target.gpus) if target.gpus > 0 else {}
    dues = {each.queue: each for each in target.entitlements}
    weights = {each.queue: each for each in target.weights}
    outcomes = {each.apply.queue: each for each in target.outcomes}
    rows = []
    for depth, queue in PolicyTree(policy).downwards():
        name = queue.name
        due, weight, standing = dues.get(name), weights.get(name), target.standings.get(name)
        owed = weight.explanation.trace.get("owed_gpu_h") if weight is not None else None
        state, why = _state(report, target, weight, outcomes.get(name), standing)
        rows.append(
            QueueRow(
                name, depth, queue, parts.get(name, 0.0), used_part(report.window, name),
                due.gpus if due is not None else None,
                due.allocated if due is not None else standing.allocated if standing is not None else None,
                due.requested if due is not None else standing.requested if standing is not None else None,
                weight.value if weight is not None else standing.weight if standing is not None else None,
                None if owed is None else max(0.0, owed), name in target.exhausted, state, why,
            )
        )  # fmt: skip
    window = report.window
    unassigned = window.unassigned / window.capacity if window is not None and window.capacity > 0 else None
    return TargetView(
        target.target, target.mode, target.gpus, tuple(rows), target.conditions, target.degraded, unassigned
    )


def _state(
    report: CycleReport,
    target: TargetReport,
    weight: Weight | None,
    outcome: WriteOutcome | None,
    standing: Standing | None,
) -> tuple[State, str]:
    if report.hold is not None:
        return "held", f"{report.hold.reason}: {report.hold.message}"
    if standing is None:
        return "none", "the target has no object for this queue"
    if outcome is not None and outcome.result in _TROUBLE:
        return "trouble", outcome.detail or outcome.result
    why = weight.why if weight is not None else "; ".join(target.degraded.values()) or "nothing is published for it"
    if outcome is not None and outcome.result == "would-apply":
        return "tried", why
    if outcome is not None:
        return "published", why
    return "steady", why


def owned(policy: Policy, teams: Collection[str]) -> frozenset[str]:
    """Return the queues that, with all queues below them, belong to these teams."""
    tree = PolicyTree(policy)
    theirs = {name for name in tree.queues if tree.team(name) in teams}
    return frozenset(name for name in tree.queues if tree.family(name) <= theirs)


def part(target: TargetView, queues: Collection[str]) -> TargetView:
    """Return a target with only these queues, and without texts that can name other queues."""
    rows = [replace(row, why="") for row in target.rows if row.name in queues]
    top = min((row.depth for row in rows), default=0)
    rows = [replace(row, depth=row.depth - top) for row in rows]
    return replace(target, rows=tuple(rows), conditions=(), degraded={}, unassigned=None)


def own_account(account: QueueAccount) -> QueueAccount:
    """Return a queue's explanation without the figures and sentences about other queues."""
    return replace(
        account,
        levels=(account.own,),
        published=replace(account.published, obstacles=()),
        sentences=account.sentences[:1],
        cures=(),
    )


MOST_SHOWN = 200
DAYS = (1, 7, 31)
KINDS = ("weight", "preemption", "hold", "policy")


def shares(request: RequestContext) -> Response:
    """Answer `/shares?queue=&weight=`: the queue tree at every target, also with another weight of one queue."""
    snapshot = request.context.reports.now()
    if snapshot is None:
        return request.page("waiting.html", "/shares")
    own = _own(request, snapshot.policy)
    views = _targets(snapshot, own)
    top = max([0.05, *(max(row.used or 0.0, row.entitled) for target in views for row in target.rows)])
    name, weight = request.parameter("queue")[:300], request.parameter("weight")[:30]
    tried: dict[str, dict[str, TriedQueue]] = {}
    wrong = ""
    if weight and own is None:  # the others' entitlements would tell a team their weights
        try:
            tried = {
                view.name: {row.queue: row for row in try_weight(snapshot.policy, view.gpus, name, float(weight))}
                for view in [view for view in views if view.gpus > 0] or views
            }
        except (ValueError, FairshareError) as error:
            wrong = str(error) if isinstance(error, FairshareError) else f"weight: {weight!r} is not a number"
    given = {"queue": name, "weight": weight}
    return request.page(
        "shares.html", "/shares", order=_sorting(request, "/shares", given), sort=request.parameter("sort"),
        targets=views, top=min(1.0, top * 1.08), window=_window(snapshot.policy),
        names=[each.name for _, each in PolicyTree(snapshot.policy).downwards()], wanted=name, weight=weight,
        tried=tried, wrong=wrong, conclusion=lambda rows: of_weight(list(rows)),
        named={
            view.name: max(
                (row for row in view.rows if row.used is not None), key=lambda row: row.used or 0.0, default=None
            )
            for view in views
        },
    )  # fmt: skip


def shares_file(request: RequestContext) -> Response:
    """Answer `/shares/shares.csv`: the queues of every target in the order of the page, with exact figures."""
    snapshot = request.app.snapshot()
    order = _sorting(request, "/shares", {})
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["target", "queue", "team", "used_part", "entitled_part", "guaranteed_gpus", "due_gpus", "held_gpus",
         "asked_gpus", "owed_gpu_hours", "configured_weight", "weight", "state"]
    )  # fmt: skip
    tree = PolicyTree(snapshot.policy)
    for target in _targets(snapshot, _own(request, snapshot.policy)):
        for row in order.rows("shares", target.rows):
            deserved = "unlimited" if row.queue.deserved == UNLIMITED else row.queue.deserved
            figures = (row.used, row.entitled if target.gpus else None, deserved, row.due, row.held, row.asked,
                       row.owed_gpu_h, row.queue.weight, row.weight)  # fmt: skip
            writer.writerow(
                [target.name, for_cell(row.name), for_cell(tree.team(row.name) or ""),
                 *("" if one is None else one for one in figures), row.word]
            )  # fmt: skip
    headers = {"Content-Disposition": 'attachment; filename="gputally-shares.csv"', "Cache-Control": "no-store"}
    return Response(text.getvalue(), media_type="text/csv; charset=utf-8", headers=headers)


def queue(request: RequestContext) -> Response:
    """Answer `/queue/NAME`: the queue's share over time, its weights with their reasons, and decisions about it."""
    snapshot = request.app.snapshot()
    policy, report, name = snapshot.policy, snapshot.report, request.rest
    own = _own(request, policy)
    if name not in (PolicyTree(policy).queues if own is None else own):
        owner = "the policy in force has" if own is None else "your teams have"
        raise PageRefusal(404, "No such queue", f"{owner} no queue {name[:200]!r}")
    hours = min(policy.window.size // 3600, queue_history.MOST_HOURS) or 1
    end_ms = request.context.clock.wall_ms() // MS_PER_HOUR * MS_PER_HOUR
    start_ms = end_ms - hours * MS_PER_HOUR
    # The reason for a preemption names the other workload, so teams see only the weights of their own queues.
    kind = "" if own is None else "weight"
    past, missing = _recent_decisions(request, start_ms, 20, name, kind)
    held: list[tuple[float, float]] = []
    try:
        held = request.context.history.held(policy, name, hours) if not missing else []
    except AccountantUnavailable as error:
        missing = str(error)
    panels = []
    for target in _targets(snapshot, own):
        row = next(row for row in target.rows if row.name == name)
        samples = request.context.reports.samples(target.name, name)
        entitled = row.entitled * target.gpus
        lines = [
            PlotLine("held", "held, by the ledger", held, area=True, steps=True),
            PlotLine("due", "due in each cycle", [(each.at_ms, each.due) for each in samples], steps=True),
            PlotLine(
                "entitled", "entitled if all request", [(start_ms, entitled), (end_ms, entitled)] if target.gpus else []
            ),
        ]
        weights = [(float(each.at_ms), each.weight) for each in samples if each.weight is not None]
        weight_plot = ""
        if len(weights) > 1:
            title, line = f"{name} at {target.name}: weight", PlotLine("due", "weight", weights, steps=True)
            weight_plot = svg_plots.over_time(title, [line], start_ms, end_ms, "", height=150)
        plot = svg_plots.over_time(f"{name} at {target.name}: GPUs", lines, start_ms, end_ms)
        panels.append({"target": target, "row": row, "plot": plot, "weights": weight_plot})
    accounts = explain_queue(policy, report, name, past=past)
    if own is not None:
        accounts = tuple(map(own_account, accounts))
        past = [each.model_copy(update={"reason": ""}) for each in past]
    return request.page(
        "queue.html", "/shares", name=name, panels=panels, missing=missing, decisions=past,
        accounts={account.target: account for account in accounts}, window=_window(policy),
        team=PolicyTree(policy).team(name), unit=report.window.unit if report.window is not None else "",
    )  # fmt: skip


def decisions(request: RequestContext) -> Response:
    """Answer `/decisions?queue=&kind=&days=`: decisions, newest first."""
    days = next((each for each in DAYS if str(each) == request.parameter("days")), 7)
    kind = request.parameter("kind") if request.parameter("kind") in KINDS else ""
    queue_name = request.parameter("queue")[:300]
    start_ms = request.context.clock.wall_ms() - days * MS_PER_DAY
    newest, missing = _recent_decisions(request, start_ms, MOST_SHOWN, queue_name, kind)
    snapshot = request.context.reports.now()
    names = [each.name for _, each in PolicyTree(snapshot.policy).downwards()] if snapshot is not None else []
    return request.page(
        "decisions.html", "/shares", decisions=newest, missing=missing, most=MOST_SHOWN, days=days, kind=kind,
        wanted=queue_name, names=names, every_days=DAYS, kinds=KINDS,
    )  # fmt: skip


def decision(request: RequestContext) -> Response:
    """Answer `/decision?id=&at=`: every input of a decision, and its arithmetic in words."""
    id, at = request.parameter("id")[:500], request.parameter("at")
    if not at.isascii() or not at.isdigit() or len(at) > 15:
        raise PageRefusal(404, "No such decision", "the address needs the decision's time in milliseconds as `at`")
    missing, change = "", None
    try:
        one, same_cycle = request.context.history.decision(id, int(at))
        change = request.context.history.causes(one, same_cycle) if one is not None else None
    except AccountantUnavailable as error:
        missing = str(error)
        same_cycle = tuple(each for each in request.context.reports.decisions() if each.at_ms == int(at))
        one = next((each for each in same_cycle if each.id == id), None)
    if one is None:
        raise PageRefusal(
            404, "No such decision", missing or "the accountant has no decision with this id at this time"
        )
    told = decision_text.decision_text(with_change(one, change), same_cycle)
    if change is not None and one.value is not None:
        told = replace(told, grids=(change_table(change, one.value), *told.grids))
    return request.page("decision.html", "/shares", one=one, told=told, address=_address)


def _recent_decisions(
    request: RequestContext, start_ms: int, most: int, queue: str, kind: str
) -> tuple[list[Decision], str]:
    """Return the newest decisions, and "". If the accountant does not answer, return this process's own decisions, and
    the error."""
    end_ms = request.context.clock.wall_ms() + 1
    try:
        return request.context.history.decisions(start_ms, end_ms, most, queue, kind), ""
    except AccountantUnavailable as error:
        return queue_history.shown_decisions(request.context.reports.decisions(), most, queue, kind), str(error)


def _sorting(request: RequestContext, path: str, given: Mapping[str, str]) -> TableSorting:
    """The order of the page's tables. given: the other parameters of its address. Raises PageRefusal."""
    try:
        return TABLES.sorting(request.parameter("sort")[:100], path, **given)
    except ValueError as error:
        raise PageRefusal(422, "No such order", f"sort: {error}") from error


def _own(request: RequestContext, policy: Policy) -> frozenset[str] | None:
    """Return the queues that the caller may see; None: all queues."""
    return None if request.caller.teams is None else owned(policy, request.caller.teams)


def _targets(snapshot: LastCycle, own: frozenset[str] | None) -> tuple[TargetView, ...]:
    views = targets(snapshot.policy, snapshot.report)
    return views if own is None else tuple(part(view, own) for view in views)


def _address(one: Decision) -> str:
    return link("/shares/decision", id=one.id, at=str(one.at_ms))


def _window(policy: Policy) -> str:
    """Return the policy's window in words."""
    window = policy.window
    words = f"{window.kind}, {duration_text(window.size)}" if window.kind in ("sliding", "tumbling") else window.kind
    if window.cron is not None:
        words += f" {window.cron}"
    return words + (f", half-life {duration_text(window.half_life)}" if window.half_life is not None else "")
