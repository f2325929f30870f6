"""Serves the pages of shares, queues and decisions, reduced to a caller's teams.

The numbers come from the cycle (`fairshare.controller.cycle_report`).

A queue belongs to the team that it or the nearest queue above it names, as in the accountant's books. A caller who sees
only some teams sees a queue only if all queues below it belong to these teams too, because its figures contain theirs.
Sentences of the cycle that could name siblings, parents and waiting workloads are left out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from starlette.responses import Response

from accountant.wire import decision_text
from accountant.wire.policy_models import Decision, Policy, QueuePolicy, UsageWindow
from fairshare.controller.cycle_report import CycleReport, Outcome, TargetReport
from fairshare.core.queue_tree import PolicyTree
from fairshare.core.queues_and_weights import UNLIMITED, Condition, Standing, Weight
from fairshare.explain.queue_explanation import QueueAccount, explain_queue
from fairshare.laws.weight_calculation import static_parts
from fairshare.targets import ADAPTERS
from fairshare.web import queue_history, svg_plots
from fairshare.web.page_authentication import Refusal
from fairshare.web.page_routing import RequestContext, link
from fairshare.web.policy_form import written
from fairshare.web.queue_history import Snapshot
from fairshare.web.svg_plots import Line
from gputally.base.errors import AccountantUnavailable
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR

State = Literal["published", "steady", "tried", "held", "trouble", "none"]
"""The state of a queue's weight: written, within its deadband (so not written), only tried (dry-run), held for all
queues, refused by the cluster, or without an object."""
_TROUBLE = frozenset({"contested", "refused", "gone", "unavailable", "deferred"})
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
    """One queue.

    entitled: its part by quotas and weights if all request, as a part of the cluster (0..1).
    used: the part of the window's capacity that it and the queues below it used; None without a window.
    due, held, asked: GPUs now, None if the target has no weights.
    owed_gpu_h, repaid_ms: what the deficit law owes it, and when it is repaid at the present rate; None if it is owed
        nothing.
    state, why: of its weight."""

    name: str
    depth: int
    queue: QueuePolicy
    entitled: float
    used: float | None
    due: float | None
    held: float | None
    asked: float | None
    configured: float
    weight: float | None
    previous: float | None
    owed_gpu_h: float | None
    repaid_ms: int | None
    exhausted: bool
    state: State
    why: str

    @property
    def word(self) -> str:
        return _WORDS[self.state]

    @property
    def limit(self) -> float | None:
        return None if self.queue.limit == UNLIMITED else self.queue.limit


@dataclass(frozen=True, slots=True)
class TargetView:
    """One target. unassigned: part of the window's capacity that belongs to no queue of the policy."""

    name: str
    mode: str
    gpus: float
    rows: tuple[QueueRow, ...]
    conditions: tuple[Condition, ...]
    degraded: Mapping[str, str]
    unassigned: float | None


def targets(policy: Policy, report: CycleReport) -> tuple[TargetView, ...]:
    """In the order of the report. Of a target that knows no GPUs, entitlements are parts of nothing: 0."""
    return tuple(_target(policy, report, target) for target in report.targets)


def used_part(window: UsageWindow | None, queue: str) -> float | None:
    """Return the part of the window's capacity used by the queue and those below it; None if unknown."""
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
        owed, until = _owed(weight, report.at_ms)
        state, why = _state(report, target, weight, outcomes.get(name), standing)
        rows.append(
            QueueRow(
                name, depth, queue, parts.get(name, 0.0), used_part(report.window, name),
                due.gpus if due is not None else None,
                due.allocated if due is not None else standing.allocated if standing is not None else None,
                due.requested if due is not None else standing.requested if standing is not None else None,
                queue.weight, weight.value if weight is not None else standing.weight if standing is not None else None,
                standing.weight if standing is not None else None, owed, until, name in target.exhausted, state, why,
            )
        )  # fmt: skip
    window = report.window
    unassigned = window.unassigned / window.capacity if window is not None and window.capacity > 0 else None
    return TargetView(
        target.target, target.mode, target.gpus, tuple(rows), target.conditions, target.degraded, unassigned
    )


