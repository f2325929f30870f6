"""Renders divisions, plans, writes, adoptions and preemptions as tables for the terminal or as records.

Tables show rounded numbers. Records contain the exact numbers. Preemptions have records only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from math import fsum
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from fairshare.controller.cycle_report import CycleReport, TargetReport, WriteOutcome
from fairshare.controller.weight_writer import Adoption
from fairshare.core.queues_and_weights import UNLIMITED, Division, DivisionProblem, DivisionRound, FleetWindow, Value
from fairshare.preemption.preemption_cycle import PreemptionReport
from fairshare.usage.stale_usage_hold import USAGE_FRESH
from gputally.base.instants import utc_text
from gputally.base.terminal import figures as right_aligned
from gputally.base.terminal import table

MOST_NODES = 4
"""Largest number of nodes with lost GPUs that are named."""
MOST_INDENT = 12
"""Number of indented levels of the tree; deeper levels would leave no room for the names."""
_RESULT_STYLE = {"applied": "green", "would-apply": "cyan"}


HISTORY = ("fair share", "used", "with history")
HISTORY_MEANS = (
    "fair share: of the configured weights of the queues that compete; used: of what the window had for it and its "
    "siblings; with history: what the law makes of both"
)


def ratio(value: float) -> str:
    """Format a part of a whole (1 is all of it) in percent."""
    return f"{value:.1%}"


def number(value: Value | None, digits: int = 3) -> str:
    """Format a number with at most `digits` decimals, without trailing zeros: `unset` for None, `unlimited` for -1. A
    text stays unchanged."""
    if isinstance(value, str):
        return value
    if value is None:
        return "unset"
    if value == UNLIMITED:
        return "unlimited"
    return f"{value:,.{digits}f}".rstrip("0").rstrip(".") if value % 1 else f"{value:,.0f}"


def division_table(case: DivisionProblem, division: Division) -> RenderableType:
    """Render the shares of one case; children are indented under their parents."""
    k = number(case.k)
    figures = ("priority", "deserved", "weight", "used", "asks", "limit", "share", "of total")
    title = f"{case.name}   {number(case.total)} {case.resource}, weight of the past {k}"
    table = titled_table(title, ("queue",), figures, may_drop=("priority", "limit"))
    table.caption = f"deserved, asks, limit, share: {case.resource}; used: of what the window had for it"
    tree = case.function == "hierarchy"
    claims = {claim.name: claim for claim in case.claims}
    for depth, name in _in_tree({name: claim.parent if tree else None for name, claim in claims.items()}):
        claim = claims[name]
        share = division.shares[claim.name]
        table.add_row(
            indented(depth, claim.name),
            str(claim.priority),
            number(claim.deserved),
            number(claim.weight),
            ratio(claim.usage),
            number(claim.request),
            number(claim.limit),
            number(share),
            f"{share / case.total:.1%}" if case.total else "",
        )
    roots = [claim.name for claim in case.claims if not tree or claim.parent is None]
    given = fsum(division.shares[name] for name in roots)
    table.add_section()
    table.add_row("given", *[""] * 6, number(given), f"{given / case.total:.1%}" if case.total else "")
    table.add_row("left over", *[""] * 6, number(division.remaining), "")
    return table


def steps_table(case: DivisionProblem, division: Division) -> RenderableType:
    """Render every round of the over-quota phase with its numbers, then the remainders."""
    tables: list[RenderableType] = []
    rest = titled_table(f"\nRemainders, {case.resource}", ("of", "queue"), ("given", "rest"))
    for step in division.steps:
        of = f"{step.parent or 'roots'}, priority {step.priority}"
        if not isinstance(step, DivisionRound):
            rest.add_row(of, step.queue, number(step.given, 6), number(step.fraction, 6))
            continue
        title = f"\n{of}, round {step.number}: {number(step.pool, 6)} {case.resource} to divide"
        drawn = titled_table(title, ("queue",), (*HISTORY, "offered", "given", "rest"))
        for offer in step.offers:
            drawn.add_row(
                offer.queue,
                *(ratio(value) for value in (offer.n, offer.usage, offer.p)),
                *(number(value, 6) for value in (offer.offered, offer.given, offer.fraction)),
            )
        drawn.caption = f"with history adds up to {ratio(step.sum_p)}; offered, given, rest: {case.resource}"
        tables.append(drawn)
    return Group(*tables, *([rest] if rest.row_count else []), *([Text(HISTORY_MEANS, "dim")] if tables else []))


def lost_words(lost: Mapping[str, float]) -> str:
    """Describe the lost GPUs, which are not part of the capacity: ` without 3 lost on n1 (2), n2 (1)`; "" for none.

    lost: the number of lost GPUs by node."""
    if not lost:
        return ""
    nodes = [f"{node} ({number(count, 1)})" for node, count in sorted(lost.items())]
    more = f" and {len(nodes) - MOST_NODES} more nodes" if len(nodes) > MOST_NODES else ""
    return f" without {number(fsum(lost.values()), 1)} lost on {', '.join(nodes[:MOST_NODES])}{more}"


def plan_table(target: TargetReport) -> RenderableType:
    """Render every weight of a target with its inputs, and below the table the reasons and failed writes."""
    outcomes = {outcome.apply.queue: outcome for outcome in target.outcomes}
    due = {entitlement.queue: entitlement for entitlement in target.entitlements}
    title = f"{target.target}, {target.mode}, {number(target.gpus, 1)} GPUs{lost_words(target.lost)}"
    figures = ("configured", *HISTORY, "now", "new", "asks", "holds", "due")
    table = titled_table(title, ("queue",), figures, ("result",), may_drop=("configured", *HISTORY[::-1]))
    table.caption = f"configured, now, new: weights; {HISTORY_MEANS}; asks, holds, due: GPUs"
    weights = {weight.queue: weight for weight in target.weights}
    parents = {name: parent if (parent := due[name].parent) in weights else None for name in weights}
    for depth, name in _in_tree(parents):
        weight, entitlement, outcome = weights[name], due[name], outcomes.get(name)
        numbers = weight.explanation
        table.add_row(
            indented(depth, name),
            number(weight.configured, 4),
            ratio(numbers.n),
            ratio(numbers.u),
            ratio(numbers.p),
            number(weight.previous, 4),
            number(weight.value, 4),
            number(entitlement.requested, 1),
            number(entitlement.allocated, 1),
            number(entitlement.gpus, 1),
            Text(outcome.result, _RESULT_STYLE.get(outcome.result, "red")) if outcome else Text("as it is", "dim"),
        )
    roots = [due[name] for name, parent in parents.items() if parent is None]
    sums = (number(fsum(getattr(each, key) for each in roots), 1) for key in ("requested", "allocated", "gpus"))
    table.add_section()
    table.add_row("total", *[""] * 6, *sums)
    failures = [Text(f"{o.apply.queue}: {o.detail}", "red") for o in target.outcomes if o.detail]
    reasons = [Text(f"{name}: {weights[name].why}") for _, name in _in_tree(parents) if weights[name].why]
    return Group(table, *reasons, *failures)


def report_view(report: CycleReport) -> RenderableType:
    """Render a whole cycle: usage, the weights of each target, and conditions that need action."""
    parts: list[RenderableType] = []
    window = report.window
    if window is not None:
        hours = (window.end_ms - window.start_ms) / 3_600_000
        life = f", half-life {window.half_life_s / 3600:g} h" if window.half_life_s else ""
        span = f"{window.measure} over {hours:g} h ({window.kind}{life})"
        of = f" of {', '.join(window.clusters)}" if isinstance(window, FleetWindow) else ""
        parts.append(
            Text(f"{span}{of}, {window.coverage:.1%} metered; policy {report.policy_version}; {utc_text(report.at_ms)}")
        )
    if report.hold is not None:
        parts.append(Text(f"HOLD {report.hold.reason}: {report.hold.message}; the last good weights stay", "bold red"))
    else:
        parts += [plan_table(target) for target in report.targets if target.weights]
    for scope, condition in report.scoped_conditions():
        notable = condition.status == "False" or (condition.status, condition.type) == ("Unknown", "Effective")
        if notable and condition.type != USAGE_FRESH:  # a hold has already been shown
            what = f"{scope + ' ' if scope else ''}{condition.type}={condition.status} {condition.reason}"
            parts.append(Text(f"{what}: {condition.message}", "yellow"))
            if condition.remedy:
                parts.append(Text(f"  {condition.remedy}"))
    return Group(*parts)


def outcomes_table(outcomes: Sequence[WriteOutcome]) -> RenderableType:
    """Render the writes that restored base weights."""
    table = titled_table("", ("target", "queue", "object"), ("now", "new"), ("result",), "why")
    for outcome in outcomes:
        apply = outcome.apply
        table.add_row(
            apply.target, apply.queue, apply.name, number(apply.previous, 4), number(apply.value, 4),
            Text(outcome.result, _RESULT_STYLE.get(outcome.result, "red")), outcome.detail or apply.why,
        )  # fmt: skip
    return table


def adoptions_table(adoptions: Sequence[Adoption]) -> RenderableType:
    """Render the fields that were taken over, with their former owners."""
    table = titled_table("", ("target", "queue", "object", "field", "owned by", "result"), folded="why")
    for each in adoptions:
        table.add_row(
            each.target, each.queue, f"{each.kind} {each.name}", each.field, ", ".join(each.owners),
            Text(each.result, _RESULT_STYLE.get(each.result, "red")), each.detail,
        )  # fmt: skip
    return table


def division_json(case: DivisionProblem, division: Division, *, explain: bool) -> dict[str, Any]:
    """Return name, shares and remaining units of a division; with `explain` also its rounds and remainders."""
    answer: dict[str, Any] = {"name": case.name, "shares": dict(division.shares), "remaining": division.remaining}
    if explain:
        answer["deserved"] = dict(division.deserved)
        answer["rounds"] = [
            {
                "parent": step.parent,
                "priority": step.priority,
                "round": step.number,
                "pool": step.pool,
                "S": step.sum_p,
                "remaining": step.remaining,
                "queues": [
                    {
                        "queue": offer.queue,
                        "n": offer.n,
                        "U": offer.usage,
                        "P": offer.p,
                        "fs": offer.offered,
                        "given": offer.given,
                        "fraction": offer.fraction,
                    }
                    for offer in step.offers
                ],
            }
            for step in division.steps
            if isinstance(step, DivisionRound)
        ]
        answer["remainders"] = [
            {"parent": s.parent, "priority": s.priority, "queue": s.queue, "fraction": s.fraction, "given": s.given}
            for s in division.steps
            if not isinstance(s, DivisionRound)
        ]
    return answer


def indented(depth: int, name: str) -> str:
    """Return a queue's name, indented by its depth in the tree."""
    return "  " * min(depth, MOST_INDENT) + name


