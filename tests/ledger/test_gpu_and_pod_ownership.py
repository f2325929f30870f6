"""A GPU belongs to the node that first reported it, and a pod to its own node; records of other nodes are set aside."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import pytest

from accountant.core.errors import CannotMove
from accountant.ledger.protocols import Facts, GpuMove, NamespaceFacts
from accountant.storage.duckdb_engine import Cursor
from accountant.storage.duckdb_ledger import DuckLedger
from accountant.storage.folder_or_object_store import in_folder
from accountant.wire.policy_models import Policy
from agent.wire import Batch, Holder
from tests.empty_ledger import fresh
from tests.ledger.conftest import MINUTE, Hand, booked
from tests.moments import present

OLDEST = "00000000-0000-7000-8000-000000000000"
"""Sorts before every honest epoch."""
ATTACKER: dict[str, Any] = {"node": "n2", "epoch": OLDEST}


def _reasons(ledger: DuckLedger) -> set[tuple[str, str]]:
    return {(one.node, one.reason) for one in present(ledger).quarantined()}


def test_an_epoch_that_sorts_first_displaces_no_other_nodes_rows(send, ledger, hand, accounts):
    send(hand.row(1), hand.row(2, 1, 2))
    before = accounts(0, 2, node="n1")
    receipt = send(hand.row(1, holder=None), hand.row(2, 1, 2, holder=None), **ATTACKER)
    assert (receipt.stored, receipt.quarantined, receipt.ack.durable_seq) == (0, 2, 2)
    assert accounts(0, 2, node="n1") == before
    assert accounts(0, 2, node="n2") == {}
    refused = present(ledger).quarantined()[0]
    assert refused.reason == "foreign-gpu"
    assert all(name in refused.detail for name in ("'n1'", "'n2'", "gpu-1"))


def test_the_past_before_the_owners_first_record_and_after_its_last_is_no_other_nodes(send, ledger, hand, accounts):
    send(hand.row(1, 30, 31))
    send(hand.row(1, 0, 1), hand.row(2, 40, 41), **ATTACKER)
    assert accounts(0, 60, node="n2") == {}
    assert _reasons(ledger) == {("n2", "foreign-gpu")}


def test_of_two_claims_in_one_commit_the_first_counts(ledger, hand, accounts):
    ledger.append([hand.batch(hand.row(1)), hand.batch(hand.row(1), **ATTACKER)], hand.now_ms)
    assert _reasons(ledger) == {("n2", "foreign-gpu")}
    assert accounts(0, 1, node="n1")


def test_the_same_uuid_in_another_cluster_is_another_gpu(ledger, hand):
    ledger.append([hand.batch(hand.row(1)), hand.batch(hand.row(1), cluster="other", node="n2")], hand.now_ms)
    assert not present(ledger).quarantined()


@pytest.mark.parametrize("reopened", [False, True], ids=["same process", "restarted"])
def test_a_card_that_moved_is_taken_over_after_an_hour_of_silence(opened, hand, reopened):
    ledger = opened()
    booked(ledger, hand.now_ms, hand.batch(hand.row(1, 58, 59)))
    if reopened:
        ledger.close()
        ledger = opened()
        booked(ledger, hand.now_ms, hand.batch(hand.row(1, gpu="gpu-9"), node="n9"))

    def claim(seq: int, start: int) -> Any:
        now = hand.start_ms + (start + 1) * MINUTE
        return booked(ledger, now, hand.batch(hand.row(seq, start, start + 1), node="n2"))

    assert claim(1, 118).quarantined == 1  # silent for 59 minutes
    assert claim(2, 121).stored == 1
    # What the first node still has of its own time is booked, what it claims of the new owner's is not.
    late = hand.batch(hand.row(2, 100, 101), hand.row(3, 122, 123))
    receipt = booked(ledger, hand.start_ms + 124 * MINUTE, late)
    assert (receipt.stored, receipt.quarantined) == (1, 1)
    assert _reasons(ledger) == {("n1", "foreign-gpu"), ("n2", "foreign-gpu")}


def test_an_owner_is_not_silent_while_the_accountant_could_not_hear_it(opened, hand):
    with closing(opened()) as ledger:
        booked(ledger, hand.now_ms, hand.batch(hand.row(1)))
    ledger = opened()
    later = hand.start_ms + 5 * 60 * MINUTE
    assert booked(ledger, later, hand.batch(hand.row(1, 298, 299), node="n2")).quarantined == 1
    assert booked(ledger, later, hand.batch(hand.row(2, 1, 2), hand.row(3, 298, 299))).stored == 2


def test_an_owner_that_reports_other_gpus_alone_is_without_this_one(send, hand):
    send(hand.row(1), hand.row(2, gpu="gpu-2"), now_ms=hand.start_ms + MINUTE)
    for number in range(1, 62):
        now = hand.start_ms + (number + 1) * MINUTE
        send(hand.row(number + 2, number, number + 1, gpu="gpu-2"), now_ms=now)
    assert send(hand.row(1, 62, 63), node="n2", now_ms=hand.start_ms + 63 * MINUTE).stored == 1


HALVES = ((1, range(30, 60)), (31, range(30)))
"""The first sequence number and the minutes of two batches."""
IMPORTED: dict[str, Any] = {"node": "n2", "epoch": "import:slurm:00000000000000"}


@pytest.mark.parametrize("reopened", [False, True], ids=["same process", "restarted"])
@pytest.mark.parametrize("first", ["import", "agent"])
def test_an_agents_measurement_takes_precedence_over_an_import_in_every_order(opened, path, hand, first, reopened):
    """An import names an agent's GPU on another node, for the hour before and the hour in which the agent measures."""
    told = [hand.row(seq, start, start + 60, method="imported") for seq, start in ((1, -60), (2, 0))]
    late, early = ([hand.row(seq, at, at + 1) for seq, at in enumerate(span, first)] for first, span in HALVES)
    steps = [hand.batch(*told, **IMPORTED), hand.batch(*late), hand.batch(*early)]
    ledger = opened(fresh(path))
    for step in steps if first == "import" else steps[1:] + steps[:1]:
        booked(ledger, hand.now_ms, step)
        if reopened:
            ledger.close()
            ledger = opened()
    assert ("n1", "foreign-gpu") not in _reasons(ledger)
    (line,) = present(ledger).usage((hand.start_ms, hand.now_ms), (), {"node": {"n1"}}).lines()
    assert line.accounts_gpu_us.busy == 30 * MINUTE * 1000
    assert present(ledger).usage((hand.start_ms, hand.now_ms), (), {"node": {"n2"}}).lines() == []
    assert present(ledger).imbalance(hand.start_ms - 60 * MINUTE, hand.now_ms).total_us == 0
    (shown,) = present(ledger).gpu_owners()
    assert shown.owners[-1].node == "n1"
    more = hand.row(3, 61, 62, method="imported")
    assert booked(ledger, hand.now_ms + 2 * MINUTE, hand.batch(more, **IMPORTED)).quarantined == 1


