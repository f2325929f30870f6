"""Usage by container, user and cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import json, structs

from accountant.inventory.pod_facts import Pod, pod_sighting
from accountant.ledger.protocols import Facts
from accountant.ledger.team_assignment import labels_count
from accountant.storage.duckdb_ledger import DuckLedger
from accountant.wire.usage_cost_and_job_models import Dimension
from agent.wire import Holder
from tests.inventory.api import pod

MINUTE_US = 60_000_000


@pytest.fixture
def filled(ledger: DuckLedger, hand: Any) -> DuckLedger:
    """Two containers of one pod and a Slurm job on two GPUs, a third GPU unheld; a GPU of a second cluster."""
    main, side = (Holder(kind="pod", uid="pod-1", namespace="vision", name="train-0", container=c) for c in ("a", "b"))
    job = Holder(kind="slurm", uid="101")
    half = {"capacity_us": MINUTE_US // 2, "allocated_us": MINUTE_US // 2, "busy_us": MINUTE_US // 4}
    ledger.append(
        [
            hand.batch(
                hand.row(1, holder=main, **half),
                hand.row(2, holder=side, **half),
                hand.row(3, gpu="gpu-2", holder=job),
                hand.row(4, gpu="gpu-3", holder=None),
                hand.fact(5, labels={"gputally.dev/user": "ann"}),
            ),
            hand.batch(hand.row(1, gpu="gpu-4"), cluster="lab", epoch="0192-b"),
        ],
        hand.now_ms,
    )
    fact = hand.fact(0, "101", namespace="nlp", name="sweep", labels={"slurm/user": "bob"}, queue_ref="slurm:nlp")
    ledger.observe(Facts(pods=(("prod", fact),)), hand.now_ms)
    return ledger


def sums(ledger: DuckLedger, hand: Any, by: Sequence[Dimension], **options: Any) -> dict[tuple[str, ...], int]:
    lines = ledger.usage(hand.start_ms, hand.start_ms + 60_000, by, **options)
    return {tuple(line.key.values()): line.accounts_gpu_us.total for line in lines}


def test_containers_of_one_pod_are_told_apart(filled: DuckLedger, hand: Any) -> None:
    found = sums(filled, hand, ("pod", "container"))
    assert found[("train-0", "a")] == found[("train-0", "b")] == MINUTE_US // 2
    assert sums(filled, hand, ("team",), where={"container": ["a"]}) == {("__unassigned__",): MINUTE_US // 2}


def test_a_user_is_slurms_or_what_the_pod_says(filled: DuckLedger, hand: Any) -> None:
    assert sums(filled, hand, ("user",)) == {
        ("",): 2 * MINUTE_US,  # nobody, and a pod of the other cluster that says nothing
        ("ann",): MINUTE_US,
        ("bob",): MINUTE_US,
    }
    assert sums(filled, hand, ("job",), where={"user": ["bob"]}) == {("Slurm/sweep",): MINUTE_US}


def test_a_cluster_has_its_idle_time_too(filled: DuckLedger, hand: Any) -> None:
    assert sums(filled, hand, ("cluster",)) == {("lab",): MINUTE_US, ("prod",): 3 * MINUTE_US}
    assert sums(filled, hand, ("gpu",), where={"cluster": ["lab"]}) == {("gpu-4",): MINUTE_US}


@pytest.mark.parametrize("by", [("cluster", "container", "user"), ("user", "hour"), ("container", "gpu_model")])
def test_whatever_is_asked_for_the_sum_stays(filled: DuckLedger, hand: Any, by: tuple[Dimension, ...]) -> None:
    assert sum(sums(filled, hand, by).values()) == 4 * MINUTE_US


def test_breakdowns_know_the_same_names(filled: DuckLedger, hand: Any) -> None:
    asked: tuple[Dimension, ...] = ("cluster", "container", "user")
    assert filled.idle_phases(hand.start_ms, hand.now_ms, asked) == []
    assert filled.lent(hand.start_ms, hand.now_ms, asked) == []


def test_a_users_name_is_taken_from_the_first_key_that_has_one() -> None:
    made = json.decode(json.encode(pod("p")), type=Pod)
    made = structs.replace(
        made,
        metadata=structs.replace(made.metadata, labels={"owner": "eve"}, annotations={"hub/user": "zoe"}),
    )
    facts = [pod_sighting(made, 0, (), keys) for keys in ((), ("hub/user", "owner"), ("none", "owner"))]
    assert [found.facts.labels for found in facts if found] == [
        {}, {"gputally.dev/user": "zoe"}, {"gputally.dev/user": "eve"},
    ]  # fmt: skip


def test_a_users_name_alone_says_nothing_of_the_team(hand: Any) -> None:
    """Otherwise its labels would be the earliest of the pod, and would determine the team."""
    named = hand.fact(1, labels={"gputally.dev/user": "ann"}, created_ms=hand.start_ms)
    assert not labels_count(named)
    assert labels_count(hand.fact(1, labels={"team": "x"}, created_ms=hand.start_ms))
