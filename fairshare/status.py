"""The controller's conditions: kept in one ConfigMap, and told as Events when they turn. Pure.

`lastTransitionTime` moves only with the status, and is taken over from what stands in the cluster, so
that a restart forgets nothing. KAI's objects have statuses of their own, which are not ours to write.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fairshare.marks import instant
from fairshare.model import Condition
from fairshare.ports import CONFIG_MAP, Event, Object

Scoped = tuple[str, Condition]
"""(target, "" for the controller itself; condition)."""


@dataclass(frozen=True, slots=True)
class StatusObject:
    """The ConfigMap that carries the conditions."""

    namespace: str = "gputally-system"
    name: str = "gputally-fairshare"


def render(where: StatusObject, conditions: Sequence[Scoped], standing: Object | None, now_ms: int) -> Object:
    """What to apply, given the ConfigMap as it stands (None: not there)."""
    data: Mapping[str, str] = (standing or {}).get("data") or {}
    return {
        "apiVersion": CONFIG_MAP.api_version,
        "kind": CONFIG_MAP.kind,
        "metadata": {"name": where.name, "namespace": where.namespace},
        "data": {_key(scoped): _entry(scoped[1], data.get(_key(scoped)), now_ms) for scoped in conditions},
    }


def turned(where: StatusObject, before: Sequence[Scoped], now: Sequence[Scoped], now_ms: int) -> tuple[Event, ...]:
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
