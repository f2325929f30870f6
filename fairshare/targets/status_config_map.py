"""Renders and parses the ConfigMap with the controller's conditions and the state of each target's weights.

`lastTransitionTime` changes only with the status. The controller reads this time back from the cluster, so that it
survives a restart. A changed condition also gives an Event. The controller writes no statuses of schedulers'
objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec

from fairshare.core.queues_and_weights import Condition
from fairshare.core.scheduler_queue_objects import instant
from fairshare.laws.feedback_law import Memory
from gputally.base.untrusted_text import UNDECODABLE
from gputally.kubernetes.objects import CONFIG_MAP, Event, Object

STATE = "state"
"""Prefix of the ConfigMap's keys with the state of a law."""
MOST_STATE_BYTES = 256 * 1024
Scoped = tuple[str, Condition]
"""A target and its condition; the target is "" for the controller itself."""
T = TypeVar("T")


class ConditionEntry(msgspec.Struct, rename="camel"):
    """An entry of the ConfigMap with a condition. last_transition_time: as in Kubernetes, UTC."""

    status: Literal["True", "False", "Unknown"]
    reason: str = ""
    message: str = ""
    last_transition_time: str = ""


class StateEntry(msgspec.Struct):
    """An entry of the ConfigMap with the state of one target's law."""

    policy_version: str
    memory: dict[str, dict[str, float]]


_CONDITION = msgspec.json.Decoder(ConditionEntry)
_STATE = msgspec.json.Decoder(StateEntry)


@dataclass(frozen=True, slots=True)
class StatusObject:
    """Namespace and name of the controller's ConfigMap."""

    namespace: str = "gputally"
    name: str = "gputally-fairshare"

    @classmethod
    def named(cls, text: str) -> StatusObject:
        """Parse namespace/name."""
        namespace, _, name = text.partition("/")
        return cls(namespace, name)


def render(
    where: StatusObject,
    conditions: Sequence[Scoped],
    standing: Object | None,
    now_ms: int,
    state: Mapping[str, str] | None = None,
) -> Object:
    """Return the ConfigMap to apply. standing: the present one; None: it does not exist. state: see `remember`."""
    data: Mapping[str, str] = (standing or {}).get("data") or {}
    return {
        "apiVersion": CONFIG_MAP.api_version,
        "kind": CONFIG_MAP.kind,
        "metadata": {"name": where.name, "namespace": where.namespace},
        "data": {_key(scoped): _condition_text(scoped[1], data.get(_key(scoped)), now_ms) for scoped in conditions}
        | dict(state or {}),
    }


def conditions(standing: Object) -> tuple[Scoped, ...]:
    """Return the valid conditions in the ConfigMap."""
    valid: list[Scoped] = []
    for key, text in sorted((standing.get("data") or {}).items()):
        target, _, kind = key.rpartition(".")
        entry = decoded(text, _CONDITION)
        if entry is not None and target != STATE:
            valid.append((target, Condition(kind, entry.status, entry.reason, entry.message)))
    return tuple(valid)


def remember(memories: Mapping[str, Memory], policy_version: str) -> dict[str, str]:
    """Return the state of each target's law as entries of the ConfigMap, without empty and too large ones."""
    entries = {}
    for target, memory in memories.items():
        plain = {queue: dict(numbers) for queue, numbers in sorted(memory.items())}
        text = msgspec.json.encode(StateEntry(policy_version, plain)).decode()
        if plain and len(text) <= MOST_STATE_BYTES:
            entries[f"{STATE}.{target}"] = text
    return entries


def memories(standing: Object) -> dict[str, Memory]:
    """Return the valid entries that `remember` wrote, by target.

    A state counts under every policy version: a new policy continues with its numbers, and only those of its queues are
    read."""
    by_target: dict[str, Memory] = {}
    for key, text in (standing.get("data") or {}).items():
        prefix, _, target = key.partition(".")
        entry = decoded(text, _STATE) if prefix == STATE else None
        if entry is not None:
            by_target[target] = entry.memory
    return by_target


def changed_conditions(
    where: StatusObject, before: Sequence[Scoped], now: Sequence[Scoped], now_ms: int
) -> tuple[Event, ...]:
    """Return an event for each condition whose status or reason changed, and for each new condition that is False."""
    old = {(target, condition.type): (condition.status, condition.reason) for target, condition in before}
    events = []
    for target, condition in now:
        bad = condition.status == "False"
        previous = old.get((target, condition.type))
        if previous != (condition.status, condition.reason) and (previous is not None or bad):
            severity: Literal["Normal", "Warning"] = "Warning" if bad else "Normal"
            message = f"{target}: {condition.message}" if target else condition.message
            events.append(
                Event(CONFIG_MAP, where.name, where.namespace, "", severity, condition.reason, message, now_ms)
            )
    return tuple(events)


def _key(scoped: Scoped) -> str:
    target, condition = scoped
    return f"{target}.{condition.type}" if target else condition.type


def _condition_text(condition: Condition, standing: str | None, now_ms: int) -> str:
    """Return a condition as JSON, with the transition time of the standing entry if the status is the same."""
    previous = decoded(standing or "", _CONDITION)
    since = ""
    if previous is not None and previous.status == condition.status:
        since = previous.last_transition_time
    entry = ConditionEntry(condition.status, condition.reason, condition.message, since or instant(now_ms))
    return msgspec.json.encode(entry).decode()


def decoded(text: str, decoder: msgspec.json.Decoder[T]) -> T | None:
    """Decode a text that the controller stored in an object. None if it is invalid; other clients can change it."""
    try:
        return decoder.decode(text)
    except UNDECODABLE:
        return None
