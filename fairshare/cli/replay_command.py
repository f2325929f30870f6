"""Runs `replay`: computes past decisions again from their record and reports every number that differs.

A cycle's record holds all its inputs except the policy, which is found by its version. The inputs are the arguments of
`weight_decisions`, or the inputs of its preemptions. A number differs only if this release computes it differently, or
if the record was changed or is incomplete. The command says which, as far as the record shows it. The outcome of a
write or for a victim is not a decision, and is not computed again."""

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
from fairshare.controller.cycle_report import EVERYTHING, INPUTS, plain, with_change
from fairshare.explain.plan_tables import titled_table
from fairshare.laws.weight_calculation import WeightResult
from fairshare.laws.weight_change_causes import WeightChange
from fairshare.preemption import preemption_types, target_preemption
from fairshare.preemption.preemption_types import Verdict
from gputally.base.command_line import show, with_option_groups
from gputally.base.errors import FairshareError
from gputally.base.units import MS_PER_DAY, MS_PER_MINUTE, MS_PER_SECOND


@dataclass(frozen=True, slots=True)
class Difference:
    """One number of a decision: as recorded and as recomputed; in a CycleReplay only numbers that differ."""

    decision: str
    number: str
    recorded: object
    recomputed: object


@dataclass(frozen=True, slots=True)
class CycleReplay:
    """One cycle of one target. compared: how many numbers were compared. fault: why it cannot be computed at all.
    reason: the explanation of the differences, as far as known."""

    cycle: Decision
    compared: int
    differences: tuple[Difference, ...]
    fault: str = ""
    reason: str = ""


def recount(decisions: Sequence[Decision], policies: Mapping[str, Policy], release: str) -> tuple[CycleReplay, ...]:
    """Recompute every cycle whose record is among `decisions`, oldest first, with the weights that refer to it.
    policies: by version. release: the running version of gputally."""
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
    cycle: Decision, made: Iterable[Decision], policies: Mapping[str, Policy], release: str
) -> CycleReplay:
    policy = policies.get(cycle.policy_version)
    if policy is None:
        return CycleReplay(cycle, 0, (), f"policy {cycle.policy_version} is not among the accountant's versions")
    try:
        if cycle.kind == "weight":
            numbers = _weights(cycle, made, cycle_report.replay_weights(policy, cycle))
        else:
            numbers = _preemptions(cycle, made, target_preemption.replay_verdicts(policy, cycle))
    except (ValueError, TypeError, KeyError, ArithmeticError) as error:
        return CycleReplay(cycle, 0, (), f"the record cannot be read: {error}")
    compared = tuple(numbers)
    differences = tuple(number for number in compared if number.recorded != number.recomputed)
    return CycleReplay(cycle, len(compared), differences, reason=_reason(cycle, release) if differences else "")


def _preemptions(cycle: Decision, made: Iterable[Decision], verdicts: Sequence[Verdict]) -> Iterator[Difference]:
    """Compare every recorded verdict of the cycle and every victim with the recomputed ones; yields equal ones too."""
    expected = dict(_expected(cycle, verdicts))
    for decision in made:
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
            {"value": verdict.gpus, "reason": verdict.reason, "verdict": preemption_types.show(verdict)},
        )
        for m, victim in enumerate(verdict.victims):
            said = {"value": victim.gpus, "reason": victim.reason, "claimant": verdict.claimant}
            yield f"{cycle.id}/{n}/{m}", said | target_preemption.victim_record(victim)


def _weights(cycle: Decision, weights: Iterable[Decision], weighing: WeightResult) -> Iterator[Difference]:
    """Compare every number of the weights, and each queue's share; yields equal ones too."""
    for decision in weights:
        for number, recorded, recomputed in _numbers(decision, weighing):
            yield Difference(decision.id, number, recorded, recomputed)
    recorded_due: Any = cycle.inputs.get("due", {})
    for entitlement in weighing.entitlements if recorded_due else ():
        found = recorded_due.get(entitlement.queue)
        yield Difference(cycle.id, f"due.{entitlement.queue}", found, entitlement.gpus)


