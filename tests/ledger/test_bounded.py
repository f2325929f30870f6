"""Start-up and borrowed time of a long span are computed in parts of limited size, with the same result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from accountant.storage.duckdb_engine import Cursor, Database, Row
from accountant.storage.duckdb_ledger import open_ledger
from accountant.storage.ledger_state import State, load
from accountant.storage.query.startup_and_lent_time import idle_phases, lent_time
from accountant.wire.usage_cost_and_job_models import Dimension
from agent.wire import Holder
from gputally.base.clock import VirtualClock
from gputally.base.units import MS_PER_HOUR
from tests.ledger.conftest import MINUTE, START_MS, Hand

HOURS, GPUS = 8, 6
SPAN = (START_MS + 7 * MINUTE + 1, START_MS + HOURS * MS_PER_HOUR - 11 * MINUTE)
BYS: tuple[tuple[Dimension, ...], ...] = ((), ("namespace", "day"), ("hour", "gpu", "pod"))


class CountingCursor(Cursor):
    """Passes statements to another cursor and stores the number of rows of the longest result."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self.longest = 0

    def run(self, sql: str, *arguments: Any, **named: Any) -> list[Row]:
        rows = self._cursor.run(sql, *arguments, **named)
        self.longest = max(self.longest, len(rows))
        return rows

    def columns(self, sql: str, *arguments: Any, **named: Any) -> Mapping[str, Any]:
        columns = self._cursor.columns(sql, *arguments, **named)
        self.longest = max(self.longest, *map(len, columns.values()))
        return columns


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[CountingCursor, State]]:
    """Two pods of a gang share each GPU for three hours, then two others. All start late, and some borrow time."""
    place, hand, end = tmp_path_factory.mktemp("bounded") / "ledger.duckdb", Hand(), START_MS + HOURS * MS_PER_HOUR
    ledger = open_ledger(place, VirtualClock(end))
    rows, pods, seq = [], {}, 0
    for quarter in range(HOURS * 4):
        for gpu in range(GPUS):
            for side in range(2):
                seq += 1
                life = quarter // 12
                name = f"p{life}-{gpu}-{side}"
                pods.setdefault(name, (life, gpu))
                whole = 900_000_000
                busy = (seq * 98_765_431) % (whole if side else whole // 3)
                rows.append(
                    hand.row(
                        seq,
                        quarter * 15,
                        quarter * 15 + 15,
                        f"gpu-{gpu}",
                        busy_us=busy,
                        capacity_us=whole // 2,
                        allocated_us=whole // 2,
                        holder=Holder("pod", name, f"ns-{gpu % 2}", name),
                    )
                )
    facts = []
    for name, (life, gpu) in pods.items():
        seq += 1
        bound = START_MS + life * 3 * MS_PER_HOUR
        facts.append(
            hand.fact(
                seq,
                name,
                name=name,
                namespace=f"ns-{gpu % 2}",
                workload=f"PyTorchJob/t{life}-{gpu // 3}",
                created_ms=bound,
                scheduled_ms=bound,
                started_ms=bound + (hash_of(name) % 50) * MINUTE,
            )
        )
    (receipt,) = ledger.append([hand.batch(*rows, *facts)], end)
    assert not isinstance(receipt, Exception)
    assert receipt.quarantined == 0
    ledger.checkpoint()
    ledger.close()
    database = Database(place)
    with database.cursor() as cursor:
        yield CountingCursor(cursor), load(cursor)
    database.close()


def hash_of(name: str) -> int:
    return sum(map(ord, name)) * 31


@pytest.mark.parametrize("by", BYS)
@pytest.mark.parametrize("most", [5, 37])
def test_the_parts_are_the_whole(kept: tuple[CountingCursor, State], by: tuple[Dimension, ...], most: int) -> None:
    cursor, state = kept
    moved = lent_time(cursor, state, *SPAN, by, "Europe/Berlin")
    assert lent_time(cursor, state, *SPAN, by, "Europe/Berlin", most=most) == moved
    assert sum(each.gpu_us for each in moved) == 0
    early = idle_phases(cursor, state, *SPAN, by, "Europe/Berlin")
    assert idle_phases(cursor, state, *SPAN, by, "Europe/Berlin", most=most) == early
    assert sum(each.starting_us for each in early) > 0
    assert sum(each.gang_waiting_us for each in early) > 0
    assert bool(moved) or by == ()


def test_no_answer_of_the_engine_is_longer_than_an_hour_or_a_gang(kept: tuple[CountingCursor, State]) -> None:
    cursor, state = kept
    longest = {}
    for most in (1, 10**6):
        cursor.longest = 0
        lent_time(cursor, state, *SPAN, (), "UTC", most=most)
        # Four quarter-hours of every GPU, its two holders each.
        longest[most] = cursor.longest
    assert longest[1] <= 4 * GPUS * 2 < longest[10**6]
    for most in (1, 10**6):
        cursor.longest = 0
        idle_phases(cursor, state, *SPAN, (), "UTC", most=most)
        longest[most] = cursor.longest
    assert longest[1] < longest[10**6]
