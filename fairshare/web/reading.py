"""Pages that are only read: shares now, one queue, decisions, one decision. What they must not do: change anything."""

from __future__ import annotations

from accountant.web import reasons
from accountant.wire import Decision, Policy
from agent.units import MS_PER_DAY, MS_PER_HOUR
from fairshare.errors import AccountantUnavailable
from fairshare.explain.explaining import explain_queue
from fairshare.targets import ADAPTERS
from fairshare.web import history, plots, teams, views
from fairshare.web.field import written
from fairshare.web.http import Answer, Refusal
from fairshare.web.plots import Line
from fairshare.web.scene import Snapshot
from fairshare.web.site import Visit, link
from fairshare.web.views import TargetView

MOST_SHOWN = 200
DAYS = (1, 7, 31)
KINDS = ("weight", "preemption", "hold")


def shares(visit: Visit) -> Answer:
    """`/`: every queue in its tree, at every target."""
    snapshot = visit.house.scene.now()
    if snapshot is None:
        return visit.page("waiting.html", "/")
    found = _targets(snapshot, _own(visit, snapshot.policy))
    top = max([0.05, *(max(row.used or 0.0, row.entitled) for target in found for row in target.rows)])
    return visit.page("shares.html", "/", targets=found, top=min(1.0, top * 1.08), window=_window(snapshot.policy))


def queue(visit: Visit) -> Answer:
    """`/queue/NAME`: its share over time, its weights and why, what was decided about it."""
    snapshot = visit.site.snapshot()
    policy, report = snapshot.policy, snapshot.report
    known = next((each for each in policy.queues if each.name == visit.rest), None)
    own = _own(visit, policy)
    if known is None or (own is not None and visit.rest not in own):
        where = "the policy in force has" if own is None else "your teams have"
        raise Refusal(404, "No such queue", f"{where} no queue {visit.rest[:200]!r}")
    hours = min(policy.window.size // 3600, history.MOST_HOURS) or 1
    end_ms = visit.house.clock.wall_ms() // MS_PER_HOUR * MS_PER_HOUR
    start_ms = end_ms - hours * MS_PER_HOUR
    missing = ""
    held: list[tuple[float, float]] = []
    decided: list[Decision] = []
    try:
        held = visit.house.history.held(policy, visit.rest, hours)
        # Why somebody was stopped names who came instead: of their own queues teams see the weights alone.
        kind = "" if own is None else "weight"
        decided = visit.house.history.decisions(start_ms, visit.house.clock.wall_ms() + 1, 20, visit.rest, kind)
    except AccountantUnavailable as error:
        missing = str(error)
        decided = [
            each
            for each in visit.house.scene.decisions()
            if history.concerns(each, visit.rest) and (own is None or each.kind == "weight")
        ][:20]
    places = []
    for target in _targets(snapshot, own):
        row = next(row for row in target.rows if row.name == visit.rest)
        samples = visit.house.scene.samples(target.name, visit.rest)
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
                "plot": plots.over_time(f"{visit.rest} at {target.name}: GPUs", lines, start_ms, end_ms),
                "weights": plots.over_time(title, of_weight, start_ms, end_ms, "", height=150) if weights[1:] else "",
            }
        )
    accounts = explain_queue(policy, report, visit.rest, modes=_modes(policy), past=decided)
    if own is not None:
        accounts = tuple(map(teams.own_account, accounts))
        decided = [each.model_copy(update={"reason": ""}) for each in decided]
    return visit.page(
        "queue.html", "/", name=visit.rest, queue=known, places=places, missing=missing, decisions=decided,
        accounts={account.target: account for account in accounts}, window=_window(policy), hours=hours,
    )  # fmt: skip


def decisions(visit: Visit) -> Answer:
    """`/decisions?queue=&kind=&days=`: newest first."""
    asked_days = visit.request.asked("days", "7")
    days = int(asked_days) if asked_days.isascii() and asked_days.isdigit() and int(asked_days) in DAYS else 7
    kind = visit.request.asked("kind") if visit.request.asked("kind") in KINDS else ""
    wanted = visit.request.asked("queue")[:300]
    now_ms = visit.house.clock.wall_ms()
    missing = ""
    try:
        found = visit.house.history.decisions(now_ms - days * MS_PER_DAY, now_ms + 1, MOST_SHOWN, wanted, kind)
    except AccountantUnavailable as error:
        missing = str(error)
        found = [
            each
            for each in visit.house.scene.decisions()
            if (each.subject != "*" or each.kind == "hold")
            and (not kind or each.kind == kind)
            and (not wanted or history.concerns(each, wanted))
        ][:MOST_SHOWN]
    snapshot = visit.house.scene.now()
    names = [each.name for _, each in views.ordered(snapshot.policy)] if snapshot is not None else []
    return visit.page(
        "decisions.html", "/decisions", decisions=found, missing=missing, most=MOST_SHOWN, days=days, kind=kind,
        wanted=wanted, names=names, every_days=DAYS, kinds=KINDS,
    )  # fmt: skip


def decision(visit: Visit) -> Answer:
    """`/decision?id=&at=`: every input, and the arithmetic in words."""
    id, at = visit.request.asked("id")[:500], visit.request.asked("at")
    if not at.isascii() or not at.isdigit() or len(at) > 15:
        raise Refusal(404, "No such decision", "its address says no time")
    missing = ""
    try:
        one, same = visit.house.history.decision(id, int(at))
    except AccountantUnavailable as error:
        missing = str(error)
        same = tuple(each for each in visit.house.scene.decisions() if each.at_ms == int(at))
        one = next((each for each in same if each.id == id), None)
    if one is None:
        raise Refusal(404, "No such decision", missing or "the accountant has no decision of that name at that time")
    return visit.page("decision.html", "/decisions", one=one, told=reasons.told(one, same), address=_address)


def _own(visit: Visit, policy: Policy) -> frozenset[str] | None:
    """Queues that the caller sees; None: all."""
    return None if visit.caller.teams is None else teams.owned(policy, visit.caller.teams)


def _targets(snapshot: Snapshot, own: frozenset[str] | None) -> tuple[TargetView, ...]:
    found = views.targets(snapshot.policy, snapshot.report)
    return found if own is None else tuple(teams.part(target, own) for target in found)


def _address(one: Decision) -> str:
    return link("/decision", id=one.id, at=str(one.at_ms))


def _modes(policy: Policy) -> dict[str, str]:
    return {adapter.name: adapter.mode(policy) for adapter in ADAPTERS}


def _window(policy: Policy) -> str:
    """The window in words."""
    window = policy.window
    words = f"{window.kind}, {written(window.size)}" if window.kind in ("sliding", "tumbling") else window.kind
    if window.cron is not None:
        words += f" {window.cron}"
    return words + (f", half-life {written(window.half_life)}" if window.half_life is not None else "")