def _owed(weight: Weight | None, at_ms: int) -> tuple[float | None, int | None]:
    """Return GPU-hours, and when they are repaid at the present rate (`fairshare.laws.deficit_law`)."""
    trace = weight.explanation.trace if weight is not None else {}
    owed, rate = trace.get("owed_gpu_h"), trace.get("rate_gpus", 0.0)
    if owed is None or owed <= 0:
        return None, None
    return owed, at_ms + round(owed / rate * MS_PER_HOUR) if rate > 0 else None


def _state(
    report: CycleReport,
    target: TargetReport,
    weight: Weight | None,
    outcome: Outcome | None,
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
    """Return queues that belong to these teams together with all queues below them."""
    tree = PolicyTree(policy)
    theirs = {name for name in tree.queues if tree.team(name) in teams}
    return frozenset(name for name in tree.queues if tree.family(name) <= theirs)


def part(target: TargetView, queues: Collection[str]) -> TargetView:
    """Return a target with only these queues."""
    rows = [replace(row, why="") for row in target.rows if row.name in queues]
    top = min((row.depth for row in rows), default=0)
    rows = [replace(row, depth=row.depth - top) for row in rows]
    return replace(target, rows=tuple(rows), conditions=(), degraded={}, unassigned=None)


def own_account(account: QueueAccount) -> QueueAccount:
    """Return a queue's account without data of other queues: its own level, its standing, its waiting work."""
    return replace(
        account,
        levels=(account.own,),
        published=replace(account.published, obstacles=()),
        sentences=account.sentences[:1],
        cures=(),
    )


MOST_SHOWN = 200
DAYS = (1, 7, 31)
KINDS = ("weight", "preemption", "hold")


def shares(visit: RequestContext) -> Response:
    """`/`: every queue in its tree, at every target."""
    snapshot = visit.context.scene.now()
    if snapshot is None:
        return visit.page("waiting.html", "/")
    found = _targets(snapshot, _own(visit, snapshot.policy))
    top = max([0.05, *(max(row.used or 0.0, row.entitled) for target in found for row in target.rows)])
    return visit.page("shares.html", "/", targets=found, top=min(1.0, top * 1.08), window=_window(snapshot.policy))


def queue(visit: RequestContext) -> Response:
    """`/queue/NAME`: its share over time, its weights with their reasons, decisions about it."""
    snapshot = visit.site.snapshot()
    policy, report = snapshot.policy, snapshot.report
    known = next((each for each in policy.queues if each.name == visit.rest), None)
    own = _own(visit, policy)
    if known is None or (own is not None and visit.rest not in own):
        where = "the policy in force has" if own is None else "your teams have"
        raise Refusal(404, "No such queue", f"{where} no queue {visit.rest[:200]!r}")
    hours = min(policy.window.size // 3600, queue_history.MOST_HOURS) or 1
    end_ms = visit.context.clock.wall_ms() // MS_PER_HOUR * MS_PER_HOUR
    start_ms = end_ms - hours * MS_PER_HOUR
    # The reason for a preemption names the other workload, so teams see only the weights of their own queues.
    kind = "" if own is None else "weight"
    decided, missing = _recent_decisions(visit, start_ms, 20, visit.rest, kind)
    held: list[tuple[float, float]] = []
    try:
        held = visit.context.history.held(policy, visit.rest, hours) if not missing else []
    except AccountantUnavailable as error:
        missing = str(error)
    places = []
    for target in _targets(snapshot, own):
        row = next(row for row in target.rows if row.name == visit.rest)
        samples = visit.context.scene.samples(target.name, visit.rest)
        flat = row.entitled * target.gpus
        lines = [
            Line("held", "held, by the books", held, area=True, steps=True),
            Line("due", "due, cycle by cycle", [(each.at_ms, each.due) for each in samples], steps=True),
            Line("entitled", "entitled, while all ask", [(start_ms, flat), (end_ms, flat)] if target.gpus else []),
        ]
        weights = [(float(each.at_ms), each.weight) for each in samples if each.weight is not None]
        of_weight = [Line("due", "weight", weights, steps=True)]
        title = f"{visit.rest} at {target.name}: weight"
        places.append(
            {
                "target": target,
                "row": row,
                "plot": svg_plots.over_time(f"{visit.rest} at {target.name}: GPUs", lines, start_ms, end_ms),
                "weights": svg_plots.over_time(title, of_weight, start_ms, end_ms, "", height=150)
                if weights[1:]
                else "",
            }
        )
    accounts = explain_queue(policy, report, visit.rest, modes=_modes(policy), past=decided)
    if own is not None:
        accounts = tuple(map(own_account, accounts))
        decided = [each.model_copy(update={"reason": ""}) for each in decided]
    return visit.page(
        "queue.html", "/", name=visit.rest, queue=known, places=places, missing=missing, decisions=decided,
        accounts={account.target: account for account in accounts}, window=_window(policy), hours=hours,
    )  # fmt: skip


def decisions(visit: RequestContext) -> Response:
    """`/decisions?queue=&kind=&days=`: newest first."""
    asked_days = visit.asked("days", "7")
    days = int(asked_days) if asked_days.isascii() and asked_days.isdigit() and int(asked_days) in DAYS else 7
    kind = visit.asked("kind") if visit.asked("kind") in KINDS else ""
    wanted = visit.asked("queue")[:300]
    start_ms = visit.context.clock.wall_ms() - days * MS_PER_DAY
    found, missing = _recent_decisions(visit, start_ms, MOST_SHOWN, wanted, kind)
    snapshot = visit.context.scene.now()
    names = [each.name for _, each in PolicyTree(snapshot.policy).downwards()] if snapshot is not None else []
    return visit.page(
        "decisions.html", "/decisions", decisions=found, missing=missing, most=MOST_SHOWN, days=days, kind=kind,
        wanted=wanted, names=names, every_days=DAYS, kinds=KINDS,
    )  # fmt: skip


def decision(visit: RequestContext) -> Response:
    """`/decision?id=&at=`: every input, and the arithmetic in words."""
    id, at = visit.asked("id")[:500], visit.asked("at")
    if not at.isascii() or not at.isdigit() or len(at) > 15:
        raise Refusal(404, "No such decision", "the address contains no time of a decision")
    missing = ""
    try:
        one, same = visit.context.history.decision(id, int(at))
    except AccountantUnavailable as error:
        missing = str(error)
        same = tuple(each for each in visit.context.scene.decisions() if each.at_ms == int(at))
        one = next((each for each in same if each.id == id), None)
    if one is None:
        raise Refusal(404, "No such decision", missing or "the accountant has no decision of that name at that time")
    return visit.page(
        "decision.html", "/decisions", one=one, told=decision_text.decision_text(one, same), address=_address
    )


def _recent_decisions(
    visit: RequestContext, start_ms: int, most: int, queue: str, kind: str
) -> tuple[list[Decision], str]:
    """Return decisions, newest first, and the reason if they are only this process's own because the accountant does
    not answer ("" if it answers)."""
    end_ms = visit.context.clock.wall_ms() + 1
    try:
        return visit.context.history.decisions(start_ms, end_ms, most, queue, kind), ""
    except AccountantUnavailable as error:
        return queue_history.shown_decisions(visit.context.scene.decisions(), most, queue, kind), str(error)


def _own(visit: RequestContext, policy: Policy) -> frozenset[str] | None:
    """Return the queues that the caller sees; None for all."""
    return None if visit.caller.teams is None else owned(policy, visit.caller.teams)


def _targets(snapshot: Snapshot, own: frozenset[str] | None) -> tuple[TargetView, ...]:
    found = targets(snapshot.policy, snapshot.report)
    return found if own is None else tuple(part(target, own) for target in found)


def _address(one: Decision) -> str:
    return link("/decision", id=one.id, at=str(one.at_ms))


def _modes(policy: Policy) -> dict[str, str]:
    return {adapter.name: adapter.mode(policy) for adapter in ADAPTERS}


def _window(policy: Policy) -> str:
    """Describe the window in words."""
    window = policy.window
    words = f"{window.kind}, {written(window.size)}" if window.kind in ("sliding", "tumbling") else window.kind
    if window.cron is not None:
        words += f" {window.cron}"
    return words + (f", half-life {written(window.half_life)}" if window.half_life is not None else "")
