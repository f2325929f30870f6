"""What every adapter does with the policy: find a queue's object by its refs, and say what was not found. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from accountant.wire import Policy, QueuePolicy
from fairshare.kube.kinds import Object
from fairshare.model import Condition, Issue


@dataclass(frozen=True, slots=True)
class Match:
    """found: by policy queue, the one object that carries its weight. strangers: objects no ref names."""

    found: Mapping[str, Object]
    issues: tuple[Issue, ...]
    strangers: tuple[Object, ...]


def owners(policy: Policy, *prefixes: str) -> dict[str, QueuePolicy]:
    """Ref (with its prefix, such as `kai:vision`) to queue, of the refs that begin with one of `prefixes`."""
    return {
        ref: queue for queue in policy.queues for ref in queue.refs if ref.startswith(tuple(f"{p}:" for p in prefixes))
    }


def referred(policy: Policy, *prefixes: str) -> bool:
    """Whether any queue has a ref that begins with one of `prefixes`."""
    return bool(owners(policy, *prefixes))


def match(
    objects: Iterable[Object], owner: Mapping[str, QueuePolicy], ref: Callable[[Object], str], kind: str
) -> Match:
    """One object per queue, or an issue. ref: the name by which a policy refers to an object. kind: for people."""
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
    return Match(found, tuple(issues), tuple(strangers))


def sum_up(policy: Policy, own: Mapping[str, float]) -> dict[str, float]:
    """Amounts of queues with their descendants' added, for every queue of the policy that has any."""
    parents = {queue.name: queue.parent for queue in policy.queues}
    total: dict[str, float] = {}
    for name in sorted(own):
        at: str | None = name
        while at is not None:
            total[at] = total.get(at, 0.0) + own[name]
            at = parents.get(at)
    return total


def differences(name: str, pairs: Iterable[tuple[str, object, object]]) -> list[str]:
    """Where an object of a target says something else than the policy. pairs: what, there, in the policy."""
    return [f"{name}: {what} {_value(there)}, policy {_value(here)}" for what, there, here in pairs if there != here]


def in_sync(
    differing: Sequence[str],
    stopped: Sequence[str] = (),
    *,
    what: str = "quota, limit, priority and parent",
    unknown: str = "",
) -> Condition:
    """`InSync` of a target: whether its objects are as the policy says. They are reported, never written. stopped: what
    is kept from getting GPUs there. what: was compared. unknown: why some of it cannot be compared."""
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
    """Texts as one, with a count of what is left out."""
    shown = "; ".join(conditions[:most])
    return shown if len(conditions) <= most else f"{shown}; and {len(conditions) - most} more"


def _owner_of(kind: str) -> str:
    return kind.split(" ", 1)[0]


def _noun(kind: str) -> str:
    return kind.split(" ", 1)[1]
