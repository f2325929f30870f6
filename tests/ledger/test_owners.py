"""A GPU belongs to the node that first reported it. Sets of another node are quarantined."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accountant.core.errors import CannotMove
from accountant.ledger.protocols import GpuMove
from accountant.storage.duckdb_engine import Database
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from accountant.storage.folder_or_object_store import in_folder
from gputally.base.clock import VirtualClock

MINUTE = 60_000
OLDEST = "00000000-0000-7000-8000-000000000000"
"""Sorts before every honest epoch."""


def _reasons(ledger: DuckLedger) -> set[tuple[str, str]]:
    return {(one.node, one.reason) for one in ledger.quarantined()}


def test_an_epoch_that_sorts_first_displaces_no_other_nodes_rows(ledger: Any, hand: Any, accounts: Any) -> None:
    ledger.append([hand.batch(hand.row(1), hand.row(2, 1, 2))], hand.now_ms)
    before = accounts(0, 2, node="n1")
    (receipt,) = ledger.append(
        [hand.batch(hand.row(1, holder=None), hand.row(2, 1, 2, holder=None), node="n2", epoch=OLDEST)], hand.now_ms
    )
    assert (receipt.stored, receipt.quarantined, receipt.ack.durable_seq) == (0, 2, 2)
    assert accounts(0, 2, node="n1") == before
    assert accounts(0, 2, node="n2") == {}
    refused = ledger.quarantined()[0]
    assert refused.reason == "foreign-gpu"
    assert all(name in refused.detail for name in ("'n1'", "'n2'", "gpu-1"))


def test_the_past_before_the_owners_first_record_and_after_its_last_is_no_other_nodes(
    ledger: Any, hand: Any, accounts: Any
) -> None:
    ledger.append([hand.batch(hand.row(1, 30, 31))], hand.now_ms)
    ledger.append([hand.batch(hand.row(1, 0, 1), hand.row(2, 40, 41), node="n2", epoch=OLDEST)], hand.now_ms)
    assert accounts(0, 60, node="n2") == {}
    assert _reasons(ledger) == {("n2", "foreign-gpu")}


def test_of_two_claims_in_one_commit_the_first_counts(ledger: Any, hand: Any, accounts: Any) -> None:
    ledger.append([hand.batch(hand.row(1)), hand.batch(hand.row(1), node="n2", epoch=OLDEST)], hand.now_ms)
    assert _reasons(ledger) == {("n2", "foreign-gpu")}
    assert accounts(0, 1, node="n1")


def test_the_same_uuid_in_another_cluster_is_another_gpu(ledger: Any, hand: Any) -> None:
    ledger.append([hand.batch(hand.row(1)), hand.batch(hand.row(1), cluster="other", node="n2")], hand.now_ms)
    assert not ledger.quarantined()


@pytest.mark.parametrize("reopened", [False, True], ids=["same process", "restarted"])
def test_a_card_that_moved_is_taken_over_after_an_hour_of_silence(
    path: Path, clock: VirtualClock, hand: Any, reopened: bool
) -> None:
    ledger = open_ledger(path, clock)
    ledger.append([hand.batch(hand.row(1, 58, 59))], hand.now_ms)
    if reopened:
        ledger.close()
        ledger = open_ledger(path, clock)
        ledger.append([hand.batch(hand.row(1, gpu="gpu-9"), node="n9")], hand.now_ms)

    def claim(seq: int, start: int) -> Any:
        now = hand.start_ms + (start + 1) * MINUTE
        return ledger.append([hand.batch(hand.row(seq, start, start + 1), node="n2")], now)[0]

    assert claim(1, 118).quarantined == 1  # silent for 59 minutes
    assert claim(2, 121).stored == 1
    # What the first node still has of its own time is booked, what it claims of the new owner's is not.
    late = hand.batch(hand.row(2, 100, 101), hand.row(3, 122, 123))
    (receipt,) = ledger.append([late], hand.start_ms + 124 * MINUTE)
    assert (receipt.stored, receipt.quarantined) == (1, 1)
    assert _reasons(ledger) == {("n1", "foreign-gpu"), ("n2", "foreign-gpu")}
    ledger.close()


def test_an_owner_is_not_silent_while_the_accountant_could_not_hear_it(
    path: Path, clock: VirtualClock, hand: Any
) -> None:
    with_rows = open_ledger(path, clock)
    with_rows.append([hand.batch(hand.row(1, 0, 1))], hand.now_ms)
    with_rows.close()
    ledger = open_ledger(path, clock)
    later = hand.start_ms + 5 * 60 * MINUTE
    (receipt,) = ledger.append([hand.batch(hand.row(1, 298, 299), node="n2")], later)
    assert receipt.quarantined == 1
    (receipt,) = ledger.append([hand.batch(hand.row(2, 1, 2), hand.row(3, 298, 299))], later)
    assert receipt.stored == 2
    ledger.close()


def test_an_owner_that_reports_other_gpus_alone_is_without_this_one(ledger: Any, hand: Any) -> None:
    ledger.append([hand.batch(hand.row(1), hand.row(2, gpu="gpu-2"))], hand.start_ms + MINUTE)
    for number in range(1, 62):
        now = hand.start_ms + (number + 1) * MINUTE
        ledger.append([hand.batch(hand.row(number + 2, number, number + 1, gpu="gpu-2"))], now)
    (receipt,) = ledger.append([hand.batch(hand.row(1, 62, 63), node="n2")], hand.start_ms + 63 * MINUTE)
    assert receipt.stored == 1


def test_an_import_displaces_no_node_and_no_node_displaces_an_import(
    ledger: Any, hand: Any, accounts: Callable[..., Any]
) -> None:
    imported: dict[str, Any] = {"epoch": "import:slurm:00000000000000"}
    ledger.append([hand.batch(hand.row(1, 0, 1, method="imported"), node="n2", **imported)], hand.now_ms)
    ledger.append([hand.batch(hand.row(1, 0, 1), hand.row(2, 10, 11))], hand.now_ms)
    assert _reasons(ledger) == {("n1", "foreign-gpu")}
    assert accounts(0, 1, node="n2")
    # n1 has it from minute 10 on: an import of n2 has no part in that, nor in what lies behind it.
    more = hand.batch(
        hand.row(2, 10, 11, method="imported"), hand.row(3, 12, 13, method="imported"), node="n2", **imported
    )
    (receipt,) = ledger.append([more], hand.now_ms)
    assert receipt.quarantined == 2


def test_an_admin_confirms_a_move_and_what_lies_before_stays_the_former_owners(
    ledger: Any, hand: Any, accounts: Any
) -> None:
    ledger.append([hand.batch(hand.row(1)), hand.batch(hand.row(1, 1, 2), node="n2")], hand.now_ms)
    before = accounts(0, 1, node="n1")
    (shown,) = ledger.gpu_owners()
    assert [(one.node, one.until_ms) for one in shown.owners] == [("n1", None)]
    assert [(one.node, one.records) for one in shown.claims] == [("n2", 1)]
    (moved,) = ledger.move_gpus(GpuMove("n2", ("gpu-1",)), hand.now_ms, "ada", "card swapped")
    assert [(one.node, one.from_ms, one.until_ms, one.confirmed_by) for one in moved.owners] == [
        ("n1", hand.start_ms, hand.start_ms + MINUTE, ""),
        ("n2", hand.start_ms + MINUTE, None, "ada"),
    ]
    assert ledger.gpu_owners() == (moved,)
    new = hand.batch(hand.row(2, 1, 2), hand.row(3, 0, 1), node="n2", epoch=OLDEST, first_seq=2, oldest_seq=2)
    (receipt,) = ledger.append([new], hand.now_ms)
    assert (receipt.stored, receipt.quarantined) == (1, 1)
    (receipt,) = ledger.append([hand.batch(hand.row(2, 2, 3))], hand.now_ms)
    assert receipt.quarantined == 1
    assert accounts(0, 1, node="n1") == before
    assert accounts(1, 2, node="n2")


def test_a_confirmed_move_is_an_act_and_the_former_owner_has_to_wait_again(
    path: Path, clock: VirtualClock, hand: Any
) -> None:
    ledger = open_ledger(path, clock)
    ledger.append([hand.batch(hand.row(1)), hand.batch(hand.row(1, gpu="gpu-2"), node="n2")], hand.now_ms)
    later = hand.start_ms + 180 * MINUTE
    ledger.move_gpus(GpuMove("n2", ("gpu-1",)), later, "ada", "card swapped")
    (act,) = ledger.acts("moved")
    assert (act.who, act.reason, act.subject) == ("ada", "card swapped", "prod/n2")
    assert json.loads(act.content) == [
        {"gpu": "gpu-1", "from_node": "n1", "node": "n2", "from_ms": hand.start_ms + MINUTE}
    ]
    (receipt,) = ledger.append([hand.batch(hand.row(2, 179, 180))], later)
    assert receipt.quarantined == 1
    ledger.close()
    ledger = open_ledger(path, clock)
    moved = next(one for one in ledger.gpu_owners() if one.gpu_uuid == "gpu-1")
    assert [(one.node, one.confirmed_by) for one in moved.owners] == [("n1", ""), ("n2", "ada")]
    ledger.close()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (GpuMove("n7", ("gpu-1",)), "cluster 'prod' has no node 'n7'"),
        (GpuMove("n2", ("gpu-7",)), "cluster 'prod' has no GPU 'gpu-7'"),
        (GpuMove("n2", ("gpu-1", "gpu-2")), "GPU gpu-2 already belongs to node 'n2'"),
        (GpuMove("n2", ("gpu-1",), from_ms=1), "node 'n1' has records until"),
        (GpuMove("n2", ("gpu-1",), from_ms=2**45), "is in the future"),
        (GpuMove("n2", ("gpu-1",), cluster="lab"), "cluster 'lab' has no node 'n2'"),
    ],
)
def test_a_move_that_cannot_be_is_refused_as_a_whole(ledger: Any, hand: Any, asked: GpuMove, said: str) -> None:
    ledger.append([hand.batch(hand.row(1)), hand.batch(hand.row(1, gpu="gpu-2"), node="n2")], hand.now_ms)
    before = ledger.gpu_owners()
    with pytest.raises(CannotMove, match=said):
        ledger.move_gpus(asked, hand.now_ms, "ada", "card swapped")
    assert ledger.gpu_owners() == before
    assert ledger.acts("moved") == []


def test_a_move_from_an_instant_on_leaves_the_former_owner_its_time_until_then(ledger: Any, hand: Any) -> None:
    ledger.append([hand.batch(hand.row(1)), hand.batch(hand.row(1, gpu="gpu-2"), node="n2")], hand.now_ms)
    swapped = hand.start_ms + 10 * MINUTE
    ledger.move_gpus(GpuMove("n2", ("gpu-1",), from_ms=swapped), swapped, "ada", "card swapped")
    late = hand.batch(hand.row(2, 8, 9), hand.row(3, 10, 11))
    (receipt,) = ledger.append([late], hand.now_ms)
    assert (receipt.stored, receipt.quarantined) == (1, 1)
    (receipt,) = ledger.append([hand.batch(hand.row(2, 10, 11), node="n2")], hand.now_ms)
    assert receipt.stored == 1


def test_owners_that_only_records_tell_stay_known_after_a_move(path: Path, clock: VirtualClock, hand: Any) -> None:
    """A ledger of an earlier release: it has records, and its register is empty."""
    ledger = open_ledger(path, clock)
    ledger.append([hand.batch(hand.row(1)), hand.batch(hand.row(1, gpu="gpu-2"), node="n2")], hand.now_ms)
    ledger.close()
    database = Database(path)
    with database.cursor() as cursor:
        cursor.run("DELETE FROM gpu_owner")
    database.close()
    ledger = open_ledger(path, clock)
    ledger.move_gpus(GpuMove("n2", ("gpu-1",)), hand.now_ms, "ada", "card swapped")
    ledger.close()
    ledger = open_ledger(path, clock)
    moved = next(one for one in ledger.gpu_owners() if one.gpu_uuid == "gpu-1")
    assert [one.node for one in moved.owners] == ["n1", "n2"]
    (receipt,) = ledger.append([hand.batch(hand.row(2, 0, 1), node="n2")], hand.now_ms)
    assert receipt.quarantined == 1
    ledger.close()


def test_a_move_is_in_the_archive(tmp_path: Path, clock: VirtualClock, hand: Any) -> None:
    archive = tmp_path / "archive"
    ledger = open_ledger(tmp_path / "one.duckdb", clock, archive=in_folder(archive))
    ledger.append([hand.batch(hand.row(1)), hand.batch(hand.row(1, gpu="gpu-2"), node="n2")], hand.now_ms)
    ledger.move_gpus(GpuMove("n2", ("gpu-1",)), hand.now_ms, "ada", "card swapped")
    known = ledger.gpu_owners()
    ledger.archive(hand.now_ms)
    ledger.close()
    rebuilt = open_ledger(tmp_path / "two.duckdb", clock, archive=in_folder(archive))
    assert rebuilt.gpu_owners() == known
    rebuilt.close()