def _in_tree(parents: Mapping[str, str | None]) -> Iterator[tuple[int, str]]:
    """Yield (depth, name) of every queue, children after their parents, siblings by name. parents: the parent of each
    queue; None for a root."""
    children: dict[str | None, list[str]] = {}
    for name in sorted(parents, reverse=True):
        children.setdefault(parents[name], []).append(name)
    pending = [(0, name) for name in children.get(None, [])]
    while pending:
        depth, name = pending.pop()
        yield depth, name
        pending += [(depth + 1, child) for child in children.get(name, [])]


def titled_table(
    title: str,
    names: Sequence[str],
    figures: Sequence[str] = (),
    more: Sequence[str] = (),
    folded: str = "",
    *,
    may_drop: Sequence[str] = (),
) -> Table:
    """Return an empty table.

    names, figures, more: the headings in this order. Columns of figures are right-aligned.
    folded: the heading of a last column whose texts wrap; "" for none.
    may_drop: the headings of columns that a narrow terminal does not show, the first one first."""
    last = [Column(folded, overflow="fold")] if folded else []
    return table(Text(title, "bold"), [*names, *right_aligned(*figures), *more, *last], may_drop=may_drop)


def plan_document(report: CycleReport) -> dict[str, Any]:
    """Return a whole cycle as a document."""
    return {
        "schema": 1,
        "at_ms": report.at_ms,
        "policy_version": report.policy_version,
        "window": report.window.model_dump(mode="json") if report.window is not None else None,
        "hold": asdict(report.hold) if report.hold is not None else None,
        "conditions": [{"target": scope, **asdict(each)} for scope, each in report.scoped_conditions()],
        "targets": [
            {
                "target": target.target,
                "mode": target.mode,
                "gpus": target.gpus,
                "lost": dict(target.lost),
                "degraded": dict(target.degraded),
                "weights": list(_weights(target)),
            }
            for target in report.targets
        ],
    }


