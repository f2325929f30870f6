"""Facts about a pod are accepted only from its own node, and rows of another node do not belong to the pod."""

from __future__ import annotations

from typing import Any

import pytest

from accountant.ledger.protocols import Facts, NamespaceFacts
from accountant.wire.policy_models import Policy
from agent.wire import Holder
from tests.ledger.conftest import Hand

ATTACKER: dict[str, Any] = {"node": "n2", "epoch": "00000000-0000-7000-8000-000000000000"}
QUEUES = [{"name": name, "refs": [f"kai:{name}"], "team": name} for name in ("vision", "other")]


@pytest.fixture
def books(ledger: Any, hand: Hand) -> Any:
    """Allocated minutes by node and team."""
    ledger.put_policy(Policy.model_validate({"queues": QUEUES}), hand.start_ms - 1)
    ledger.observe(Facts(namespaces=(NamespaceFacts("prod", "vision", team="vision"),)), hand.now_ms)

    def ask() -> dict[tuple[str, str], int]:
        lines = ledger.usage(hand.start_ms, hand.now_ms, ("node", "team"), {})
        allocated = {(line.key["node"], line.key["team"]): line.accounts_gpu_us.allocated for line in lines}
        return {key: value // 60_000_000 for key, value in allocated.items() if value}

    return ask


def test_a_fact_of_another_node_does_not_change_who_pays(ledger: Any, hand: Hand, books: Any) -> None:
    ledger.append([hand.batch(hand.row(1), hand.fact(2, queue_ref="kai:vision"))], hand.now_ms)
    for observed in (hand.start_ms - 1_000, hand.start_ms + 1_000):
        foreign = hand.fact(1, queue_ref="kai:other", node="n1", observed_ms=observed, scheduled_ms=1, created_ms=1)
        batch = hand.batch(foreign, node="n2", epoch=f"0000-{observed}")
        ledger.append([batch], hand.now_ms)
    assert books() == {("n1", "vision"): 1}
    refused = ledger.quarantined()
    assert [one.reason for one in refused] == ["foreign-pod", "foreign-pod"]
    assert all(name in refused[0].detail for name in ("'n1'", "'n2'", "pod-1"))


def test_the_inventory_says_whose_word_counts_before_any_row(ledger: Any, hand: Hand, books: Any) -> None:
    ledger.observe(Facts(pods=(("prod", hand.fact(0)),)), hand.now_ms)
    row = hand.row(1, gpu="gpu-2")
    (receipt,) = ledger.append([hand.batch(row, hand.fact(2, queue_ref="kai:other"), **ATTACKER)], hand.now_ms)
    assert receipt.quarantined == 1
    assert {one.reason for one in ledger.quarantined()} == {"foreign-pod"}
    ledger.append([hand.batch(hand.row(1), hand.fact(2, queue_ref="kai:vision"))], hand.now_ms)
    assert books() == {("n1", "vision"): 1}


@pytest.mark.parametrize("first", ["fact", "row", "both"])
def test_a_node_that_names_a_pod_before_its_own_node_does_gains_nothing(
    ledger: Any, hand: Hand, books: Any, first: str
) -> None:
    row, fact = hand.row(1, gpu="gpu-2"), hand.fact(2, queue_ref="kai:other", scheduled_ms=1)
    sent = {"fact": [hand.fact(1, queue_ref="kai:other", scheduled_ms=1)], "row": [row], "both": [row, fact]}[first]
    ledger.append([hand.batch(*sent, **ATTACKER)], hand.now_ms)
    ledger.append([hand.batch(hand.row(1), hand.fact(2, queue_ref="kai:vision"))], hand.now_ms)
    assert books()["n1", "vision"] == 1
    assert ("n1", "other") not in books()
    assert not ledger.quarantined()
    # What was sent is what a replay is held against, however it was booked.
    (again,) = ledger.append([hand.batch(hand.row(1), hand.fact(2, queue_ref="kai:vision"))], hand.now_ms)
    assert (again.duplicates, again.quarantined) == (1, 0)


def test_a_row_of_another_node_takes_nothing_of_the_pod(ledger: Any, hand: Hand, books: Any) -> None:
    ledger.append([hand.batch(hand.row(1), hand.fact(2, queue_ref="kai:vision"))], hand.now_ms)
    holder = Holder(kind="pod", uid="pod-1", name="train-0")
    ledger.append([hand.batch(hand.row(1, gpu="gpu-2", holder=holder), **ATTACKER)], hand.now_ms)
    assert books()["n1", "vision"] == 1
    assert ("n2", "vision") not in books()


def test_an_identifier_that_looks_like_another_nodes_own_is_not_taken(ledger: Any, hand: Hand, books: Any) -> None:
    forged = [
        hand.fact(1, "pod-1", queue_ref="kai:other"),
        hand.fact(2, "pod-1@n1", queue_ref="kai:other", scheduled_ms=1),
    ]
    ledger.append([hand.batch(*forged, **ATTACKER)], hand.now_ms)
    ledger.append([hand.batch(hand.row(1), hand.fact(2, queue_ref="kai:vision"))], hand.now_ms)
    assert books() == {("n1", "vision"): 1}


@pytest.mark.parametrize("kind", ["slurm", "process", "container"])
@pytest.mark.parametrize("before", [True, False])
def test_facts_say_nothing_of_what_is_no_pod(ledger: Any, hand: Hand, books: Any, kind: Any, before: bool) -> None:
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


@pytest.mark.parametrize("nodes", ["n1", "n[1,3-5]", "n1,n3"])
def test_a_node_that_slurms_accounting_does_not_name_charges_nothing_to_the_job(
    ledger: Any, hand: Hand, books: Any, nodes: str
) -> None:
    _account(ledger, hand, nodes)
    job = Holder("slurm", "12", name="job 12")
    ledger.append([hand.batch(hand.row(1, holder=job))], hand.now_ms)
    (receipt,) = ledger.append([hand.batch(hand.row(1, gpu="gpu-2", holder=job), **ATTACKER)], hand.now_ms)
    assert (receipt.stored, receipt.quarantined) == (1, 0), "its own GPU's time is kept"
    assert books()["n1", "vision"] == 1
    assert ("n2", "vision") not in books()
    assert sum(minutes for (node, _), minutes in books().items() if node == "n2") == 1


def test_a_job_counts_on_every_node_of_its_list_and_domains_do_not_matter(ledger: Any, hand: Hand, books: Any) -> None:
    _account(ledger, hand, "n[1-2],n7")
    job = Holder("slurm", "12", name="job 12")
    ledger.append([hand.batch(hand.row(1, holder=job))], hand.now_ms)
    second = hand.batch(hand.row(1, gpu="gpu-2", holder=job), node="n2.example.org", epoch="0192-b")
    ledger.append([second], hand.now_ms)
    assert books() == {("n1", "vision"): 1, ("n2.example.org", "vision"): 1}


def test_without_accounting_any_node_may_name_a_job(ledger: Any, hand: Hand, books: Any) -> None:
    """A job runs on several nodes, and its rows do not contain the paying team."""
    job = Holder("slurm", "12", name="job 12")
    ledger.append([hand.batch(hand.row(1, holder=job))], hand.now_ms)
    ledger.append([hand.batch(hand.row(1, gpu="gpu-2", holder=job), **ATTACKER)], hand.now_ms)
    assert {team for _, team in books()} & {"vision", "other"} == set()
    assert {node for node, _ in books()} == {"n1", "n2"}
