"""Acts in their table (accountant.journal): read whole by kind, appended with the next numbers."""

from __future__ import annotations

from collections.abc import Sequence

from accountant.journal import FIRST_DIGEST, Act, ActKind, BooksMoved, NewAct, numbered
from accountant.store.database import Cursor


def last_act(cursor: Cursor) -> int:
    return int(cursor.run("SELECT coalesce(max(number), 0) FROM act")[0][0])


def read_acts(cursor: Cursor, kinds: Sequence[ActKind], subject: str | None) -> list[Act]:
    rows = cursor.run(
        "SELECT at_ms, kind, subject, who, reason, content, number, digest FROM act "
        "WHERE (len($kinds) = 0 OR list_contains($kinds, kind)) AND ($subject IS NULL OR subject = $subject) "
        "ORDER BY number",
        {"kinds": list(kinds), "subject": subject},
    )
    return [Act(*row) for row in rows]


def read_trail(cursor: Cursor, after: int, limit: int) -> list[Act]:
    """Acts with a number above `after`, ascending."""
    rows = cursor.run(
        "SELECT at_ms, kind, subject, who, reason, content, number, digest FROM act "
        "WHERE number > ? ORDER BY number LIMIT ?",
        [after, limit],
    )
    return [Act(*row) for row in rows]


def write_acts(cursor: Cursor, acts: Sequence[NewAct], seen: int) -> list[Act]:
    """Raises BooksMoved."""
    found = cursor.run("SELECT number, digest FROM act ORDER BY number DESC LIMIT 1")
    last, digest = found[0] if found else (0, FIRST_DIGEST)
    if last != seen:
        raise BooksMoved(seen, last)
    recorded = numbered(acts, last, digest)
    for act in recorded:
        cursor.run(
            "INSERT INTO act VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            [act.number, act.at_ms, act.kind, act.subject, act.who, act.reason, act.content, act.digest],
        )
    return recorded
