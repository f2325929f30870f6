"""The trail of acts: in the transaction of what they tell, chained, so that any tampering shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from accountant.ledger.journal import NewAct, broken_at
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from accountant.storage.write import inventory_and_journal_tables
from accountant.wire.policy_models import Policy
from gputally.base.clock import VirtualClock

ACTS = [NewAct(n, "closed", f"2026-0{n}", "ann", "as agreed") for n in range(1, 6)]
POLICY = Policy.model_validate({"queues": [{"name": "vision"}]})


def test_the_trail_shows_what_was_changed_taken_out_or_put_in(ledger: DuckLedger) -> None:
    ledger.record(ACTS, 0)
    whole = ledger.trail(0, 100)
    assert broken_at(whole) is None
    assert ledger.trail(2, 2) == whole[2:4]
    assert broken_at(whole[2:], whole[1].number, whole[1].digest) is None
    assert broken_at([*whole[:2], *whole[3:]]) == 3
    assert broken_at([*whole[:3], replace(whole[3], who="bob"), whole[4]]) == 4
    assert broken_at([whole[1], whole[0]]) == 1


def test_a_policy_is_an_act_of_who_put_it(ledger: DuckLedger, path: Path, clock: VirtualClock) -> None:
    ledger.put_policy(POLICY, 100, "ann")
    ledger.put_policy(POLICY, 200, "bob")  # nothing changed: nobody did anything
    ledger.record(ACTS[:2], 1)
    ledger.close()
    again = open_ledger(path, clock)
    again.record(ACTS[2:], 3)
    trail = again.trail(0, 100)
    again.close()
    assert [act.number for act in trail] == [1, 2, 3, 4, 5, 6]
    assert (trail[0].who, trail[0].kind, trail[0].subject) == ("ann", "policy", POLICY.version())
    assert broken_at(trail) is None


def test_a_failed_act_leaves_no_trace(ledger: DuckLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(inventory_and_journal_tables, "write_policy", fails)
    with pytest.raises(RuntimeError):
        ledger.put_policy(POLICY, 100, "ann")
    assert ledger.trail(0, 100) == []
