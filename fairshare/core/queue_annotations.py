"""Finds a queue's object by its references, and keeps its base weight in annotations for restore.

The first write records the operator's base weight, and `release` restores it. The annotation also holds the value that
the controller wrote last. If the field has another value, another owner changed it. In some targets the field does not
hold the weight but a value derived from it (a part of the cluster, GPUs). The weight is then recorded too, because the
next step starts from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import isfinite
from typing import Any

from accountant.wire.policy_models import Policy, QueuePolicy
from fairshare.core.queues_and_weights import Condition, Issue, Standing, TargetQueue, Value
from gputally.kubernetes.objects import Kind, Object


@dataclass(frozen=True, slots=True)
class QueueMatch:
    """Which objects in the cluster belong to which queues of the policy.

    found: by policy queue, the one object that carries its weight.
    strangers: objects that no ref names."""

    found: Mapping[str, Object]
    issues: tuple[Issue, ...]
    strangers: tuple[Object, ...]


def owners(policy: Policy, *prefixes: str) -> dict[str, QueuePolicy]:
    """Return the queue of each ref (with its prefix, such as `kai:vision`) that begins with one of `prefixes`."""
    return {
        ref: queue for queue in policy.queues for ref in queue.refs if ref.startswith(tuple(f"{p}:" for p in prefixes))
    }


def has_ref(policy: Policy, *prefixes: str) -> bool:
    """Return whether any queue has a ref that begins with one of `prefixes`."""
    return bool(owners(policy, *prefixes))


def match(
    objects: Iterable[Object], owner: Mapping[str, QueuePolicy], ref: Callable[[Object], str], kind: str
) -> QueueMatch:
    """Find the one object of each queue of the policy, and report an issue if there is none or several.

    owner: the queues of the policy, by reference.
    ref: returns an object's reference as policies write it (`kueue:NAME`).
    kind: the kind's name in messages."""
    named: dict[str, list[Object]] = {}
    strangers = []
    for obj in objects:
        queue = owner.get(ref(obj))
        if queue is not None:
            named.setdefault(queue.name, []).append(obj)
        else:
            strangers.append(obj)
    found: dict[str, Object] = {}
    issues: list[Issue] = []
    wanted: dict[str, list[str]] = {}
    for text, queue in owner.items():
        wanted.setdefault(queue.name, []).append(text.partition(":")[2])
    for name, refs in sorted(wanted.items()):
        here = named.get(name, [])
        if len(here) > 1:
            names = ", ".join(ref(obj).partition(":")[2] for obj in here)
            issues.append(Issue(name, f"several {kind}s ({names}) for one queue of the policy: none is touched"))
        elif not here:
            issues.append(Issue(name, f"{_owner_of(kind)} has no {_noun(kind)} {' or '.join(sorted(refs))}"))
        else:
            found[name] = here[0]
    return QueueMatch(found, tuple(issues), tuple(strangers))


def differences(name: str, pairs: Iterable[tuple[str, object, object]]) -> list[str]:
    """Return where an object of a target differs from the policy. pairs: name of the setting, value there, value in the
    policy."""
    return [f"{name}: {what} {_value(there)}, policy {_value(here)}" for what, there, here in pairs if there != here]


def in_sync(
    differing: Sequence[str],
    stopped: Sequence[str] = (),
    *,
    what: str = "quota, limit, priority and parent",
    unknown: str = "",
) -> Condition:
    """Return the condition `InSync` of a target: whether its objects match the policy. Differences are reported, never
    written.

    stopped: queues that are stopped in the target, each as a text.
    what: names the settings that were compared, for the message.
    unknown: why some of it cannot be compared."""
    if differing or stopped:
        reason = "PolicyDiffers" if differing else "QueuesStopped"
        return Condition("InSync", "False", reason, say([*stopped, *differing]))
    if unknown:
        return Condition("InSync", "Unknown", "NotComparable", unknown)
    return Condition("InSync", "True", "AsPolicy", f"{what} stand as in the policy")


