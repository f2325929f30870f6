"""Acts in their table (accountant.journal): read whole by kind, appended with the next numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from accountant.journal import Act, ActKind, BooksMoved, NewAct
from accountant.store.database import Cursor


def last_act(cursor: Cursor) -> int:
    return int(cursor.run("SELECT coalesce(max(number), 0) FROM act")[0][0])


def read_acts(cursor: Cursor, kinds: Sequence[ActKind], subject: str | None) -> list[Act]:
    rows = cursor.run(
        "SELECT number, at_ms, kind, subject, who, reason, content FROM act "
        "WHERE (len($kinds) = 0 OR list_contains($kinds, kind)) AND ($subject IS NULL OR subject = $subject) "
        "ORDER BY number",
        {"kinds": list(kinds), "subject": subject},
    )
    return [
        Act(number=row[0], at_ms=row[1], kind=row[2], subject=row[3], who=row[4], reason=row[5], content=row[6])
        for row in rows
    ]


def write_acts(cursor: Cursor, acts: Sequence[NewAct], seen: int) -> list[Act]:
    """Raises BooksMoved."""
    last = last_act(cursor)
    if last != seen:
        raise BooksMoved(seen, last)
    numbered = [Act(**asdict(act), number=number) for number, act in enumerate(acts, start=last + 1)]
    for act in numbered:
        cursor.run(
            "INSERT INTO act VALUES (?, ?, ?, ?, ?, ?, ?)",
            [act.number, act.at_ms, act.kind, act.subject, act.who, act.reason, act.content],
        )
    return numbered
