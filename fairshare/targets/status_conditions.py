"""Keeps the controller's conditions in one ConfigMap.

`lastTransitionTime` moves only with the status, and is taken over from what stands in the cluster, so
that a restart forgets nothing. KAI's objects have statuses of their own, which are not ours to write.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fairshare.core.model import Condition
from fairshare.core.queue_objects import instant
from fairshare.laws.feedback_laws import Memory
from gputally.kubernetes.objects import CONFIG_MAP, Event, Object

STATE = "state"
"""First part of the keys that hold what a law has to remember."""
MOST_STATE_BYTES = 256 * 1024
Scoped = tuple[str, Condition]
"""(target, "" for the controller itself; condition)."""


@dataclass(frozen=True, slots=True)
class StatusObject:
    """The ConfigMap that carries the conditions."""

    namespace: str = "gputally"
    name: str = "gputally-fairshare"

    @classmethod
    def named(cls, text: str) -> StatusObject:
        """From namespace/name."""
        namespace, _, name = text.partition("/")
        return cls(namespace, name)


def render(
    where: StatusObject,
    conditions: Sequence[Scoped],
    standing: Object | None,
    now_ms: int,
    state: Mapping[str, str] | None = None,
) -> Object:
    """What to apply, given the ConfigMap as it stands (None: not there). state: see `remember`."""
    data: Mapping[str, str] = (standing or {}).get("data") or {}
    return {
        "apiVersion": CONFIG_MAP.api_version,
        "kind": CONFIG_MAP.kind,
        "metadata": {"name": where.name, "namespace": where.namespace},
        "data": {_key(scoped): _entry(scoped[1], data.get(_key(scoped)), now_ms) for scoped in conditions}
        | dict(state or {}),
    }


def conditions(standing: Object) -> tuple[Scoped, ...]:
    """What the ConfigMap says, as far as it is ours to understand."""
    found: list[Scoped] = []
    for key, text in sorted((standing.get("data") or {}).items()):
        scope, _, kind = key.rpartition(".")
        entry = _parse(text)
        if scope != STATE and entry.get("status") in ("True", "False", "Unknown"):
            words = (str(entry.get("reason", "")), str(entry.get("message", "")))
            found.append((scope, Condition(kind, entry["status"], *words)))
    return tuple(found)


def remember(memories: Mapping[str, Memory], policy_version: str) -> dict[str, str]:
    """The laws' momentum of each target as entries of the ConfigMap; left out where it is empty or too large."""
    entries = {}
    for target, memory in memories.items():
        plain = {queue: dict(numbers) for queue, numbers in sorted(memory.items())}
        text = json.dumps({"policy_version": policy_version, "memory": plain}, separators=(",", ":"))
        if plain and len(text) <= MOST_STATE_BYTES:
            entries[f"{STATE}.{target}"] = text
    return entries


def memories(standing: Object) -> dict[str, Memory]:
    """What `remember` wrote, as far as it can be read. Of another policy, too: a new one that is adopted while it runs
    goes on with its numbers, and a law asks for those of its queues alone."""
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
    """An event for every condition whose status or reason is another than before; at first only for bad news."""
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
