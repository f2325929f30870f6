"""Finds the target's object for each queue of the policy, reports settings that differ from the policy, and reads and
formats the controller's annotations on the object.

The first write to an object records the operator's own weight as the base weight, which `release` restores. Another
annotation holds the value that the controller wrote last. If the field now has another value, another client changed
it. In some targets the field holds a value derived from the weight (a part of the cluster, GPUs). A third annotation
then holds the weight itself, from which the next cycle's step starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import isfinite
from typing import Any, TypeVar

from accountant.wire.policy_models import Policy, QueuePolicy
from fairshare.core.gpu_demand import millis
from fairshare.core.queues_and_weights import Condition, Issue, Observation, Standing, TargetQueue, Value
from gputally.base.background_tasks import error_summary
from gputally.kubernetes.list_watch import MOST_FAULT
from gputally.kubernetes.objects import Kind, Object

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class QueueMatch:
    """The objects of a target, assigned to the queues of the policy.

    found: by policy queue, the one object that carries its weight.
    issues: queues with no object or with several.
    strangers: objects to which no queue of the policy refers."""

    found: Mapping[str, Object]
    issues: tuple[Issue, ...]
    strangers: tuple[Object, ...]


def owners(policy: Policy, *prefixes: str) -> dict[str, QueuePolicy]:
    """Return the queues by reference, for references that begin with one of `prefixes`."""
    begins = tuple(f"{prefix}:" for prefix in prefixes)
    return {ref: queue for queue in policy.queues for ref in queue.refs if ref.startswith(begins)}


def has_ref(policy: Policy, *prefixes: str) -> bool:
    """Return whether any queue has a reference that begins with one of `prefixes`."""
    return bool(owners(policy, *prefixes))


def match(
    objects: Iterable[Object], owner: Mapping[str, QueuePolicy], ref: Callable[[Object], str], kind: str
) -> QueueMatch:
    """Find the one object of each queue of the policy, and report an issue if there is none or several.

    owner: the queues of the policy, by reference.
    ref: returns an object's reference as policies write it (`lanes:NAME`).
    kind: scheduler and kind in messages, such as `Lanes lane`."""
    objects_by_queue: dict[str, list[Object]] = {}
    strangers = []
    for obj in objects:
        queue = owner.get(ref(obj))
        if queue is not None:
            objects_by_queue.setdefault(queue.name, []).append(obj)
        else:
            strangers.append(obj)
    matched: dict[str, Object] = {}
    issues: list[Issue] = []
    names_by_queue: dict[str, list[str]] = {}
    for text, queue in owner.items():
        names_by_queue.setdefault(queue.name, []).append(text.partition(":")[2])
    scheduler, _, noun = kind.partition(" ")
    for name, names in sorted(names_by_queue.items()):
        candidates = objects_by_queue.get(name, [])
        if len(candidates) > 1:
            several = ", ".join(ref(obj).partition(":")[2] for obj in candidates)
            issues.append(Issue(name, f"several {kind}s ({several}) for one queue of the policy: none is touched"))
        elif not candidates:
            issues.append(Issue(name, f"{scheduler} has no {noun} {' or '.join(sorted(names))}"))
        else:
            matched[name] = candidates[0]
    return QueueMatch(matched, tuple(issues), tuple(strangers))


def read_each(objects: Iterable[Object], read: Callable[[Object], T | None]) -> tuple[list[T], tuple[str, ...]]:
    """Return what `read` returns for each object, without None, and the objects that it cannot read
    (`Observation.unreadable`).

    Users write parts of these objects. One that makes `read` fail is left out and named, and stops no other."""
    values: list[T] = []
    unreadable: list[str] = []
    for obj in objects:
        try:
            value = read(obj)
        except Exception as error:  # noqa: BLE001 - whatever an object's owner wrote, the others count
            unreadable.append(_unreadable(obj, error))
        else:
            if value is not None:
                values.append(value)
    return values, tuple(unreadable)


def _unreadable(obj: Object, error: Exception) -> str:
    metadata = obj.get("metadata") or {}
    name = "/".join(filter(None, (metadata.get("namespace"), metadata.get("name"))))
    return f"{obj.get('kind', 'object')} {name}: {error_summary(error)[:MOST_FAULT]}"


def path_from_root(name: str, parents: Mapping[str, object]) -> list[str]:
    """Return the names of the queues above a queue, from the root, and its own. In a cycle each counts once.

    parents: the name of each queue's parent, empty for none."""
    path = [name]
    while (above := str(parents.get(path[0]) or "")) and above not in path:
        path.insert(0, above)
    return path


def differences(name: str, pairs: Iterable[tuple[str, object, object]]) -> list[str]:
    """Describe each setting of a target's object that differs from the policy.

    name: the object's name, for the text.
    pairs: name of the setting, its value in the target, its value in the policy."""
    return [
        f"{name}: {setting} {_value(in_target)}, policy {_value(in_policy)}"
        for setting, in_target, in_policy in pairs
        if in_target != in_policy
    ]


