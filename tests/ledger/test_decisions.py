"""Decisions of controllers that share a ledger."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accountant.storage.duckdb_engine import statement
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from accountant.storage.folder_or_object_store import in_folder
from accountant.wire.policy_models import Decision
from gputally.base.clock import VirtualClock
from tests.ledger.conftest import NOW_MS

DAY_MS = 86_400_000


def decided(cluster: str, subject: str = "vision") -> Decision:
    return Decision(
        id=f"v/1/kai/{subject}", at_ms=1, kind="weight", target="kai", subject=subject, mode="dry-run", reason=cluster,
        policy_version="v", cluster=cluster,
    )  # fmt: skip


def test_two_controllers_may_decide_alike_in_one_millisecond(ledger: DuckLedger) -> None:
    both = [decided("prod"), decided("staging")]
    assert ledger.record_decisions(both, NOW_MS) == 2
    assert ledger.record_decisions([*both, decided("")], NOW_MS) == 1, "those of both are known by now"
    assert {decision.cluster for decision in ledger.decisions(0, 2)} == {"prod", "staging", ""}
    own = ledger.decisions(0, 2, cluster="prod")
    assert {decision.cluster for decision in own} == {"prod", ""}, "an older controller said no name"


def of_day(day: int) -> Decision:
    return decided("prod").model_copy(update={"id": f"v/{day}/kai/vision", "at_ms": NOW_MS + day * DAY_MS})


def test_a_lookup_of_known_decisions_reads_no_others_than_those_of_its_instants(path: Path) -> None:
    """The engine's count of the rows that it read from the table. It skips most row groups."""
    ledger = DuckLedger(path, VirtualClock(NOW_MS))
    with ledger._transaction() as cursor:
        cursor.run(
            "INSERT INTO decision SELECT 'prod/v/' || i, $now + i, $now, '{}', i + 1 FROM range(500_000) t(i)",
            {"now": NOW_MS},
        )
        ledger._commit(cursor, ledger._state)
    ledger.checkpoint()
    asked = {"low": NOW_MS + 499_990, "high": NOW_MS + 499_999, "ids": ["prod/v/499995", "prod/v/1"]}
    with ledger._snapshot() as (cursor, _):
        assert cursor.rows("known_decisions", asked) == [("prod/v/499995",)]
        profile = cursor.run("EXPLAIN (ANALYZE, FORMAT json) " + statement("known_decisions"), asked)[0][1]
    scanned = [node["operator_cardinality"] for node in nodes(json.loads(profile)) if "SCAN" in node["operator_name"]]
    assert sum(scanned) <= 20
    ledger.close()


def nodes(plan: Any) -> Iterator[Any]:
    for child in plan.get("children", []):
        if "operator_name" in child:
            yield child
        yield from nodes(child)


def test_decisions_past_their_retention_leave_the_ledger_and_the_newer_stay(ledger: DuckLedger) -> None:
    told = [of_day(day) for day in range(5)]
    ledger.record_decisions(told, NOW_MS)
    assert ledger.remove_decisions(NOW_MS + 2 * DAY_MS) == 2
    assert ledger.decisions(0, NOW_MS + 9 * DAY_MS) == told[:1:-1]
    assert ledger.remove_decisions(NOW_MS + 2 * DAY_MS) == 0
    assert ledger.record_decisions(told[2:], NOW_MS) == 0


def test_only_archived_decisions_are_removed_and_new_ones_are_archived_afterwards(path: Path, tmp_path: Path) -> None:
    def opened(place: Path) -> DuckLedger:
        return open_ledger(place, VirtualClock(NOW_MS), archive=in_folder(tmp_path / "archive"))

    ledger = opened(path)
    ledger.record_decisions([of_day(0), of_day(1)], NOW_MS)
    assert ledger.remove_decisions(NOW_MS + 9 * DAY_MS) == 0, "no part has them"
    ledger.archive(NOW_MS)
    assert ledger.remove_decisions(NOW_MS + 9 * DAY_MS) == 2
    ledger.close()
    ledger = opened(path)  # that it once had others is known from the archive's numbers alone
    ledger.record_decisions([of_day(2)], NOW_MS)
    ledger.archive(NOW_MS)
    assert ledger.decisions(0, NOW_MS + 9 * DAY_MS) == [of_day(2)]
    ledger.close()
    rebuilt = opened(tmp_path / "rebuilt.duckdb")
    assert rebuilt.decisions(0, NOW_MS + 9 * DAY_MS) == [of_day(2), of_day(1), of_day(0)]
    rebuilt.close()
