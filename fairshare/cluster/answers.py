"""What the API server's refusals mean: its Status objects as the exceptions of fairshare.errors. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from fairshare.errors import Blocked, ClusterError, Conflict, Gone, NotFound, Refused, Unavailable

_OWNER = re.compile(r'conflict with "([^"]*)"')


def error_of(method: str, path: str, status: int, content: bytes, headers: Mapping[str, str]) -> ClusterError:
    """The server's Status as an exception.

    404 NotFound; 409 Conflict, with the owners of contested fields; 410 Gone; an eviction that a disruption
    budget does not allow now Blocked, one that two budgets claim Refused; 408, 429 and 5xx Unavailable; a
    webhook that cannot be reached is a 500 and so Unavailable; all else Refused."""
    answer = decode(content) or {}
    text = str(answer.get("message") or content[:200].decode(errors="replace") or "no reason given")
    message = f"{method} {path}: {status}: {' '.join(text.split())}"
    if status == 404:
        return NotFound(message)
    if status == 409:
        owners = [
            (match.group(1), str(cause.get("field", "")))
            for cause in (answer.get("details") or {}).get("causes") or ()
            if (match := _OWNER.search(str(cause.get("message", ""))))
        ]
        return Conflict(message, tuple(sorted(owners)))
    if status == 410:
        return Gone(message)
    evicting = path.endswith("/eviction")
    if evicting and status == 500 and not answer.get("reason"):
        return Refused(message)  # more than one budget selects the pod: waiting does not help
    if evicting and status == 429:
        return Blocked(message, _seconds(headers))
    if status in (408, 429) or status >= 500:
        return Unavailable(message, _seconds(headers))
    return Refused(message)


def decode(content: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(content)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _seconds(headers: Mapping[str, str]) -> float | None:
    """Retry-After where it is a number of seconds."""
    text = next((value for name, value in headers.items() if name.lower() == "retry-after"), "")
    return float(text) if text.isdigit() else None
