"""Keeps the controller's conditions in one ConfigMap.

`lastTransitionTime` changes only with the status, and is read from the cluster, so that a restart keeps it. KAI's
objects have statuses of their own, which the controller does not write."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fairshare.core.queue_annotations import instant
from fairshare.core.queues_and_weights import Condition
from fairshare.laws.feedback_laws import Memory
from gputally.kubernetes.objects import CONFIG_MAP, Event, Object

STATE = "state"
"""Prefix of the keys with the state of a law."""
MOST_STATE_BYTES = 256 * 1024
Scoped = tuple[str, Condition]
"""(target, "" for the controller itself; condition)."""


@dataclass(frozen=True, slots=True)
class StatusObject:
    """The ConfigMap with the conditions."""

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
    """Return the ConfigMap to apply, given the present one (None: it does not exist). state: see `remember`."""
    data: Mapping[str, str] = (standing or {}).get("data") or {}
    return {
        "apiVersion": CONFIG_MAP.api_version,
        "kind": CONFIG_MAP.kind,
        "metadata": {"name": where.name, "namespace": where.namespace},
        "data": {_key(scoped): _entry(scoped[1], data.get(_key(scoped)), now_ms) for scoped in conditions}
        | dict(state or {}),
    }


def conditions(standing: Object) -> tuple[Scoped, ...]:
    """Return the conditions in the ConfigMap that can be read."""
    found: list[Scoped] = []
    for key, text in sorted((standing.get("data") or {}).items()):
        scope, _, kind = key.rpartition(".")
        entry = _parse(text)
        if scope != STATE and entry.get("status") in ("True", "False", "Unknown"):
            words = (str(entry.get("reason", "")), str(entry.get("message", "")))
            found.append((scope, Condition(kind, entry["status"], *words)))
    return tuple(found)


def remember(memories: Mapping[str, Memory], policy_version: str) -> dict[str, str]:
    """Return the state of each target's law as entries of the ConfigMap; left out if it is empty or too large."""
    entries = {}
    for target, memory in memories.items():
        plain = {queue: dict(numbers) for queue, numbers in sorted(memory.items())}
        text = json.dumps({"policy_version": policy_version, "memory": plain}, separators=(",", ":"))
        if plain and len(text) <= MOST_STATE_BYTES:
            entries[f"{STATE}.{target}"] = text
    return entries


def memories(standing: Object) -> dict[str, Memory]:
    """Return what `remember` wrote, as far as it can be read. The state of another policy is used too: a new policy
    continues with its numbers, and a law reads only those of its queues."""
    found: dict[str, Memory] = {}
    for key, text in (standing.get("data") or {}).items():
        scope, _, target = key.partition(".")
        entry = _parse(text)
        memory = entry.get("memory")
        if scope == STATE and isinstance(memory, dict):
            found[target] = {
                str(queue): {str(name): float(value) for name, value in numbers.items()}
                for queue, numbers in memory.items()
                if isinstance(numbers, dict) and all(isinstance(value, int | float) for value in numbers.values())
            }
    return found


def changed_conditions(
    where: StatusObject, before: Sequence[Scoped], now: Sequence[Scoped], now_ms: int
) -> tuple[Event, ...]:
    """Return an event for every condition whose status or reason has changed; for a new condition only if it is bad."""
    old = {(scope, condition.type): condition for scope, condition in before}
    events = []
    for scope, condition in now:
        was = old.get((scope, condition.type))
        bad = condition.status == "False"
        if (was is None and bad) or (
            was is not None and (was.status, was.reason) != (condition.status, condition.reason)
        ):
            message = f"{scope + ': ' if scope else ''}{condition.message}"
            events.append(
                Event(
                    CONFIG_MAP,
                    where.name,
                    where.namespace,
                    "",
                    "Warning" if bad else "Normal",
                    condition.reason,
                    message,
                    now_ms,
                )
            )
    return tuple(events)


def _key(scoped: Scoped) -> str:
    scope, condition = scoped
    return f"{scope + '.' if scope else ''}{condition.type}"


def _entry(condition: Condition, standing: str | None, now_ms: int) -> str:
    since = instant(now_ms)
    if standing is not None:
        was = _parse(standing)
        if was.get("status") == condition.status and isinstance(was.get("lastTransitionTime"), str):
            since = was["lastTransitionTime"]
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
