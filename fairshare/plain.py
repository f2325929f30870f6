"""Plans and outcomes as plain values for programs, every number unrounded. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from fairshare.model import Case, Division
from fairshare.preempting.preempter import PreemptionReport
from fairshare.publishing.adopt import Adoption
from fairshare.report import CycleReport, Outcome, TargetReport


def plan_document(report: CycleReport) -> dict[str, Any]:
    """A whole cycle."""
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
    """One weight a line."""
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


def outcome(each: Outcome) -> dict[str, Any]:
    """One write, without its patch."""
    apply = each.apply
    return {
        "target": apply.target, "queue": apply.queue, "object": apply.name, "previous": apply.previous,
        "value": apply.value, "result": each.result, "detail": each.detail, "why": apply.why,
    }  # fmt: skip


def adoption(each: Adoption) -> dict[str, Any]:
    """One field that was taken over."""
    return {
        "target": each.target, "queue": each.queue, "kind": each.kind, "object": each.name, "field": each.field,
        "owners": list(each.owners), "result": each.result, "detail": each.detail,
    }  # fmt: skip


def shares(divided: Sequence[tuple[Case, Division]]) -> Iterator[dict[str, Any]]:
    """One queue of a case a line."""
    for case, division in divided:
        for name, share in division.shares.items():
            yield {"case": case.name, "queue": name, "share": share}


def preemption(report: PreemptionReport) -> list[dict[str, Any]]:
    """One verdict each, with who gives way and who stays."""
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
    """One workload that gives way a line."""
    for stop in report.stops:
        gang = stop.victim.gang
        yield {
            "claimant": stop.claimant, "workload": f"{gang.kind.kind}/{gang.namespace}/{gang.name}",
            "queue": gang.queue, "gpus": stop.victim.gpus, "lost_gpu_hours": stop.victim.lost_gpu_hours,
            "result": stop.effect.result, "why": f"{stop.victim.reason} {stop.effect.detail}".strip(),
        }  # fmt: skip