def plan_records(report: CycleReport) -> Iterator[dict[str, Any]]:
    """Yield a record for each weight of each target."""
    for target in report.targets:
        for each in _weights(target):
            yield {"target": target.target, "mode": target.mode, **each}


def _weights(target: TargetReport) -> Iterator[dict[str, Any]]:
    due = {each.queue: each for each in target.entitlements}
    outcomes = {each.apply.queue: each for each in target.outcomes}
    for weight in sorted(target.weights, key=lambda weight: weight.queue):
        entitlement, outcome = due[weight.queue], outcomes.get(weight.queue)
        yield {
            "queue": weight.queue,
            "configured": weight.configured,
            "previous": weight.previous,
            "value": weight.value,
            "usage": weight.explanation.u,
            "requested": entitlement.requested,
            "allocated": entitlement.allocated,
            "due": entitlement.gpus,
            "result": outcome.result if outcome is not None else None,
            "detail": outcome.detail if outcome is not None else "",
            "why": weight.why,
        }


def outcome_record(outcome: WriteOutcome) -> dict[str, Any]:
    """Return a write of a weight as a record, without the patch that was sent."""
    apply = outcome.apply
    return {
        "target": apply.target, "queue": apply.queue, "object": apply.name, "previous": apply.previous,
        "value": apply.value, "result": outcome.result, "detail": outcome.detail, "why": apply.why,
    }  # fmt: skip