def _value(value: object) -> str:
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def say(conditions: Sequence[str], most: int = 8) -> str:
    """Join texts, with a count of those left out."""
    shown = "; ".join(conditions[:most])
    return shown if len(conditions) <= most else f"{shown}; and {len(conditions) - most} more"


def _owner_of(kind: str) -> str:
    return kind.split(" ", 1)[0]


def _noun(kind: str) -> str:
    return kind.split(" ", 1)[1]


BASE = "gputally.dev/base-over-quota-weight"
PUBLISHED = "gputally.dev/published-over-quota-weight"
CHANGED = "gputally.dev/changed-at"
DIRECTION = "gputally.dev/direction"
POLICY = "gputally.dev/policy-version"
WEIGHT = "gputally.dev/weight"

UNSET = "unset"
_WORDS = {1: "up", -1: "down", 0: "none"}


@dataclass(frozen=True, slots=True)
class WeightAnnotations:
    """The controller's annotations on an object.

    base None: the operator had left the field unset.
    weight None: the published value is the weight."""

    base: Value | None
    published: Value
    changed_ms: int | None
    direction: int
    policy_version: str
    weight: float | None = None

    def annotations(self) -> dict[str, str]:
        """The annotations as on the object."""
        return {
            BASE: UNSET if self.base is None else _text(self.base),
            PUBLISHED: _text(self.published),
            **({} if self.changed_ms is None else {CHANGED: instant(self.changed_ms)}),
            DIRECTION: _WORDS[self.direction],
            POLICY: self.policy_version,
            **({} if self.weight is None else {WEIGHT: _text(self.weight)}),
        }


def read(annotations: Mapping[str, str], *, text: bool = False) -> WeightAnnotations | None:
    """Read the annotations; None if the controller never wrote them, or if they cannot be understood.

    text: the target's field holds text instead of a number."""
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
    return WeightAnnotations(
        base, published, _millis(annotations.get(CHANGED)), direction, annotations.get(POLICY, ""), weight
    )


def target_queue(obj: Object, kind: Kind, weight: Value | None, *, text: bool = False, **more: Any) -> TargetQueue:
    """Return an object of a target with its annotations.

    weight: its field's value.
    text: that value is text. more: further fields of the TargetQueue."""
    metadata = obj["metadata"]
    noted = read(metadata.get("annotations") or {}, text=text)
    return TargetQueue(
        metadata["name"],
        metadata.get("uid", ""),
        metadata.get("resourceVersion", ""),
        weight,
        kind,
        noted.published if noted else None,
        noted.base if noted else None,
        noted.changed_ms if noted else None,
        noted.direction if noted else 0,
        metadata.get("namespace", ""),
        **more,
    )


@dataclass(frozen=True, slots=True)
class ReadQueues:
    """The readable objects of a target; held, standings, left: see `Observation`."""

    held: Mapping[str, TargetQueue]
    standings: Mapping[str, Standing]
    issues: tuple[Issue, ...]
    left: Mapping[str, TargetQueue]


def read_queues(found: QueueMatch, read: Callable[[str, Object], tuple[TargetQueue, Standing] | Issue]) -> ReadQueues:
    """Read all matched objects. read(queue, object): returns the queue's state in the target, or an issue; `queue` is
    "" for an object that no queue refers to."""
    held: dict[str, TargetQueue] = {}
    standings: dict[str, Standing] = {}
    issues = list(found.issues)
    for name, obj in sorted(found.found.items()):
        one = read(name, obj)
        if isinstance(one, Issue):
            issues.append(one)
        else:
            held[name], standings[name] = one
    left: dict[str, TargetQueue] = {}
    for obj in found.strangers:
        if PUBLISHED in (obj["metadata"].get("annotations") or {}) and not isinstance(one := read("", obj), Issue):
            namespace = f"{one[0].namespace}/" if one[0].namespace else ""
            left[f"{namespace}{one[0].name}"] = one[0]
    return ReadQueues(held, standings, tuple(issues), left)


def instant(at_ms: int) -> str:
    """Format a time as UTC with milliseconds: 2026-10-01T00:00:00.000Z."""
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
