"""Acts are numbered without gaps, recorded all or none, and chained, so that tampering shows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from accountant.ledger.journal import BooksMoved, NewAct, broken_at
from accountant.storage.duckdb_ledger import open_ledger
from accountant.storage.write import inventory_and_journal_tables
from accountant.wire.policy_models import Policy
from tests.fakes.memory_journal import MemoryJournal
from tests.moments import present

CLOSED = NewAct(1, "closed", "2026-10", "ada", "the month is over", '{"a": "ü"}')
PRICES = NewAct(2, "prices", "abc", "file", "", "{}")


@pytest.fixture(params=["ledger", "memory"])
def journal(request):
    return request.getfixturevalue("ledger") if request.param == "ledger" else MemoryJournal()


def test_acts_are_numbered_in_order(journal):
    assert (journal.status().last_act, present(journal).acts()) == (0, [])
    first = journal.record([CLOSED, PRICES], 0)
    assert [act.number for act in first] == [1, 2]
    assert journal.record([CLOSED], 2)[0].number == 3
    assert journal.status().last_act == 3
    assert [act.number for act in present(journal).acts("closed")] == [1, 3]
    assert [act.number for act in present(journal).acts("closed", "prices", subject="2026-10")] == [1, 3]
    assert present(journal).acts("reopened") == []
    found = present(journal).acts()[0]
    assert (found.at_ms, found.who, found.reason, found.content) == (1, "ada", "the month is over", '{"a": "ü"}')


def test_nobody_acts_on_books_that_moved(journal):
    journal.record([CLOSED], 0)
    with pytest.raises(BooksMoved, match=r"act 1 was recorded meanwhile \(the last act seen was 0\)"):
        journal.record([PRICES, CLOSED], 0)
    assert journal.status().last_act == 1


def test_acts_outlive_the_process(path, clock, ledger):
    ledger.record([CLOSED], 0)
    ledger.close()
    again = open_ledger(path, clock)
    assert [act.subject for act in present(again).acts()] == ["2026-10"]
    again.close()


ACTS = [NewAct(n, "closed", f"2026-0{n}", "ann", "as agreed") for n in range(1, 6)]
POLICY = Policy.model_validate({"queues": [{"name": "vision"}]})


def test_the_trail_shows_what_was_changed_taken_out_or_put_in(ledger):
    ledger.record(ACTS, 0)
    whole = present(ledger).acts(after=0, limit=100)
    assert broken_at(whole) is None
    assert present(ledger).acts(after=2, limit=2) == whole[2:4]
    assert broken_at(whole[2:], whole[1].number, whole[1].digest) is None
    assert broken_at([*whole[:2], *whole[3:]]) == 3
    assert broken_at([*whole[:3], replace(whole[3], who="bob"), whole[4]]) == 4
    assert broken_at([whole[1], whole[0]]) == 1


def test_a_policy_is_an_act_of_who_put_it(ledger, path, clock):
    ledger.put_policy(POLICY, 100, "ann")
    ledger.put_policy(POLICY, 200, "bob")  # nothing changed: nobody did anything
    ledger.record(ACTS[:2], 1)
    ledger.close()
    again = open_ledger(path, clock)
    again.record(ACTS[2:], 3)
    trail = present(again).acts(after=0, limit=100)
    again.close()
    assert [act.number for act in trail] == [1, 2, 3, 4, 5, 6]
    assert (trail[0].who, trail[0].kind, trail[0].subject) == ("ann", "policy", POLICY.version())
    assert broken_at(trail) is None


def test_a_failed_act_leaves_no_trace(ledger, monkeypatch):
    def fails(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(inventory_and_journal_tables, "write_policy", fails)
    with pytest.raises(RuntimeError):
        ledger.put_policy(POLICY, 100, "ann")
    assert present(ledger).acts(after=0, limit=100) == []
