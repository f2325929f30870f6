"""A decision step by step, in words: every number that it was made from, in the order in which it was used. Pure.

Reads what the record holds (`fairshare.report.weight_decisions`, `fairshare.preempter.decisions`), of any release: what
a record does not say is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from accountant.figures import percent
from accountant.wire import Decision
from agent.units import US_PER_HOUR
from fairshare.tables import number


@dataclass(frozen=True, slots=True)
class Step:
    """what: the number's name. figure: as it is written. words: where it comes from."""

    what: str
    figure: str
    words: str


@dataclass(frozen=True, slots=True)
class Gone:
    """Work that gave way, or (stays) was looked at and left alone. gpus None: not said."""

    workload: str
    queue: str
    gpus: float | None
    lost_gpu_hours: float | None
    ground: str
    reason: str


def steps(decision: Decision, cycle: Decision | None) -> tuple[Step, ...]:
    """From usage to weight. cycle: the record of the cycle's inputs, where it is known."""
    told: Any = decision.inputs.get("explanation")
    return tuple(_steps(told, cycle)) if isinstance(told, Mapping) else ()


def trace(decision: Decision) -> tuple[tuple[str, str], ...]:
    """The law's own numbers, in the order in which it came to them."""
    told: Any = decision.inputs.get("explanation")
    numbers = told.get("trace") if isinstance(told, Mapping) else None
    return tuple((str(key), _figure(value)) for key, value in numbers.items()) if isinstance(numbers, Mapping) else ()


def publication(decision: Decision) -> tuple[tuple[str, str], ...]:
    """What became of it at the target."""
    known = (("object", "Object"), ("published", "Written"), ("result", "Outcome"), ("detail", "The cluster's words"))
    return tuple((label, str(decision.inputs[key])) for key, label in known if decision.inputs.get(key))


def victims(decision: Decision) -> tuple[Gone, ...]:
    """Who gives way by a verdict, or by the record of one victim."""
    if "ground" in decision.inputs:
        said: Any = decision.inputs
        return (
            Gone(
                decision.subject,
                _text(said, "queue"),
                decision.value,
                said.get("lost_gpu_hours"),
                _text(said, "ground"),
                decision.reason,
            ),
        )
    return tuple(
        Gone(
            _workload(each.get("gang")),
            _text(each.get("gang") or {}, "queue"),
            each.get("gpus"),
            each.get("lost_gpu_hours"),
            _text(each, "ground"),
            _text(each, "reason"),
        )
        for each in _of_verdict(decision, "victims")
    )


def spared(decision: Decision) -> tuple[Gone, ...]:
    """Who was looked at and stays, and why."""
    return tuple(
        Gone(_text(each, "key"), _text(each, "queue"), None, None, "stays", _text(each, "reason"))
        for each in _of_verdict(decision, "spared")
    )


def _steps(told: Mapping[str, Any], cycle: Decision | None) -> Iterator[Step]:
    window: Any = (cycle.inputs if cycle is not None else {}).get("window") or {}
    used, capacity = _amount(told.get("usage"), window.get("unit")), _amount(told.get("capacity"), window.get("unit"))
    yield Step(
        "Used, U", percent(told.get("u"), 2),
        f"{used} of the {capacity} that were its siblings' together over the window",
    )  # fmt: skip
    rivals = "who ask for more than their quota" if told.get("competes") else "if every sibling asked: it does not now"
    yield Step(
        "Weight's part, n",
        percent(told.get("n"), 2),
        f"its configured weight {number(told.get('configured'))} among those {rivals}",
    )
    n, u, k = told.get("n"), told.get("u"), told.get("k")
    if told.get("law", "kai") == "kai" and None not in (n, u, k):
        words = f"max(0, n + k (n − U)) = max(0, {_figure(n)} + {_figure(k)} × ({_figure(n)} − {_figure(u)}))"
        yield Step("KAI's formula, P", _figure(told.get("p")), words)
    else:
        yield Step(f"The law {told.get('law')}", _figure(told.get("p")), "its answer, from the numbers below")
    yield Step(
        "As a weight",
        _figure(told.get("proportional")),
        "so that the competitors' weights add up to their configured total",
    )
    yield Step(
        "Bounds",
        f"{_figure(told.get('lower'))} … {_figure(told.get('upper'))}",
        "of the policy, times the configured weight",
    )
    yield Step("In force before", _figure(told.get("previous")), "at the target when the cycle looked")
    yield Step("After the step bound", _figure(told.get("stepped")), "no further from it in one cycle than `max_step`")
    yield Step(
        "Published", _figure(told.get("value")), "; ".join(told.get("notes") or ()) or "after hold-down and deadband"
    )


def _amount(value: Any, unit: Any) -> str:
    if not isinstance(value, int | float):
        return "an unknown amount"
    if unit in (None, "gpu_us"):
        return f"{value / US_PER_HOUR:,.1f} GPU-hours"
    return f"{value:,.0f} {unit}"


def _figure(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value):
        return number(float(value), 4)
    return str(value)


def _of_verdict(decision: Decision, key: str) -> Sequence[Mapping[str, Any]]:
    verdict: Any = decision.inputs.get("verdict")
    found = verdict.get(key) if isinstance(verdict, Mapping) else None
    return [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []


def _workload(gang: Any) -> str:
    if not isinstance(gang, Mapping):
        return ""
    kind = gang.get("kind")
    return f"{kind.get('kind') if isinstance(kind, Mapping) else kind} {_text(gang, 'namespace')}/{_text(gang, 'name')}"


def _text(said: Mapping[str, Any], key: str) -> str:
    value = said.get(key)
    return "" if value is None else str(value)