def test_an_import_frees_no_agents_gpu_for_another_node(send, hand):
    """What an import tells after a node fell silent does not make the node's earlier time another node's."""
    send(hand.row(1, 0, 1), now_ms=hand.start_ms + MINUTE)
    later = hand.start_ms + 180 * MINUTE
    assert send(hand.row(1, 150, 151, method="imported"), **IMPORTED, now_ms=later).stored == 1
    foreign = [hand.row(1, 0, 1), hand.row(2, 100, 101), hand.row(3, 151, 152)]
    assert send(*foreign, node="n3", now_ms=later).quarantined == 2
    assert send(hand.row(2, 20, 21), now_ms=later).stored == 1, "the first node's own time stays its own"


def move(ledger: DuckLedger, asked: GpuMove, now_ms: int) -> Any:
    return ledger.move_gpus(asked, now_ms, "ada", "card swapped")


TO_N2 = GpuMove("n2", ("gpu-1",))


@pytest.fixture
def two_nodes(hand: Hand) -> list[Batch]:
    """A minute of gpu-1 on n1, and of gpu-2 on n2."""
    return [hand.batch(hand.row(1)), hand.batch(hand.row(1, gpu="gpu-2"), node="n2")]


def test_an_admin_confirms_a_move_and_what_lies_before_stays_the_former_owners(send, ledger, hand, accounts):
    ledger.append([hand.batch(hand.row(1)), hand.batch(hand.row(1, 1, 2), node="n2")], hand.now_ms)
    before = accounts(0, 1, node="n1")
    (shown,) = present(ledger).gpu_owners()
    assert [(one.node, one.until_ms) for one in shown.owners] == [("n1", None)]
    assert [(one.node, one.records) for one in shown.claims] == [("n2", 1)]
    (moved,) = move(ledger, TO_N2, hand.now_ms)
    assert [(one.node, one.from_ms, one.until_ms, one.confirmed_by) for one in moved.owners] == [
        ("n1", hand.start_ms, hand.start_ms + MINUTE, ""),
        ("n2", hand.start_ms + MINUTE, None, "ada"),
    ]
    assert present(ledger).gpu_owners() == (moved,)
    receipt = send(hand.row(2, 1, 2), hand.row(3, 0, 1), **ATTACKER, first_seq=2, oldest_seq=2)
    assert (receipt.stored, receipt.quarantined) == (1, 1)
    assert send(hand.row(2, 2, 3)).quarantined == 1
    assert accounts(0, 1, node="n1") == before
    assert accounts(1, 2, node="n2")


