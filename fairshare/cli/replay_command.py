"""Runs `replay`: computes past decisions again from their records, and reports every number that differs.

The record of a cycle holds all inputs of its weights or preemptions except the policy, which the accountant has by its
version. A number differs only if this release computes it differently, or if the record was changed or is incomplete.
The command names the cause, as far as the record shows it. The result of a write or of an eviction is not a decision,
and the command does not compute it again."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from accountant.wire.policy_models import Decision, Policy
from fairshare.cli.command_options import AccountantOptions, Printed
from fairshare.controller import cycle_report
from fairshare.controller.cycle_report import EVERYTHING, INPUTS, plain
from fairshare.core.scheduler_queue_objects import instant
from fairshare.explain.plan_tables import titled_table
from fairshare.laws.weight_calculation import WeightResult
from fairshare.preemption import preemption_cycle, preemption_types
from fairshare.preemption.preemption_types import Verdict
from gputally.base.command_output import show, with_option_groups
from gputally.base.errors import FairshareError
from gputally.base.units import MS_PER_DAY, MS_PER_MINUTE, MS_PER_SECOND


@dataclass(frozen=True, slots=True)
class Difference:
    """One number of a decision, as recorded and as recomputed. A CycleReplay has only numbers that differ."""

    decision: str
    number: str
    recorded: object
    recomputed: object


@dataclass(frozen=True, slots=True)
class CycleReplay:
    """The replay of one cycle of one target.

    compared: the number of compared numbers.
    fault: the reason why the cycle cannot be computed again, "" if it can.
    reason: the cause of the differences, as far as known."""

    cycle: Decision
    compared: int
    differences: tuple[Difference, ...]
    fault: str = ""
    reason: str = ""


def recount(decisions: Sequence[Decision], policies: Mapping[str, Policy], release: str) -> tuple[CycleReplay, ...]:
    """Return the replay of every cycle whose record is among `decisions`, oldest first. A replay also compares the
    decisions that refer to the cycle.

    policies: the policies by version.
    release: the running version of gputally."""
    of_cycle: dict[str, list[Decision]] = {}
    for decision in decisions:
        if isinstance(cycle := decision.inputs.get("cycle"), str):
            of_cycle.setdefault(cycle, []).append(decision)
    cycles = [d for d in decisions if d.kind in ("weight", "preemption") and d.subject == EVERYTHING]
    return tuple(
        _replay_cycle(cycle, sorted(of_cycle.get(cycle.id, []), key=lambda d: (d.subject, d.id)), policies, release)
        for cycle in sorted(cycles, key=lambda d: (d.at_ms, d.id))
    )


def _replay_cycle(
    cycle: Decision, decisions: Iterable[Decision], policies: Mapping[str, Policy], release: str
) -> CycleReplay:
    policy = policies.get(cycle.policy_version)
    if policy is None:
        return CycleReplay(cycle, 0, (), f"the accountant has no version {cycle.policy_version} of the policy")
    try:
        if cycle.kind == "weight":
            numbers = _weights(cycle, decisions, cycle_report.replay_weights(policy, cycle))
        else:
            numbers = _preemptions(cycle, decisions, preemption_cycle.replay_verdicts(policy, cycle))
    except (ValueError, TypeError, KeyError, ArithmeticError) as error:
        return CycleReplay(cycle, 0, (), f"the record cannot be read: {error}")
    compared = tuple(numbers)
    differences = tuple(number for number in compared if number.recorded != number.recomputed)
    return CycleReplay(cycle, len(compared), differences, reason=_reason(cycle, release) if differences else "")


def _preemptions(cycle: Decision, decisions: Iterable[Decision], verdicts: Sequence[Verdict]) -> Iterator[Difference]:
    """Yield every number of the cycle's verdicts and victims, as recorded and as recomputed."""
    expected = dict(_expected(cycle, verdicts))
    for decision in decisions:
        recorded = {"value": decision.value, "reason": decision.reason, **decision.inputs}
        fresh = expected.get(decision.id)
        if fresh is None:
            yield Difference(decision.id, "decision", decision.reason, None)
            continue
        for name, value in fresh.items():
            for number, before, now in _leaves(name, recorded.get(name), value):
                yield Difference(decision.id, number, before, now)


