"""Carry out planned writes one by one, and say what became of them.

Each stands on its own: one that is contested or refused does not hold up the others. Once the API server
does not answer, the rest is not tried; what is over the limit of one cycle waits for the next, the largest
changes first, or those that others build on. A lost lease ends everything at once: the new leader may be writing
already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fairshare.errors import ClusterError, Conflict, NotFound, Refused, Unavailable
from fairshare.kube.mapping import say
from fairshare.kube.ports import Objects
from fairshare.model import Condition, Observation
from fairshare.plan import Apply, same, show
from fairshare.report import Outcome, Result

MOST_WRITES = 500
"""Writes of one target in one cycle."""
MOST_WRITES_AT: Mapping[str, int] = {"runai": 60}
"""Fewer where every write is two requests to somebody else's service."""
WELL: frozenset[Result] = frozenset({"applied", "would-apply", "deferred"})
_RESULTS: dict[type[ClusterError], Result] = {
    Conflict: "contested",
    Refused: "refused",
    NotFound: "gone",
    Unavailable: "unavailable",
}
_REASONS: dict[Result, str] = {"contested": "Contested", "refused": "Refused", "gone": "NotFound"}


def carry_out(
    cluster: Objects,
    applies: Sequence[Apply],
    *,
    dry_run: bool,
    leading: Callable[[], bool] = lambda: True,
    most: int = MOST_WRITES,
) -> tuple[Outcome, ...]:
    """In the order of `applies`; only which of them are deferred goes by size."""
    now = set(sorted(range(len(applies)), key=lambda i: (applies[i].order, -_size(applies[i]), i))[:most])
    outcomes: list[Outcome] = []
    silent = False
    for i, apply in enumerate(applies):
        if silent:
            outcomes.append(Outcome(apply, "unavailable", "not tried: the API server does not answer"))
        elif i not in now:
            outcomes.append(Outcome(apply, "deferred", f"more than {most} writes in one cycle: the next one goes on"))
        elif not leading():
            outcomes.append(Outcome(apply, "deferred", "no longer the leader"))
        else:
            outcomes.append(_one(cluster, apply, dry_run))
            silent = outcomes[-1].result == "unavailable"
    return tuple(outcomes)


def _size(apply: Apply) -> float:
    """Relative change; a first value and a text count as large."""
    old, new = apply.previous, apply.value
    if not isinstance(old, int | float) or not isinstance(new, int | float) or not old:
        return float("inf")
    return abs(new - old) / old


def _one(cluster: Objects, apply: Apply, dry_run: bool) -> Outcome:
    try:
        cluster.apply(apply.patch, field_manager=apply.field_manager, dry_run=dry_run)
    except ClusterError as error:
        result: Result = next((name for kind, name in _RESULTS.items() if isinstance(error, kind)), "refused")
        return Outcome(apply, result, str(error))
    return Outcome(apply, "would-apply" if dry_run else "applied")


def available(outcomes: Sequence[Outcome]) -> Condition:
    """Whether the target takes our writes."""
    failed = [outcome for outcome in outcomes if outcome.result not in WELL]
    if failed:
        first = failed[0].result
        text = say([outcome.detail for outcome in failed])
        contested = [outcome.apply for outcome in failed if outcome.result == "contested"]
        advice = _advice(contested) if first == "contested" else ""
        return Condition("Available", "False", _REASONS.get(first, "Unavailable"), text + advice)
    return Condition("Available", "True", "Writable", "the target takes our weights")


def _advice(contested: Sequence[Apply]) -> str:
    """How the owner of a field lets go of it."""
    filled_in = [each for each in contested if each.default is not None and same(each.previous, each.default)]
    if len(filled_in) < len(contested):
        return (
            "; leave the weight out of that manager's manifest, or take it over with `gputally fairshare adopt`:"
            " a field has one owner"
        )
    return (
        f"; {show(filled_in[0].default)} is the default of the CRD, which the API server books to the creator of an"
        " object that states none: if the manifest has no weight, nothing is to be left out of it. Take the field over"
        " with `gputally fairshare adopt`"
    )


def judged(conditions: Sequence[Condition], outcomes: Sequence[Outcome]) -> tuple[Condition, ...]:
    """The adapter's conditions, with `Effective` turned where a field is not ours: its weight cannot act."""
    contested = sorted({outcome.apply.name for outcome in outcomes if outcome.result == "contested"})
    if not contested:
        return tuple(conditions)
    text = f"somebody else owns the field on {say(contested)}: our weight is not what stands there"
    return tuple(
        Condition("Effective", "False", "FieldNotOurs", text)
        if condition.type == "Effective" and condition.status != "False"
        else condition
        for condition in conditions
    )


def reasons(observation: Observation, outcomes: Sequence[Outcome]) -> Mapping[str, str]:
    """Why a target is degraded: reason to messages."""
    found: dict[str, list[str]] = {}
    for condition in observation.conditions:
        if condition.type in ("Effective", "Readable") and condition.status == "False":
            found.setdefault(condition.reason, []).append(condition.message)
    for outcome in outcomes:
        if outcome.result not in WELL:
            found.setdefault(outcome.result, []).append(outcome.detail)
    return {reason: say(texts) for reason, texts in sorted(found.items())}
