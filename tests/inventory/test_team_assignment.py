"""The paying team and the start of its time: queues, the namespace, a pod's label where it is allowed, and dimensions
that change."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accountant.core.periods import Timeline
from accountant.ledger.protocols import Facts, NamespaceFacts, NodeFacts
from accountant.ledger.team_assignment import LATE_MS, Assignment, labels_count, namespace_facts
from accountant.storage.duckdb_ledger import DuckLedger
from accountant.wire.policy_models import UNASSIGNED, Policy, PolicyVersion, QueuePolicy
from agent.wire import Owner, PodFacts
from tests.ledger.conftest import MINUTE, NOW_MS, START_MS, Hand, Send
from tests.moments import present


@pytest.mark.parametrize(
    ("labels", "annotations", "expected"),
    [
        ({}, {}, NamespaceFacts("c", "ns")),
        ({"gputally.dev/team": "vision"}, {}, NamespaceFacts("c", "ns", "vision")),
        ({"team": "speech"}, {}, NamespaceFacts("c", "ns", "speech")),
        ({"team": "x", "gputally.dev/team": "y"}, {"gputally.dev/team": "z"}, NamespaceFacts("c", "ns", "z")),
        (
            {},
            {"gputally.dev/team-label": "team", "gputally.dev/teams": "b, a,,a"},
            NamespaceFacts("c", "ns", "", "team", ("a", "b")),
        ),
        ({}, {"gputally.dev/team-label": "team"}, NamespaceFacts("c", "ns")),
        ({}, {"gputally.dev/teams": "a"}, NamespaceFacts("c", "ns")),
    ],
)
def test_what_a_namespace_says(labels, annotations, expected):
    assert namespace_facts("c", "ns", labels, annotations, ["team"]) == expected


SPACE = NamespaceFacts("c", "ns", "platform", "team", ("vision", "speech"))
QUEUES = Policy(
    queues=(QueuePolicy(name="ml", team="ml"), QueuePolicy(name="x", parent="ml"), QueuePolicy(name="free"))
)
RULES = Assignment(PolicyVersion(version="v", effective_ms=0, policy=QUEUES))


@pytest.mark.parametrize(
    ("queue", "space", "labels", "team"),
    [
        ("x", SPACE, {"team": "vision"}, "ml"),
        ("free", SPACE, {"team": "vision"}, "vision"),
        ("free", SPACE, {"team": "finance"}, "platform"),
        ("free", SPACE, {"other": "vision"}, "platform"),
        (UNASSIGNED, SPACE, {}, "platform"),
        ("free", NamespaceFacts("c", "ns", "platform"), {"team": "vision", "": "vision"}, "platform"),
        ("free", NamespaceFacts("c", "ns"), {"team": "vision"}, UNASSIGNED),
        ("free", None, {"team": "vision"}, UNASSIGNED),
    ],
)
def test_the_queue_then_the_allowed_label_then_the_namespace(queue, space, labels, team):
    assert RULES.team(queue, space, labels) == team


def labelled(**given: Any) -> PodFacts:
    plain: dict[str, Any] = {"labels": {"team": "a"}, "observed_ms": 10_000_000}
    return PodFacts(seq=0, uid="u", namespace="ns", name="p", node="n", **{**plain, **given})


@pytest.mark.parametrize(
    ("given", "counts"),
    [
        ({"started_ms": 10_000_000}, True),
        ({"started_ms": 10_000_000 - LATE_MS}, True),
        ({"started_ms": 10_000_000 - LATE_MS - 1}, False),
        ({"created_ms": 0, "started_ms": 10_000_000}, True),  # it waited in its queue
        ({"created_ms": 10_000_000}, True),
        ({}, False),
        ({"started_ms": 10_000_000, "labels": {}}, False),
    ],
)
def test_labels_count_only_as_they_were_when_the_pod_began(given, counts):
    assert labels_count(labelled(**given)) is counts


@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from("abc"))))
def test_a_history_is_what_the_last_word_about_each_instant_was(changes):
    history = Timeline.always("start")
    naive = ["start"] * 25
    for since, value in changes:
        history = history.changed(value, since)
        naive[since:] = [value] * (25 - since)
    assert [history.at(at) for at in range(25)] == naive
    assert history.latest == naive[-1]
    assert all(a < b for a, b in zip(history.changes(), list(history.changes())[1:], strict=False))


def by(ledger: DuckLedger, dimension: Any, **where: str) -> dict[str, int]:
    """Return the allocated minutes of the hour before the clock."""
    chosen: Any = {key: {value} for key, value in where.items()}
    lines = present(ledger).usage((START_MS, NOW_MS), (dimension,), chosen).lines()
    found = {line.key[dimension]: line.accounts_gpu_us.allocated // (MINUTE * 1000) for line in lines}
    return {key: held for key, held in found.items() if held}


@pytest.fixture
def booked(ledger: DuckLedger, send: Send, hand: Hand) -> DuckLedger:
    """An hour held by one pod of the namespace vision."""
    send(*(hand.row(number + 1, number, number + 1) for number in range(60)))
    return ledger


def observe_team(ledger: DuckLedger, team: str, now_ms: int, **fields: Any) -> None:
    ledger.observe(Facts(namespaces=(NamespaceFacts("prod", "vision", team, **fields),)), now_ms)


def test_a_namespace_that_becomes_known_is_known_for_all_open_time(booked):
    assert by(booked, "team") == {UNASSIGNED: 60}
    observe_team(booked, "vision", NOW_MS)
    assert by(booked, "team") == {"vision": 60}


def test_time_that_is_closed_keeps_its_labels(booked):
    known = Facts(namespaces=(NamespaceFacts("prod", "vision", "vision"),), nodes=(NodeFacts("prod", "n1", "a"),))
    booked.observe(known, NOW_MS, closed_ms=START_MS + 20 * MINUTE)
    assert by(booked, "team") == {UNASSIGNED: 20, "vision": 40}
    assert by(booked, "pool") == {"": 20, "a": 40}


def test_a_namespace_that_changes_hands_does_so_from_then_on(booked, opened):
    observe_team(booked, "old", START_MS)
    observe_team(booked, "new", START_MS + 30 * MINUTE)
    assert by(booked, "team") == {"old": 30, "new": 30}
    assert by(booked, "namespace", team="old") == {"vision": 30}
    # An operator may say since when it holds.
    observe_team(booked, "new", NOW_MS, since_ms=START_MS + 10 * MINUTE)
    assert by(booked, "team") == {"old": 10, "new": 50}
    booked.close()
    with_history = opened()
    assert by(with_history, "team") == {"old": 10, "new": 50}
    assert present(with_history).imbalance(START_MS, NOW_MS).total_us == 0


def test_a_node_that_is_relabelled_is_so_from_then_on(booked):
    booked.observe(Facts(nodes=(NodeFacts("prod", "n1", pool="a", capacity_type="spot"),)), START_MS)
    booked.observe(Facts(nodes=(NodeFacts("prod", "n1", pool="b", capacity_type="spot"),)), START_MS + 45 * MINUTE)
    assert by(booked, "pool") == {"a": 45, "b": 15}
    assert by(booked, "capacity_type") == {"spot": 60}
    assert by(booked, "hour", pool="a") == {"2026-10-01T00": 45}
    assert booked.status().nodes == (NodeFacts("prod", "n1", pool="b", capacity_type="spot", boot_id="boot"),)


SHARED = NamespaceFacts("prod", "vision", "platform", "team", ("nlp", "speech"))


@pytest.mark.parametrize(
    ("first", "later", "team"),
    [
        ({"team": "nlp"}, {"team": "speech"}, "nlp"),  # what is set later changes nothing
        ({"team": "finance"}, {"team": "nlp"}, "platform"),  # not among those the namespace allows
        ({"other": "x"}, {"team": "nlp"}, "platform"),
    ],
)
@pytest.mark.parametrize("late_first", [False, True])
def test_a_pods_label_counts_as_it_was_first_seen(booked, send, hand, first, later, team, late_first):
    early, late = (
        hand.fact(seq, labels=labels, started_ms=START_MS, observed_ms=START_MS + minutes * MINUTE)
        for seq, labels, minutes in ((61, first, 1), (62, later, 2))
    )
    if late_first:
        booked.observe(Facts(pods=(("prod", late),)), NOW_MS)
    send(early)
    booked.observe(Facts(pods=(("prod", late),), namespaces=(SHARED,)), NOW_MS)
    assert by(booked, "team") == {team: 60}


def test_a_label_that_is_first_seen_late_in_a_pods_life_names_nobody(booked, hand):
    late = hand.fact(0, labels={"team": "nlp"}, started_ms=START_MS - 120 * MINUTE)
    booked.observe(Facts(pods=(("prod", late),), namespaces=(SHARED,)), NOW_MS)
    assert by(booked, "team") == {"platform": 60}


@pytest.mark.parametrize("cluster_first", [False, True])
def test_the_cluster_knows_the_whole_chain_the_node_the_nearest_owner(booked, send, hand, cluster_first):
    node = hand.fact(61, owners=(Owner("Job", "train-1"),), queue_ref="kai:vision", observed_ms=START_MS + 9)
    cluster = hand.fact(0, owners=(Owner("Job", "train-1"), Owner("CronJob", "train")))
    for from_cluster in (cluster_first, not cluster_first):
        if from_cluster:
            booked.observe(Facts(pods=(("prod", cluster),)), NOW_MS)
        else:
            send(node)
    assert by(booked, "job") == {"CronJob/train": 60}
