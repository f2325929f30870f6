"""Acts are numbered without gaps, recorded all or none, and only if the caller has seen the last act. The fake does the
same."""

from __future__ import annotations

import pytest

from accountant.ledger.journal import BooksMoved, NewAct
from accountant.storage.duckdb_ledger import open_ledger
from tests.fakes.journal import MemoryJournal

CLOSED = NewAct(1, "closed", "2026-10", "ada", "the month is over", '{"a": "ü"}')
PRICES = NewAct(2, "prices", "abc", "file", "", "{}")


@pytest.fixture(params=["ledger", "memory"])
def journal(request):
    return request.getfixturevalue("ledger") if request.param == "ledger" else MemoryJournal()


def test_acts_are_numbered_in_order(journal):
    assert (journal.last_act(), journal.acts()) == (0, [])
    first = journal.record([CLOSED, PRICES], 0)
    assert [act.number for act in first] == [1, 2]
    assert journal.record([CLOSED], 2)[0].number == 3
    assert journal.last_act() == 3
    assert [act.number for act in journal.acts("closed")] == [1, 3]
    assert [act.number for act in journal.acts("closed", "prices", subject="2026-10")] == [1, 3]
    assert journal.acts("reopened") == []
    found = journal.acts()[0]
    assert (found.at_ms, found.who, found.reason, found.content) == (1, "ada", "the month is over", '{"a": "ü"}')


def test_nobody_acts_on_books_that_moved(journal):
    journal.record([CLOSED], 0)
    with pytest.raises(BooksMoved, match="from act 0 to act 1"):
        journal.record([PRICES, CLOSED], 0)
    assert journal.last_act() == 1


def test_acts_outlive_the_process(path, clock, ledger):
    ledger.record([CLOSED], 0)
    ledger.close()
    again = open_ledger(path, clock)
    assert [act.subject for act in again.acts()] == ["2026-10"]
    again.close()