def in_sync(
    differing: Sequence[str],
    stopped: Sequence[str] = (),
    *,
    what: str = "quota, limit, priority and parent",
    unknown: str = "",
) -> Condition:
    """Return the condition `InSync` of a target, which is True if the target's objects match the policy.

    The controller reports differences and never corrects them.

    differing: the result of `differences`.
    stopped: one text for each queue that is stopped in the target.
    what: the settings that were compared, for the message.
    unknown: the reason why some settings cannot be compared."""
    if differing or stopped:
        reason = "PolicyDiffers" if differing else "QueuesStopped"
        return Condition("InSync", "False", reason, join_texts([*stopped, *differing]))
    if unknown:
        return Condition("InSync", "Unknown", "NotComparable", unknown)
    return Condition("InSync", "True", "AsPolicy", f"{what} are as in the policy")


def _value(value: object) -> str:
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def join_texts(texts: Sequence[str], most: int = 8) -> str:
    """Join the first `most` texts with semicolons, and append the number of the texts left out."""
    shown = "; ".join(texts[:most])
    return shown if len(texts) <= most else f"{shown}; and {len(texts) - most} more"


BASE = "gputally.dev/base-over-quota-weight"
PUBLISHED = "gputally.dev/published-over-quota-weight"
CHANGED = "gputally.dev/changed-at"
DIRECTION = "gputally.dev/direction"
POLICY = "gputally.dev/policy-version"
WEIGHT = "gputally.dev/weight"
CONTROLLER = "gputally.dev/controller"

UNSET = "unset"
_WORDS = {1: "up", -1: "down", 0: "none"}


@dataclass(frozen=True, slots=True)
class WeightAnnotations:
    """The controller's annotations on an object.

    base: the operator's own value of the field; None if the operator had left it unset.
    published: the value that the controller wrote last.
    weight: None if the published value is the weight itself.
    controller: NAMESPACE/LEASE of the controller that wrote it; "" if it has no Lease."""

    base: Value | None
    published: Value
    changed_ms: int | None
    direction: int
    policy_version: str
    weight: float | None = None
    controller: str = ""

    def annotations(self) -> dict[str, str]:
        """Return the annotations in the form in which the object has them."""
        return {
            BASE: UNSET if self.base is None else _text(self.base),
            PUBLISHED: _text(self.published),
            **({} if self.changed_ms is None else {CHANGED: instant(self.changed_ms)}),
            DIRECTION: _WORDS[self.direction],
            POLICY: self.policy_version,
            **({} if self.weight is None else {WEIGHT: _text(self.weight)}),
            **({CONTROLLER: self.controller} if self.controller else {}),
        }


def read(annotations: Mapping[str, str], *, text: bool = False) -> WeightAnnotations | None:
    """Read the annotations; None if the controller never wrote them, or if another client made them unreadable.

    text: true if the target's field holds text instead of a number."""
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
    return WeightAnnotations(
        base,
        published,
        millis(annotations.get(CHANGED)),
        direction,
        annotations.get(POLICY, ""),
        _number(annotations.get(WEIGHT)),
        annotations.get(CONTROLLER, ""),
    )


def target_queue(obj: Object, kind: Kind, weight: Value | None, *, text: bool = False, **more: Any) -> TargetQueue:
    """Return an object of a target together with the controller's annotations on it.

    weight: the value of the object's field.
    text: true if that value is text.
    more: further fields of the TargetQueue."""
    metadata = obj["metadata"]
    written = read(metadata.get("annotations") or {}, text=text)
    return TargetQueue(
        metadata["name"],
        metadata.get("uid", ""),
        metadata.get("resourceVersion", ""),
        weight,
        kind,
        written.published if written else None,
        written.base if written else None,
        written.changed_ms if written else None,
        written.direction if written else 0,
        metadata.get("namespace", ""),
        controller=written.controller if written else "",
        **more,
    )


def read_queues(
    matched: QueueMatch, read: Callable[[str, Object], tuple[TargetQueue, Standing] | Issue]
) -> Observation:
    """Return an observation with the queues, standings, issues and left-behind objects of the matched objects.

    read: returns the state of a queue's object in the target, or an issue. Its first argument is the queue's name, ""
        for an object to which no queue refers."""
    queues: dict[str, TargetQueue] = {}
    standings: dict[str, Standing] = {}
    issues = list(matched.issues)
    for name, obj in sorted(matched.found.items()):
        try:
            state = read(name, obj)
        except Exception as error:  # noqa: BLE001 - one object that cannot be read leaves the others in force
            state = Issue(name, f"cannot be read: {_unreadable(obj, error)}")
        if isinstance(state, Issue):
            issues.append(state)
        else:
            queues[name], standings[name] = state
    left_behind: dict[str, TargetQueue] = {}
    for obj in matched.strangers:
        if PUBLISHED not in (obj["metadata"].get("annotations") or {}):
            continue
        state = read("", obj)
        if not isinstance(state, Issue):
            queue = state[0]
            left_behind[f"{queue.namespace}/{queue.name}" if queue.namespace else queue.name] = queue
    return Observation(queues, standings, tuple(issues), left_behind=left_behind)


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
