"""Corrects records that a clock which was ahead dated wrongly.

Whatever is dated later than now was dated by a clock that was wrong. Records go into quarantine with that reason, so
that their time is unmetered; policies, observations and decisions get a date that is not in the future; acts stay as
they are, since their digests chain: the act that heals names them. The archive keeps what it was told: a ledger that is
rebuilt from it heals again where it meets that act (`healings`), before it takes over what was recorded after it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from accountant.core.errors import CannotRedate
from accountant.core.periods import utc
from accountant.ledger.journal import NewAct
from accountant.ledger.protocols import MisdatedKind, MisdatedRecords
from accountant.storage.duckdb_engine import Cursor, statement
from accountant.storage.write import record_columns
from accountant.storage.write import rollups as daily
from accountant.storage.write.batch_admission import SKEW_MS
from accountant.storage.write.rollups import DailySums
from gputally.base.units import MS_PER_HOUR

_NAMED = 20
_HEALING: Mapping[MisdatedKind, str] = {
    "records": "into quarantine; their time is unmetered",
    "policies": "in force from when they were put, as the audit trail says, else from now",
    "pods": "as observed now",
    "decisions": "as of now",
    "registers": "what held until then ends now",
    "acts": "stay as they are, named by the act that heals; a month that was closed too early: reopen it",
}


def find(cursor: Cursor, now_ms: int) -> tuple[MisdatedRecords, ...]:
    """By kind, those of which there are any."""
    found = []
    for kind, healing in _HEALING.items():
        rows = cursor.run(statement(f"misdated_{kind}"), {"limit": now_ms + SKEW_MS})
        count, first, last, named = rows[0]
        if count:
            names = tuple(sorted(named)[:_NAMED])
            found.append(
                MisdatedRecords(kind=kind, count=count, first_ms=first, last_ms=last, named=names, healing=healing)
            )
    return tuple(found)


def redate_records(cursor: Cursor, now_ms: int, days: DailySums) -> None:
    """In the caller's transaction. Raises CannotRedate where records lie in the archive alone."""
    limit = {"limit": now_ms + SKEW_MS}
    frozen = cursor.run("SELECT count(*) FROM frozen WHERE at_ms >= $limit", limit)[0][0]
    if frozen:
        raise CannotRedate(f"{frozen} hours after now are in the archive alone: restore a backup from before they were")
    _quarantine(cursor, now_ms, days)
    _redate_policies(cursor, now_ms)
    for name in ("redate_pods", "redate_decisions", "redate_registers"):
        for part in statement(name).split(";"):
            cursor.run(part, {"now": now_ms, **limit})


def redatings_in(cursor: Cursor, acts_file: str) -> list[int]:
    """When the healings of an archived part were done that this ledger does not have yet, in order."""
    found = cursor.run(
        "SELECT p.at_ms FROM read_parquet(?) p WHERE p.kind = 'redated' "
        "AND NOT EXISTS (SELECT 1 FROM act t WHERE t.number = p.number) ORDER BY p.number",
        [acts_file],
    )
    return [at_ms for (at_ms,) in found]


def misdating_act(found: Sequence[MisdatedRecords], now_ms: int, who: str, reason: str) -> NewAct:
    """What is recorded of it."""
    content = json.dumps([one.model_dump() for one in found], sort_keys=True)
    said = ", ".join(f"{one.count} {one.kind}" for one in found)
    return NewAct(now_ms, "redated", utc(now_ms), who, f"{reason} ({said})", content)


def _quarantine(cursor: Cursor, now_ms: int, days: DailySums) -> None:
    limit = {"limit": now_ms + SKEW_MS}
    hours = {hour for (hour,) in cursor.run(statement("misdated_hours"), limit)}
    if not hours:
        return
    for part in statement("quarantine_misdated").split(";"):
        cursor.run(part, {"now": now_ms, **limit} if "$now" in part else limit)
    incoming = record_columns.column_table(record_columns.HOUR, [(hour,) for hour in sorted(hours)])
    cursor.rows("drop_sums", incoming=incoming)
    daily.drop(cursor, days.touching(hours))
    cursor.run("DELETE FROM unfolded WHERE at_ms IN (SELECT unnest($hours))", {"hours": sorted(hours)})
    # What is left of these hours, those of now, is summed from its rows.
    cursor.run(
        "INSERT INTO unfolded SELECT DISTINCT start_ms - start_ms % $hour AS hour_ms FROM present "
        "WHERE start_ms - start_ms % $hour IN (SELECT unnest($hours))",
        {"hours": sorted(hours), "hour": MS_PER_HOUR},
    )


def _redate_policies(cursor: Cursor, now_ms: int) -> None:
    """In their order; each from when its act was recorded, where that is not in the future itself."""
    acts = "SELECT subject, max(at_ms) FROM act WHERE kind = 'policy' AND at_ms <= $now GROUP BY subject"
    put: dict[str, int] = dict(cursor.run(acts, {"now": now_ms}))
    before = 0
    for version, effective in cursor.run("SELECT version, effective_ms FROM policy ORDER BY effective_ms"):
        since = effective
        if effective > now_ms + SKEW_MS:
            since = max(before + 1, put.get(version, now_ms))
            cursor.run(
                "UPDATE policy SET effective_ms = $since WHERE version = $version AND effective_ms = $effective",
                {"since": since, "version": version, "effective": effective},
            )
        before = since
