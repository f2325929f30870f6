"""Stores the controller's conditions, and the state of each target's law, in one ConfigMap.

`lastTransitionTime` changes only with the status. The controller reads it back from the cluster, so that it survives a
restart. The controller writes no statuses of schedulers' objects."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fairshare.core.queues_and_weights import Condition
from fairshare.core.scheduler_queue_objects import instant
from fairshare.laws.feedback_laws import Memory
from gputally.kubernetes.objects import CONFIG_MAP, Event, Object

STATE = "state"
"""Prefix of the ConfigMap's keys with the state of a law."""
MOST_STATE_BYTES = 256 * 1024
Scoped = tuple[str, Condition]
"""A target and its condition; the target is "" for the controller itself."""


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
        "data": {_key(scoped): _entry(scoped[1], data.get(_key(scoped)), now_ms) for scoped in conditions}
        | dict(state or {}),
    }


def conditions(standing: Object) -> tuple[Scoped, ...]:
    """Return the valid conditions in the ConfigMap."""
    valid: list[Scoped] = []
    for key, text in sorted((standing.get("data") or {}).items()):
        target, _, kind = key.rpartition(".")
        entry = _parse(text)
        if target != STATE and entry.get("status") in ("True", "False", "Unknown"):
            reason, message = str(entry.get("reason", "")), str(entry.get("message", ""))
            valid.append((target, Condition(kind, entry["status"], reason, message)))
    return tuple(valid)


def remember(memories: Mapping[str, Memory], policy_version: str) -> dict[str, str]:
    """Return the state of each target's law as entries of the ConfigMap, without empty and too large ones."""
    entries = {}
    for target, memory in memories.items():
        plain = {queue: dict(numbers) for queue, numbers in sorted(memory.items())}
        text = json.dumps({"policy_version": policy_version, "memory": plain}, separators=(",", ":"))
        if plain and len(text) <= MOST_STATE_BYTES:
            entries[f"{STATE}.{target}"] = text
    return entries


def memories(standing: Object) -> dict[str, Memory]:
    """Return the valid entries that `remember` wrote, by target.

    A state counts under every policy version: a new policy continues with its numbers, and a law reads only the numbers
    of its queues."""
    by_target: dict[str, Memory] = {}
    for key, text in (standing.get("data") or {}).items():
        prefix, _, target = key.partition(".")
        memory = _parse(text).get("memory")
        if prefix == STATE and isinstance(memory, dict):
            by_target[target] = {
                str(queue): {str(name): float(value) for name, value in numbers.items()}
                for queue, numbers in memory.items()
                if isinstance(numbers, dict) and all(isinstance(value, int | float) for value in numbers.values())
            }
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


def _entry(condition: Condition, standing: str | None, now_ms: int) -> str:
    """Return a condition as JSON, with the transition time of the standing entry if the status is the same."""
    previous = _parse(standing or "")
    since = previous.get("lastTransitionTime")
    if previous.get("status") != condition.status or not isinstance(since, str):
        since = instant(now_ms)
    fields = {
        "status": condition.status,
        "reason": condition.reason,
        "message": condition.message,
        "lastTransitionTime": since,
    }
    return json.dumps(fields, ensure_ascii=False)


def _parse(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