def _numbers(decision: Decision, weighing: WeightResult) -> Iterator[tuple[str, object, object]]:
    """(name, recorded, recomputed) of the weight and of every step towards it."""
    weight = next((w for w in weighing.weights if w.queue == decision.subject), None)
    yield "value", decision.value, weight.value if weight is not None else None
    if weight is None:
        return
    yield "previous", decision.previous, weight.previous
    change: Any = decision.inputs.get("change")
    since = None if change is None else WeightChange(**change)
    yield "reason", decision.reason, with_change(weight.why, since, weight)
    recorded: Any = decision.inputs.get("explanation", {})
    fresh = plain(asdict(weight.explanation))
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
    wanted = INPUTS if cycle.kind == "weight" else target_preemption.INPUTS
    missing = sorted(wanted - cycle.inputs.keys())
    if missing:
        return f"the record holds no {', '.join(missing)}: it was made by a release that did not record them"
    made_by = cycle.inputs.get("release")
    if made_by != release:
        return f"decided by release {made_by}, computed again by {release}: the arithmetic may be another one"
    return "same release and all inputs: the record was changed, or this computer adds up otherwise"


MOST_SHOWN = 50
"""Number of differences that are printed; JSON contains all."""
_DECISION = re.compile(r"[0-9a-f]{16}/(\d{1,15})/.+")


class ReplayError(FairshareError):
    """There is nothing to replay for the given argument."""


@with_option_groups
def replay(
    when: Annotated[str, typer.Argument(metavar="DATE|DECISION", help="2026-11-21, 2026-11-21T10:00Z, or an id.")],
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
    chosen = [d for d in found if wanted in (None, d.id, d.inputs.get("cycle")) or d.id == _cycle_of(found, wanted)]
    counts = recount(chosen, policies, version("gputally"))
    if not counts:
        raise ReplayError(f"{when}: {_nothing(found, wanted)}")
    document = [_plain(count) for count in counts]
    show(output, lambda: _view(counts), document)
    if any(count.fault or count.differences for count in counts):
        raise typer.Exit(1)


def _span(when: str) -> tuple[int, int, str | None]:
    """Return (start, end, the decision's id if it is one). Raises ReplayError."""
    if found := _DECISION.fullmatch(when):
        at = int(found[1])
        return at, at + 1, when
    try:
        at_time = datetime.fromisoformat(when)
    except ValueError as error:
        raise ReplayError(f"{when}: neither a date (2026-11-21, 2026-11-21T10:00Z) nor a decision's id") from error
    start_ms = _ms(at_time if at_time.tzinfo is not None else at_time.replace(tzinfo=UTC))
    return start_ms, start_ms + (MS_PER_DAY if "T" not in when and " " not in when else MS_PER_MINUTE), None


def _ms(at: datetime) -> int:
    return round(at.timestamp() * MS_PER_SECOND)


def _cycle_of(found: Sequence[Decision], wanted: str) -> object:
    return next((d.inputs.get("cycle") for d in found if d.id == wanted), None)


def _nothing(found: Sequence[Decision], wanted: str | None) -> str:
    other = next((d for d in found if d.id == wanted), None)
    if other is not None:
        return f"a decision of kind {other.kind} holds no cycle's inputs: {other.reason}"
    return "no such decision" if wanted else "nothing was decided then"


def _view(counts: Sequence[CycleReplay]) -> RenderableType:
    table = titled_table("", ("cycle", "target", "decided", "policy"), ("numbers", "differ"), folded="result")
    for count in counts:
        told = count.fault or count.reason or "the same, bit for bit"
        bad = bool(count.fault or count.differences)
        at = datetime.fromtimestamp(count.cycle.at_ms / MS_PER_SECOND, UTC).isoformat(timespec="milliseconds")
        table.add_row(
            at.replace("+00:00", "Z"), count.cycle.target, f"{count.cycle.kind}s", count.cycle.policy_version,
            f"{count.compared:,}", f"{len(count.differences):,}", Text(told, "red" if bad else ""),
        )  # fmt: skip
    table.add_section()
    differ = sum(len(count.differences) for count in counts)
    numbers = sum(count.compared for count in counts)
    table.add_row(f"{len(counts):,} cycles", "", "", "", f"{numbers:,}", f"{differ:,}", "")
    lines = [
        f"{d.decision}: {d.number}: recorded {d.recorded!r}, computed {d.recomputed!r}"
        for count in counts
        for d in count.differences
    ]
    if len(lines) > MOST_SHOWN:
        lines = [*lines[:MOST_SHOWN], f"and {len(lines) - MOST_SHOWN:,} more; --output json shows all"]
    return Group(table, *(Text(line, overflow="fold") for line in lines))


def _plain(count: CycleReplay) -> dict[str, object]:
    return {
        "cycle": count.cycle.id,
        "at_ms": count.cycle.at_ms,
        "target": count.cycle.target,
        "kind": count.cycle.kind,
        "policy_version": count.cycle.policy_version,
        "compared": count.compared,
        "fault": count.fault,
        "reason": count.reason,
        "differences": [asdict(difference) for difference in count.differences],
    }
