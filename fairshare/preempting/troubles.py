"""What kept preemption from doing what it is for, as one condition of a target and as counts. Pure.

Somebody who waits although the policy would let others give way is told here why: the API server or a webhook
refuses, disruption budgets hold everybody who could go, or a limit of the policy is reached. Whom a rule itself
spares is no trouble. The same in a dry run, where only evictions are not tried.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from fairshare.kube.mapping import say
from fairshare.model import Condition
from fairshare.preempting.effectors import Done
from fairshare.preempting.limits import Limit
from fairshare.preempting.preempter import PreemptionReport
from fairshare.preempting.victims import key_of

Trouble = Literal[
    "Refused", "Unavailable", "LostWorkLimitReached", "RateLimitReached", "HeldByBudgets", "WarningNotWritten"
]
"""In the order of who has to look first; the condition carries the first one as its reason."""
TROUBLES: Final[tuple[Trouble, ...]] = (
    "Refused", "Unavailable", "LostWorkLimitReached", "RateLimitReached", "HeldByBudgets", "WarningNotWritten",
)  # fmt: skip
CONDITION = "Preemption"
_OF_LIMIT: Mapping[Limit, Trouble] = {
    "per-team": "RateLimitReached", "per-cluster": "RateLimitReached", "lost-hours": "LostWorkLimitReached",
}  # fmt: skip
_OF_EFFECT: Mapping[Done, Trouble] = {
    "refused": "Refused", "unavailable": "Unavailable", "blocked": "HeldByBudgets",
}  # fmt: skip


def troubles(report: PreemptionReport) -> dict[Trouble, tuple[str, ...]]:
    """Sentences by trouble, in the order of `TROUBLES`; empty where all went as decided."""
    found: dict[Trouble, list[str]] = {trouble: [] for trouble in TROUBLES}
    for stop in report.stops:
        trouble = _OF_EFFECT.get(stop.effect.cause or stop.effect.result)
        if trouble is not None:
            found[trouble].append(f"{key_of(stop.victim.gang)}: {stop.effect.detail}")
    for verdict in report.verdicts:
        for spared in verdict.spared if verdict.outcome == "denied" else ():
            veto = report.vetoes.get(spared.key)
            if spared.limit is not None and spared.limit in _OF_LIMIT:
                found[_OF_LIMIT[spared.limit]].append(f"{spared.key}: {spared.reason}")
            elif veto is not None and veto.kind != "changed":
                found["Refused" if veto.kind == "refused" else "HeldByBudgets"].append(f"{spared.key}: {veto.reason}")
    found["WarningNotWritten"] += report.faults
    return {trouble: tuple(dict.fromkeys(texts)) for trouble, texts in found.items() if texts}


def condition(report: PreemptionReport) -> Condition:
    """`Preemption`: True where whoever was to go has gone (or would have, in a dry run)."""
    found = troubles(report)
    if not found:
        return Condition(CONDITION, "True", "AsDecided", f"mode {report.mode}: nothing stands in the way")
    words = [f"{trouble}: {say(texts, most=3)}" for trouble, texts in found.items()]
    return Condition(CONDITION, "False", next(iter(found)), "; ".join(words))


def failed(error: Exception) -> Condition:
    """Where nothing could be decided at all."""
    return Condition(CONDITION, "False", "Unavailable", str(error))
