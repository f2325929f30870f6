"""All queries of a snapshot are answered from the same commit."""

from __future__ import annotations

from typing import Any

from accountant.storage.duckdb_ledger import DuckLedger


def test_what_is_written_meanwhile_is_not_seen(ledger: DuckLedger, hand: Any) -> None:
    span = hand.start_ms, hand.now_ms
    ledger.append([hand.batch(hand.row(1))], hand.now_ms)
    with ledger.moment() as moment:
        before = moment.usage(*span, ("pod",))
        ledger.append([hand.batch(hand.row(2, 1, 2), hand.fact(3, created_ms=hand.start_ms))], hand.now_ms)
        assert moment.usage(*span, ("pod",)) == before
        assert moment.pods(*span) == []
        assert moment.coverage(*span) < ledger.coverage(*span)
    assert ledger.usage(*span, ("pod",)) != before
    assert len(ledger.pods(*span)) == 1