def test_a_confirmed_move_is_an_act_and_the_former_owner_has_to_wait_again(ledger, send, opened, hand, two_nodes):
    ledger.append(two_nodes, hand.now_ms)
    later = hand.start_ms + 180 * MINUTE
    move(ledger, TO_N2, later)
    (act,) = present(ledger).acts("moved")
    assert (act.who, act.reason, act.subject) == ("ada", "card swapped", "prod/n2")
    assert json.loads(act.content) == [
        {"gpu": "gpu-1", "from_node": "n1", "node": "n2", "from_ms": hand.start_ms + MINUTE}
    ]
    assert send(hand.row(2, 179, 180), now_ms=later).quarantined == 1
    ledger.close()
    moved = next(one for one in present(opened()).gpu_owners() if one.gpu_uuid == "gpu-1")
    assert [(one.node, one.confirmed_by) for one in moved.owners] == [("n1", ""), ("n2", "ada")]


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
def test_a_move_that_cannot_be_is_refused_as_a_whole(ledger, hand, two_nodes, asked, said):
    ledger.append(two_nodes, hand.now_ms)
    before = present(ledger).gpu_owners()
    with pytest.raises(CannotMove, match=said):
        move(ledger, asked, hand.now_ms)
    assert present(ledger).gpu_owners() == before
    assert present(ledger).acts("moved") == []


def test_a_move_from_an_instant_on_leaves_the_former_owner_its_time_until_then(send, ledger, hand, two_nodes):
    ledger.append(two_nodes, hand.now_ms)
    swapped = hand.start_ms + 10 * MINUTE
    move(ledger, GpuMove("n2", ("gpu-1",), from_ms=swapped), swapped)
    receipt = send(hand.row(2, 8, 9), hand.row(3, 10, 11))
    assert (receipt.stored, receipt.quarantined) == (1, 1)
    assert send(hand.row(2, 10, 11), node="n2").stored == 1


def test_a_move_is_in_the_archive(opened, tmp_path, hand, two_nodes):
    archive = in_folder(tmp_path / "archive")
    with closing(opened(archive=archive)) as ledger:
        ledger.append(two_nodes, hand.now_ms)
        move(ledger, TO_N2, hand.now_ms)
        known = present(ledger).gpu_owners()
        ledger.archive(hand.now_ms)
    assert present(opened(tmp_path / "two.duckdb", archive=archive)).gpu_owners() == known


QUEUES = [{"name": name, "refs": [f"kai:{name}"], "team": name} for name in ("vision", "other")]