def _expected(cycle: Decision, verdicts: Sequence[Verdict]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the expected content of each record, by the id of its decision."""
    for n, verdict in enumerate(verdicts):
        yield (
            f"{cycle.id}/{n}",
            {"value": verdict.gpus, "reason": verdict.reason, "verdict": preemption_types.verdict_to_json(verdict)},
        )
        for m, victim in enumerate(verdict.victims):
            content = {"value": victim.gpus, "reason": victim.reason, "claimant": verdict.claimant}
            yield f"{cycle.id}/{n}/{m}", content | preemption_cycle.victim_record(victim)


def _weights(cycle: Decision, weights: Iterable[Decision], weighing: WeightResult) -> Iterator[Difference]:
    """Yield every number of the weights, and each queue's share, as recorded and as recomputed."""
    for decision in weights:
        for number, recorded, recomputed in _numbers(decision, weighing):
            yield Difference(decision.id, number, recorded, recomputed)
    recorded_due: Any = cycle.inputs.get("due", {})
    for entitlement in weighing.entitlements if recorded_due else ():
        recorded_gpus = recorded_due.get(entitlement.queue)
        yield Difference(cycle.id, f"due.{entitlement.queue}", recorded_gpus, entitlement.gpus)


def _numbers(decision: Decision, weighing: WeightResult) -> Iterator[tuple[str, object, object]]:
    """Yield (name, recorded, recomputed) of the weight and of every step of its computation."""
    weight = next((w for w in weighing.weights if w.queue == decision.subject), None)
    yield "value", decision.value, weight.value if weight is not None else None
    if weight is None:
        return
    yield "previous", decision.previous, weight.previous
    yield "reason", decision.reason, weight.why
    recorded: Any = decision.inputs.get("explanation", {})
    fresh = plain(weight.explanation)
    yield from _leaves("", recorded, fresh)


def _leaves(path: str, recorded: object, fresh: object) -> Iterator[tuple[str, object, object]]:
    if isinstance(recorded, list) and isinstance(fresh, list) and len(recorded) == len(fresh):
        for i, (one, other) in enumerate(zip(recorded, fresh, strict=True)):
            yield from _leaves(f"{path}.{i}", one, other)
    elif isinstance(recorded, Mapping) and isinstance(fresh, Mapping):
        for key in dict.fromkeys([*recorded, *fresh]):
            yield from _leaves(f"{path}.{key}".lstrip("."), recorded.get(key), fresh.get(key))
    else:
        yield path, recorded, fresh


def _reason(cycle: Decision, release: str) -> str:
    wanted = INPUTS if cycle.kind == "weight" else preemption_cycle.INPUTS
    missing = sorted(wanted - cycle.inputs.keys())
    if missing:
        return f"the record has no {', '.join(missing)}: an older release wrote it"
    recorded_release = cycle.inputs.get("release")
    if recorded_release != release:
        return f"release {recorded_release} decided, and {release} computes again: their arithmetic can differ"
    return "release and inputs are the same: the record was changed, or this computer adds up differently"


MOST_SHOWN = 50
"""The number of differences that a table shows. JSON has all of them."""
_DECISION = re.compile(r"[0-9a-f]{16}/(\d{1,15})/.+")


@with_option_groups
def replay(
    when: Annotated[
        str,
        typer.Argument(
            metavar="DATE|DECISION", help="Day (2026-11-21), minute (2026-11-21T10:00Z), or a decision's id."
        ),
    ],
    output: Printed = "table",
    *,
    at: AccountantOptions,
) -> None:
    """Compute past weights and preemptions again from their recorded inputs; exit 1 if any result differs.

    A date means a day, a time a minute, in UTC unless a zone is given."""
    start_ms, end_ms, wanted = _span(when)
    with at.client() as client:
        found = list(client.decisions(start_ms, end_ms))
        policies = {each.version: each.policy for each in client.policies()}
    one = next((d for d in found if d.id == wanted), None)
    cycle = one.inputs.get("cycle") if one is not None else None
    chosen = [d for d in found if wanted in (None, d.id, d.inputs.get("cycle")) or d.id == cycle]
    replays = recount(chosen, policies, version("gputally"))
    if not replays:
        reason = "the accountant has no such decision" if wanted else "the controller decided nothing in this time"
        if one is not None:
            reason = f"a decision of kind {one.kind} has no record of a cycle's inputs: {one.reason}"
        raise FairshareError(f"{when}: {reason}")
    show(output, lambda: _view(replays), [_plain(each) for each in replays])
    if any(each.fault or each.differences for each in replays):
        raise typer.Exit(1)


def _span(when: str) -> tuple[int, int, str | None]:
    """Return the start and the end of the time that `when` names, and `when` itself for a decision's id, else None.

    Raises FairshareError for text that is neither a date nor a decision's id."""
    if match := _DECISION.fullmatch(when):
        at_ms = int(match[1])
        return at_ms, at_ms + 1, when
    try:
        at_time = datetime.fromisoformat(when)
    except ValueError as error:
        raise FairshareError(
            f"{when}: neither a date such as 2026-11-21 or 2026-11-21T10:00Z, nor a decision's id"
        ) from error
    at_time = at_time if at_time.tzinfo is not None else at_time.replace(tzinfo=UTC)
    start_ms = round(at_time.timestamp() * MS_PER_SECOND)
    return start_ms, start_ms + (MS_PER_DAY if "T" not in when and " " not in when else MS_PER_MINUTE), None


def _view(replays: Sequence[CycleReplay]) -> RenderableType:
    table = titled_table("", ("cycle", "target", "decided", "policy"), ("numbers", "differ"), folded="result")
    for each in replays:
        result = each.fault or each.reason or "the same, bit for bit"
        bad = bool(each.fault or each.differences)
        table.add_row(
            instant(each.cycle.at_ms), each.cycle.target, f"{each.cycle.kind}s", each.cycle.policy_version,
            f"{each.compared:,}", f"{len(each.differences):,}", Text(result, "red" if bad else ""),
        )  # fmt: skip
    table.add_section()
    differ = sum(len(each.differences) for each in replays)
    numbers = sum(each.compared for each in replays)
    table.add_row(f"{len(replays):,} cycles", "", "", "", f"{numbers:,}", f"{differ:,}", "")
    lines = [
        f"{d.decision}: {d.number}: recorded {d.recorded!r}, computed {d.recomputed!r}"
        for each in replays
        for d in each.differences
    ]
    if len(lines) > MOST_SHOWN:
        lines = [*lines[:MOST_SHOWN], f"and {len(lines) - MOST_SHOWN:,} more; --output json shows all"]
    return Group(table, *(Text(line, overflow="fold") for line in lines))


def _plain(replay: CycleReplay) -> dict[str, object]:
    cycle = replay.cycle
    return {
        "cycle": cycle.id,
        **{name: getattr(cycle, name) for name in ("at_ms", "target", "kind", "policy_version")},
        **{name: getattr(replay, name) for name in ("compared", "fault", "reason")},
        "differences": [asdict(difference) for difference in replay.differences],
    }
