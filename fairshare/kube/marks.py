"""What we write on an object beside its weight: annotations that let us restore it, and need no memory.

The operator's base weight is noted with the first write and given back by `release`. Noting what we
published last is how a change by somebody else is told from our own. Where a target's field does not
hold the weight itself but something made of it (a part of the cluster, GPUs), the weight is noted too:
the next step starts from it. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from math import isfinite

from fairshare.kube.kinds import Object
from fairshare.model import Value

BASE = "gputally.dev/base-over-quota-weight"
PUBLISHED = "gputally.dev/published-over-quota-weight"
CHANGED = "gputally.dev/changed-at"
DIRECTION = "gputally.dev/direction"
POLICY = "gputally.dev/policy-version"
WEIGHT = "gputally.dev/weight"

UNSET = "unset"
_WORDS = {1: "up", -1: "down", 0: "none"}


@dataclass(frozen=True, slots=True)
class Marks:
    """base None: the operator had left the field unset. weight None: what is published is the weight."""

    base: Value | None
    published: Value
    changed_ms: int | None
    direction: int
    policy_version: str
    weight: float | None = None

    def annotations(self) -> dict[str, str]:
        """As they stand on the object."""
        return {
            BASE: UNSET if self.base is None else _text(self.base),
            PUBLISHED: _text(self.published),
            **({} if self.changed_ms is None else {CHANGED: instant(self.changed_ms)}),
            DIRECTION: _WORDS[self.direction],
            POLICY: self.policy_version,
            **({} if self.weight is None else {WEIGHT: _text(self.weight)}),
        }


def read(annotations: Mapping[str, str], *, text: bool = False) -> Marks | None:
    """None where we never wrote, or where what stands there is not ours to understand.

    text: the target's field holds text rather than a number."""
    base_text = annotations.get(BASE)
    published: Value | None
    base: Value | None
    if text:
        published = annotations.get(PUBLISHED) or None
        base = base_text if base_text and base_text != UNSET else None
    else:
        published, base = _number(annotations.get(PUBLISHED)), _number(base_text)
    if published is None or (base is None and base_text != UNSET):
        return None
    direction = next((sign for sign, word in _WORDS.items() if word == annotations.get(DIRECTION)), 0)
    weight = _number(annotations.get(WEIGHT))
    return Marks(base, published, _millis(annotations.get(CHANGED)), direction, annotations.get(POLICY, ""), weight)


def carries(obj: Object) -> bool:
    """Whether we have written on an object."""
    return PUBLISHED in (obj["metadata"].get("annotations") or {})


def instant(at_ms: int) -> str:
    """UTC with milliseconds: 2026-10-01T00:00:00.000Z."""
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _text(value: Value) -> str:
    return value if isinstance(value, str) else f"{value:.15g}"


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if isfinite(value) and value >= 0 else None


def _millis(text: str | None) -> int | None:
    try:
        at = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return round(at.timestamp() * 1000) if at.tzinfo is not None else None