def adoption_record(adoption: Adoption) -> dict[str, Any]:
    """Return a field that was taken over from another manager as a record."""
    return {
        "target": adoption.target, "queue": adoption.queue, "kind": adoption.kind, "object": adoption.name,
        "field": adoption.field, "owners": list(adoption.owners), "result": adoption.result, "detail": adoption.detail,
    }  # fmt: skip


def shares(divided: Sequence[tuple[DivisionProblem, Division]]) -> Iterator[dict[str, Any]]:
    """Yield a record for each queue of each case."""
    for case, division in divided:
        for name, share in division.shares.items():
            yield {"case": case.name, "queue": name, "share": share}


def preemption(report: PreemptionReport) -> list[dict[str, Any]]:
    """Return a record for each verdict, with its victims and the spared workloads."""
    return [
        {
            "claimant": verdict.claimant,
            "queue": verdict.queue,
            "outcome": verdict.outcome,
            "reason": verdict.reason,
            "gives_way": [stop for stop in stops(report) if stop["claimant"] == verdict.claimant],
            "stays": [{"workload": each.key, "queue": each.queue, "why": each.reason} for each in verdict.spared],
        }
        for verdict in report.verdicts
    ]


def stops(report: PreemptionReport) -> Iterator[dict[str, Any]]:
    """Yield a record for each victim."""
    for stop in report.stops:
        gang = stop.victim.gang
        yield {
            "claimant": stop.claimant, "workload": gang.key,
            "queue": gang.queue, "gpus": stop.victim.gpus, "lost_gpu_hours": stop.victim.lost_gpu_hours,
            "result": stop.effect.result, "why": f"{stop.victim.reason} {stop.effect.detail}".strip(),
        }  # fmt: skip
