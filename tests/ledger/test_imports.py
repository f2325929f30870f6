"""Agents' rows take precedence over imported rows in any order of arrival, and imported GPUs end with their last
record."""

from __future__ import annotations

import itertools

from accountant.history_import.import_run import epoch, first_seq
from accountant.storage.duckdb_ledger import open_ledger
from tests.ledger.conftest import MINUTE, NOW_MS, START_MS

SEQ = first_seq(START_MS)
EPOCH = epoch("prometheus", START_MS)


def imports(hand, *rows, seq=SEQ, **changes):
    made = [hand.row(seq + n, start, end, gpu=gpu, method="imported", busy_us=None) for n, (start, end, gpu) in
            enumerate(rows)]  # fmt: skip
    return hand.batch(*made, epoch=EPOCH, oldest_seq=made[0].seq, **changes)


def test_what_an_agent_measured_or_carried_wins_whatever_came_first(hand, tmp_path, clock):
    told = imports(hand, (0, 10, "gpu-1"))
    measured = hand.batch(hand.row(1, 2, 5, busy_us=60_000_000), epoch="0192-a")
    carried = hand.batch(hand.row(1, 5, 7, method="carried"), epoch="0192-b")
    answers = []
    for number, order in enumerate(itertools.permutations([told, measured, carried])):
        ledger = open_ledger(tmp_path / f"{number}.duckdb", clock)
        for batch in order:
            ledger.append([batch], NOW_MS)
        assert ledger.imbalance(START_MS, NOW_MS) == 0
        answers.append([line.accounts_gpu_us for line in ledger.usage(START_MS, START_MS + 10 * MINUTE, ())])
        assert ledger.imports("prod").metered == {"n1": (START_MS + 2 * MINUTE, START_MS + 7 * MINUTE)}
        ledger.close()
        again = open_ledger(tmp_path / f"{number}.duckdb", clock)
        assert again.imports("prod").metered == {"n1": (START_MS + 2 * MINUTE, START_MS + 7 * MINUTE)}
        again.close()
    assert all(answer == answers[0] for answer in answers)
    (accounts,) = answers[0]
    assert (accounts.busy, accounts.allocated_unknown) == (2 * 60_000_000, 5 * 60_000_000)
    assert accounts.total == 10 * 60_000_000


def test_an_imported_gpu_is_capacity_up_to_its_last_record_alone(ledger, hand, accounts):
    ledger.append([imports(hand, (0, 10, "imported:n1/0"))], NOW_MS)
    assert accounts(0, 60) == {"allocated_unknown": 600_000_000}
    assert ledger.imports("prod").metered == {}
    # Once an agent meters the GPU it goes on, and what lies between is known to be unmetered.
    ledger.append([imports(hand, (10, 20, "gpu-1"), seq=SEQ + 1)], NOW_MS)
    assert accounts(10, 60) == {"allocated_unknown": 600_000_000}
    ledger.append([hand.batch(hand.row(1, 30, 31))], NOW_MS)
    assert accounts(10, 40)["unmetered"] == 19 * 60_000_000
    assert ledger.imports("prod").metered == {"n1": (START_MS + 30 * MINUTE, START_MS + 31 * MINUTE)}


def test_numbers_between_chunks_are_no_loss_and_resending_stores_nothing(ledger, hand):
    first, later = imports(hand, (0, 10, "gpu-1")), imports(hand, (10, 20, "gpu-1"), seq=SEQ + 10 * 1_000_000)
    for batch in (first, later):
        (receipt,) = ledger.append([batch], NOW_MS)
        assert receipt.stored == 1
    assert ledger.holes() == []
    assert ledger.imports("prod").marks == {"n1": {EPOCH: SEQ + 10 * 1_000_000}}
    for batch in (first, later):
        (receipt,) = ledger.append([batch], NOW_MS)
        assert (receipt.stored, receipt.duplicates, receipt.quarantined) == (0, 1, 0)


def test_what_agents_and_imports_told_stays_apart_over_a_restart_and_a_checkpoint(path, clock, hand):
    ledger = open_ledger(path, clock)
    ledger.append([hand.batch(hand.row(1, 30, 31))], NOW_MS)
    ledger.append([imports(hand, (0, 10, "gpu-1"), (0, 10, "gpu-2"), node="n2")], NOW_MS)
    ledger.append([hand.batch(hand.row(2, 31, 40))], NOW_MS)
    ledger.checkpoint()
    before = ledger.imports("prod"), ledger.usage(START_MS, NOW_MS, ("node",))
    ledger.close()
    again = open_ledger(path, clock)
    assert (again.imports("prod"), again.usage(START_MS, NOW_MS, ("node",))) == before
    again.close()
    assert before[0].metered == {"n1": (START_MS + 30 * MINUTE, START_MS + 40 * MINUTE)}