@pytest.fixture
def books(ledger: Any, hand: Hand) -> Any:
    """Allocated minutes by node and team."""
    ledger.put_policy(Policy.model_validate({"queues": QUEUES}), hand.start_ms - 1)
    ledger.observe(Facts(namespaces=(NamespaceFacts("prod", "vision", team="vision"),)), hand.now_ms)

    def ask() -> dict[tuple[str, str], int]:
        lines = present(ledger).usage((hand.start_ms, hand.now_ms), ("node", "team"), {}).lines()
        allocated = {(line.key["node"], line.key["team"]): line.accounts_gpu_us.allocated for line in lines}
        return {key: value // 60_000_000 for key, value in allocated.items() if value}

    return ask


def test_a_fact_of_another_node_does_not_change_who_pays(send, ledger, hand, books):
    send(hand.row(1), hand.fact(2, queue_ref="kai:vision"))
    for observed in (hand.start_ms - 1_000, hand.start_ms + 1_000):
        foreign = hand.fact(1, queue_ref="kai:other", node="n1", observed_ms=observed, scheduled_ms=1, created_ms=1)
        send(foreign, node="n2", epoch=f"0000-{observed}")
    assert books() == {("n1", "vision"): 1}
    refused = present(ledger).quarantined()
    assert [one.reason for one in refused] == ["foreign-pod", "foreign-pod"]
    assert all(name in refused[0].detail for name in ("'n1'", "'n2'", "pod-1"))


def test_the_inventory_says_whose_word_counts_before_any_row(send, ledger, hand, books):
    ledger.observe(Facts(pods=(("prod", hand.fact(0)),)), hand.now_ms)
    assert send(hand.row(1, gpu="gpu-2"), hand.fact(2, queue_ref="kai:other"), **ATTACKER).quarantined == 1
    assert {one.reason for one in present(ledger).quarantined()} == {"foreign-pod"}
    send(hand.row(1), hand.fact(2, queue_ref="kai:vision"))
    assert books() == {("n1", "vision"): 1}


@pytest.mark.parametrize("first", ["fact", "row", "both"])
def test_a_node_that_names_a_pod_before_its_own_node_does_gains_nothing(send, ledger, hand, books, first):
    row, fact = hand.row(1, gpu="gpu-2"), hand.fact(2, queue_ref="kai:other", scheduled_ms=1)
    sent = {"fact": [hand.fact(1, queue_ref="kai:other", scheduled_ms=1)], "row": [row], "both": [row, fact]}[first]
    send(*sent, **ATTACKER)
    send(hand.row(1), hand.fact(2, queue_ref="kai:vision"))
    assert books()["n1", "vision"] == 1
    assert ("n1", "other") not in books()
    assert not present(ledger).quarantined()
    # What was sent is what a replay is held against, however it was booked.
    again = send(hand.row(1), hand.fact(2, queue_ref="kai:vision"))
    assert (again.duplicates, again.quarantined) == (1, 0)


def test_a_row_of_another_node_takes_nothing_of_the_pod(send, hand, books):
    send(hand.row(1), hand.fact(2, queue_ref="kai:vision"))
    holder = Holder(kind="pod", uid="pod-1", name="train-0")
    send(hand.row(1, gpu="gpu-2", holder=holder), **ATTACKER)
    assert books()["n1", "vision"] == 1
    assert ("n2", "vision") not in books()


def test_an_identifier_that_looks_like_another_nodes_own_is_not_taken(send, hand, books):
    forged = [
        hand.fact(1, "pod-1", queue_ref="kai:other"),
        hand.fact(2, "pod-1@n1", queue_ref="kai:other", scheduled_ms=1),
    ]
    send(*forged, **ATTACKER)
    send(hand.row(1), hand.fact(2, queue_ref="kai:vision"))
    assert books() == {("n1", "vision"): 1}


@pytest.mark.parametrize("kind", ["slurm", "process", "container"])
@pytest.mark.parametrize("before", [True, False])
def test_facts_say_nothing_of_what_is_no_pod(ledger, hand, books, kind, before):
    step = hand.batch(hand.row(1, holder=Holder(kind=kind, uid="12", namespace="vision", name="job 12")))
    told = hand.batch(
        hand.fact(1, "12", queue_ref="kai:other"), hand.row(2, gpu="gpu-2", holder=Holder("slurm", "12")), **ATTACKER
    )
    ledger.append([told, step] if before else [step], hand.now_ms)
    ledger.append([] if before else [told], hand.now_ms)
    assert books()["n1", "vision"] == 1
    assert ("n1", "other") not in books()


def _account(ledger: Any, hand: Hand, nodes: str) -> None:
    """Slurm's accounting reports job 12 of account `vision`."""
    told = hand.fact(0, "12", node=nodes, queue_ref="kai:vision", namespace="", name="job 12")
    ledger.observe(Facts(pods=(("prod", told),)), hand.now_ms)


def test_what_the_api_server_has_shown_of_a_pod_is_not_read_again(send, ledger, hand, monkeypatch):
    send(hand.row(1))
    read, plainly = [], Cursor.plainly

    def noting(self: Cursor, sql: str, *given: Any) -> Any:
        read.append(sql)
        return plainly(self, sql, *given)

    monkeypatch.setattr(Cursor, "plainly", noting)
    ledger.observe(Facts(pods=(("prod", hand.fact(0, "pod-9", node="n9")),)), hand.now_ms)
    assert send(hand.row(2, 1, 2, holder=Holder("pod", "pod-9", "vision", "train-9"))).quarantined == 1, "it is on n9"
    assert any("FROM pod_node" in sql for sql in read)
    assert not any("FROM pod_seen" in sql for sql in read)
    send(hand.row(3, 2, 3, holder=Holder("pod", "pod-8", "vision", "train-8")))
    assert not any("FROM pod_seen" in sql for sql in read), "the API server has shown nothing of it"


def test_what_the_api_server_has_shown_of_a_pod_counts_after_a_restart(opened, hand):
    with closing(opened()) as ledger:
        ledger.observe(Facts(pods=(("prod", hand.fact(0, "pod-9", node="n9")),)), hand.now_ms)
    row = hand.row(1, holder=Holder("pod", "pod-9", "vision", "train-9"))
    assert booked(opened(), hand.now_ms, hand.batch(row)).quarantined == 1, "it is on n9"


@pytest.mark.parametrize("nodes", ["n1", "n[1,3-5]", "n1,n3"])
def test_a_node_that_slurms_accounting_does_not_name_charges_nothing_to_the_job(send, ledger, hand, books, nodes):
    _account(ledger, hand, nodes)
    job = Holder("slurm", "12", name="job 12")
    send(hand.row(1, holder=job))
    receipt = send(hand.row(1, gpu="gpu-2", holder=job), **ATTACKER)
    assert (receipt.stored, receipt.quarantined) == (1, 0), "its own GPU's time is kept"
    assert books()["n1", "vision"] == 1
    assert ("n2", "vision") not in books()
    assert sum(minutes for (node, _), minutes in books().items() if node == "n2") == 1


def test_a_job_counts_on_every_node_of_its_list_and_domains_do_not_matter(send, ledger, hand, books):
    _account(ledger, hand, "n[1-2],n7")
    job = Holder("slurm", "12", name="job 12")
    send(hand.row(1, holder=job))
    second = hand.batch(hand.row(1, gpu="gpu-2", holder=job), node="n2.example.org", epoch="0192-b")
    ledger.append([second], hand.now_ms)
    assert books() == {("n1", "vision"): 1, ("n2.example.org", "vision"): 1}


def test_without_accounting_any_node_may_name_a_job(send, hand, books):
    """A job runs on several nodes, and its rows do not contain the paying team."""
    job = Holder("slurm", "12", name="job 12")
    send(hand.row(1, holder=job))
    send(hand.row(1, gpu="gpu-2", holder=job), **ATTACKER)
    assert {team for _, team in books()} & {"vision", "other"} == set()
    assert {node for node, _ in books()} == {"n1", "n2"}


@pytest.mark.parametrize("imported", [False, True], ids=["reported facts", "imported facts"])
@pytest.mark.parametrize("first", ["pod", "container", "process", "fact"])
def test_a_job_keeps_its_team_whoever_named_its_number_first(send, ledger, hand, first, imported):
    """A job's number can be guessed. Only the batch system issues it, so no node can claim it as something else."""
    queues = [{"name": team, "refs": [f"kai:{team}"], "team": team} for team in ("red", "blue")]
    ledger.put_policy(Policy.model_validate({"queues": queues}), hand.start_ms - MINUTE)
    if first == "fact":
        send(hand.fact(1, "4711", node="n2", queue_ref="kai:blue"), **ATTACKER)
    else:
        claimed = Holder(kind=first, uid="4711", namespace="vision", name="guessed")
        send(
            hand.row(1, gpu="gpu-2", holder=claimed), hand.fact(2, "4711", node="n2", queue_ref="kai:blue"), **ATTACKER
        )
    send(hand.row(1, holder=Holder(kind="slurm", uid="4711", name="job 4711")))
    told = hand.fact(1, "4711", node="n1", namespace="", queue_ref="kai:red", observed_ms=hand.start_ms)
    if imported:
        send(told, epoch="import:slurm:00000000000000")
    else:
        ledger.observe(Facts(pods=(("prod", told),)), hand.now_ms)
    lines = present(ledger).usage((hand.start_ms, hand.start_ms + MINUTE), ("team",), {"node": {"n1"}}).lines()
    assert [line.key["team"] for line in lines] == ["red"]


def test_processes_of_one_number_on_two_nodes_are_two_holders(send, ledger, hand):
    process = Holder(kind="process", uid="812:77", namespace="ann", name="python")
    send(hand.row(1, holder=process))
    send(hand.row(1, gpu="gpu-2", holder=process), node="n2")
    send(hand.fact(2, "812:77", node="n2", queue_ref="kai:blue"), node="n2")
    assert (
        present(ledger)
        .usage((hand.start_ms, hand.start_ms + MINUTE), ("queue",), {"node": {"n1"}})
        .lines()[0]
        .key["queue"]
        == "__unassigned__"
    )
