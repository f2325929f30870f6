"""Writes a ledger of many million rows with the engine itself: the usage of a fleet of agents, with its sums.

Every row is a GPU-minute. One pod holds a node's eight GPUs for a day, then the next; every eighth stretch is unheld.
Rows are in order of time, as they arrive in practice. The ledger's own statements (`accountant.storage.write.rollups`)
fold completed hours and days; the current hour stays unfolded, as in practice."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from zoneinfo import ZoneInfo

from accountant.storage.duckdb_engine import Cursor, Database
from accountant.storage.write import record_columns
from accountant.storage.write.rollups import DailySums, keep, row_range
from accountant.wire.policy_models import Policy, QueuePolicy
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR

BEGIN_MS = 1_790_812_800_000  # 2026-10-01T00:00Z
GPUS_A_NODE, SLOT_MINUTES, IDLE_EVERY = 8, 1_440, 8
MODELS = ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3")


@dataclass(frozen=True, slots=True)
class Fleet:
    """One row for each GPU and interval; queues queue-0 … of the policy, a team for every fourth. step: minutes of an
    interval."""

    nodes: int
    minutes: int
    queues: int
    begin_ms: int = BEGIN_MS
    prefix: str = "node"
    step: int = 1

    @property
    def gpus(self) -> int:
        return self.nodes * GPUS_A_NODE

    @property
    def rows(self) -> int:
        return self.gpus * self.minutes // self.step

    @property
    def end_ms(self) -> int:
        return self.begin_ms + self.minutes * 60_000

    def policy(self) -> Policy:
        return Policy(
            queues=tuple(
                QueuePolicy(name=f"queue-{i}", team=f"team-{i // 4}", refs=(f"kai:queue-{i}",))
                for i in range(self.queues)
            )
        )


def write(path: Path, fleet: Fleet, told: Callable[[float], None] = lambda _: None) -> None:
    """Write the ledger file. told: receives the completed share from time to time."""
    database = Database(path)
    try:
        with database.cursor() as cursor:
            _names(cursor, fleet)
        at = fleet.begin_ms
        while at < fleet.end_ms:
            until = min(at + MS_PER_DAY, fleet.end_ms)
            with database.cursor() as cursor:
                cursor.run("BEGIN")
                low, high = ((edge - fleet.begin_ms) // 60_000 // fleet.step for edge in (at, until))
                cursor.run(_ROWS, {**_shape(fleet), "low": low, "high": high, "step": fleet.step})
                _fold(cursor, at, until)
                cursor.run("COMMIT")
                cursor.run("CHECKPOINT")
            told((until - fleet.begin_ms) / (fleet.end_ms - fleet.begin_ms))
            at = until
    finally:
        database.close()


def write_apart(path: Path, fleet: Fleet) -> None:
    """Write it in a process of its own, so that its memory does not count here."""
    shape = map(str, (fleet.nodes, fleet.minutes, fleet.queues))
    subprocess.run([sys.executable, "-m", __name__, str(path), *shape], check=True)


def holding(fleet: Fleet) -> str:
    """Return SQL of the holders: node, slot, pod number, queue."""
    slots = -(-fleet.minutes // SLOT_MINUTES)
    return (
        f"SELECT n AS node, s AS slot, n * {slots} + s + 1 AS pod, (n * 13 + s * 7) % {fleet.queues} AS queue "
        f"FROM range({fleet.nodes}) a(n), range({slots}) b(s) WHERE (n * 7 + s) % {IDLE_EVERY} != 0"
    )


def _shape(fleet: Fleet) -> dict[str, object]:
    return {"begin": fleet.begin_ms, "nodes": fleet.nodes, "slots": -(-fleet.minutes // SLOT_MINUTES)}


def _names(cursor: Cursor, fleet: Fleet) -> None:
    shape = {"nodes": fleet.nodes, "prefix": fleet.prefix}
    for statement in _NAMES:
        cursor.run(statement, shape)
    cursor.run("INSERT INTO mark SELECT n + 1, $seqs FROM range($nodes) r(n)",
               {"nodes": fleet.nodes, "seqs": fleet.minutes * GPUS_A_NODE})  # fmt: skip
    cursor.run(
        "INSERT INTO tenure SELECT g + 1, $prefix || '-' || (g // 8), $begin, $end, FALSE FROM range($nodes * 8) r(g)",
        {**shape, "begin": fleet.begin_ms, "end": fleet.end_ms},
    )
    cursor.run(
        f"INSERT INTO holder SELECT pod, 'bench', 'pod', $prefix || pod, 'ns-' || queue, 'train-' || pod, 'main' "
        f"FROM ({holding(fleet)})",
        {"prefix": f"{fleet.prefix}-"},
    )
    cursor.run(
        "INSERT INTO pod SELECT 'bench', $prefix || pod, 'ns-' || queue, 'train-' || pod, 'Job/train-' || pod, "
        "'kai:queue-' || queue, since_ms, json_object('seq', 0, 'uid', $prefix || pod, 'namespace', 'ns-' || queue, "
        "'name', 'train-' || pod, 'node', $prefix || node, 'queue_ref', 'kai:queue-' || queue, "
        "'workload', 'Job/train-' || pod, 'observed_ms', since_ms, "
        "'created_ms', since_ms - 90000, 'scheduled_ms', since_ms - 30000, 'started_ms', since_ms) "
        f"FROM (SELECT *, {fleet.begin_ms} + slot * {SLOT_MINUTES} * 60000 AS since_ms FROM ({holding(fleet)}))",
        {"prefix": f"{fleet.prefix}-"},
    )


def _fold(cursor: Cursor, start_ms: int, end_ms: int) -> None:
    over = [(at,) for at in range(start_ms, end_ms, MS_PER_HOUR) if at + MS_PER_HOUR <= end_ms]
    hours = record_columns.column_table(record_columns.HOUR, over)
    cursor.rows("fold", row_range([at for (at,) in over]), incoming=hours)
    cursor.rows("keep_folded", incoming=hours)
    if not (start_ms % MS_PER_DAY or end_ms % MS_PER_DAY):
        day = DailySums((), frozenset(at for (at,) in over))
        keep(cursor, day, (), end_ms, ZoneInfo("UTC"))
    if end_ms % MS_PER_HOUR:
        cursor.run("INSERT INTO unfolded VALUES (?)", [end_ms - end_ms % MS_PER_HOUR])


_NAMES = (
    "INSERT INTO stream SELECT n + 1, 'bench', $prefix || '-' || n, 'e' FROM range($nodes) r(n)",
    "INSERT INTO gpu SELECT g + 1, 'bench', 'GPU-' || $prefix || '-' || g FROM range($nodes * 8) r(g)",
    f"""INSERT INTO device
    SELECT g + 1, g + 1, $prefix || '-' || (g // 8),
           CASE WHEN g // 8 % 2 = 0 THEN '{MODELS[0]}' ELSE '{MODELS[1]}' END, '',
           -1, -1, 0, 0, 0, 0
    FROM range($nodes * 8) r(g)""",
)
_ROWS = f"""
INSERT INTO received
SELECT node + 1, m * 8 + g % 8 + 1, m * 8 + g % 8 + 1, $begin + m * $step * 60000, $begin + (m + 1) * $step * 60000,
       g + 1, g + 1, pod, pod, NULL, NULL, 'ok', 'device', whole, if(pod > 0, whole, 0), if(pod > 0, busy, 0),
       NULL, hash(m, g), TRUE,
       if(pod > 0, busy, 0), if(pod > 0, whole - busy, 0), 0, if(pod > 0, 0, whole), 0, 0, 0,
       2400000 * $step, 24000000000 * $step, 0, 0, if(pod > 0, busy, 0), 0, if(pod > 0, busy // 2, 0), 0
FROM (
    SELECT m, g, g // 8 AS node, (g * 7 + m * 13) % 61 * 1000000 * $step AS busy, 60000000 * $step AS whole,
           m * $step // {SLOT_MINUTES} AS slot,
           if((g // 8 * 7 + slot) % {IDLE_EVERY} = 0, 0, g // 8 * $slots + slot + 1) AS pod
    FROM (
        SELECT i // ($nodes * 8) AS m, i % ($nodes * 8) AS g
        FROM range($low * $nodes * 8, $high * $nodes * 8) r(i)
    )
)
"""


if __name__ == "__main__":
    nodes, minutes, queues = map(int, sys.argv[2:])
    write(Path(sys.argv[1]), Fleet(nodes, minutes, queues))
