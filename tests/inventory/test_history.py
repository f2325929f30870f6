"""Dimensions with history: what is known late labels open time, what changes labels the time after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from accountant.core.periods import Timeline
from accountant.ledger.protocols import Facts, NamespaceFacts, NodeFacts
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from accountant.wire.policy_models import UNASSIGNED
from agent.wire import Batch, Owner, PodFacts, UsageInterval
from gputally.base.clock import VirtualClock
from tests.usage_records import interval, pod_holder

START = 1_790_812_800_000  # an hour before the clock
MINUTE = 60_000
HOUR = 60 * MINUTE


@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from("abc"))))
def test_a_history_is_what_the_last_word_about_each_instant_was(changes: list[tuple[int, str]]) -> None:
    history = Timeline.always("start")
    naive = ["start"] * 25
    for since, value in changes:
        history = history.changed(value, since)
        naive[since:] = [value] * (25 - since)
    assert [history.at(at) for at in range(25)] == naive
    assert history.latest == naive[-1]
    assert all(a < b for a, b in zip(history.changes(), list(history.changes())[1:], strict=False))


def minutes(*numbers: int, uid: str = "pod-1", namespace: str = "vision") -> tuple[UsageInterval, ...]:
    holder = pod_holder("train-0", namespace, uid)
    return tuple(
        replace(interval(START + number * MINUTE, "gpu-1", holder, span_ms=MINUTE), seq=number + 1)
        for number in numbers
    )


def batch(first: int, *intervals: UsageInterval, facts: tuple[PodFacts, ...] = ()) -> Batch:
    return Batch(
        cluster="prod", node="n1", boot_id="b", epoch="0192-a", first_seq=first, oldest_seq=1, intervals=intervals,
        facts=facts,
    )  # fmt: skip


def fact(seq: int, **changes: Any) -> PodFacts:
    plain: dict[str, Any] = {
        "namespace": "vision",
        "name": "train-0",
        "node": "n1",
        "observed_ms": START,
        "uid": "pod-1",
    }
    return PodFacts(seq=seq, **{**plain, **changes})


def by(ledger: DuckLedger, dimension: Any, **where: str) -> dict[str, int]:
    chosen: Any = {key: {value} for key, value in where.items()}
    lines = ledger.usage(START, START + HOUR, (dimension,), chosen)
    found = {line.key[dimension]: line.accounts_gpu_us.allocated // (MINUTE * 1000) for line in lines}
    return {key: held for key, held in found.items() if held}


@pytest.fixture
def booked(ledger: DuckLedger) -> DuckLedger:
    ledger.append([batch(1, *minutes(*range(60)))], START + HOUR)
    return ledger


def test_a_namespace_that_becomes_known_is_known_for_all_open_time(booked: DuckLedger) -> None:
    assert by(booked, "team") == {UNASSIGNED: 60}
    booked.observe(Facts(namespaces=(NamespaceFacts("prod", "vision", "vision"),)), START + HOUR)
    assert by(booked, "team") == {"vision": 60}


def test_time_that_is_closed_keeps_its_labels(booked: DuckLedger) -> None:
    known = Facts(namespaces=(NamespaceFacts("prod", "vision", "vision"),), nodes=(NodeFacts("prod", "n1", "a"),))
    booked.observe(known, START + HOUR, closed_ms=START + 20 * MINUTE)
    assert by(booked, "team") == {UNASSIGNED: 20, "vision": 40}
    assert by(booked, "pool") == {"": 20, "a": 40}


def test_a_namespace_that_changes_hands_does_so_from_then_on(
    booked: DuckLedger, path: Path, clock: VirtualClock
) -> None:
    booked.observe(Facts(namespaces=(NamespaceFacts("prod", "vision", "old"),)), START)
    booked.observe(Facts(namespaces=(NamespaceFacts("prod", "vision", "new"),)), START + 30 * MINUTE)
    assert by(booked, "team") == {"old": 30, "new": 30}
    assert by(booked, "namespace", team="old") == {"vision": 30}
    # An operator may say since when it holds.
    dated = NamespaceFacts("prod", "vision", "new", since_ms=START + 10 * MINUTE)
    booked.observe(Facts(namespaces=(dated,)), START + HOUR)
    assert by(booked, "team") == {"old": 10, "new": 50}
    booked.close()
    with_history = open_ledger(path, clock)
    assert by(with_history, "team") == {"old": 10, "new": 50}
    assert with_history.imbalance(START, START + HOUR) == 0
    with_history.close()


def test_a_node_that_is_relabelled_is_so_from_then_on(booked: DuckLedger) -> None:
    booked.observe(Facts(nodes=(NodeFacts("prod", "n1", pool="a", capacity_type="spot"),)), START)
    booked.observe(Facts(nodes=(NodeFacts("prod", "n1", pool="b", capacity_type="spot"),)), START + 45 * MINUTE)
    assert by(booked, "pool") == {"a": 45, "b": 15}
    assert by(booked, "capacity_type") == {"spot": 60}
    assert by(booked, "hour", pool="a") == {"2026-10-01T00": 45}
    assert booked.nodes() == (NodeFacts("prod", "n1", pool="b", capacity_type="spot"),)


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
def test_a_pods_label_counts_as_it_was_first_seen(
    booked: DuckLedger, first: dict[str, str], later: dict[str, str], team: str, late_first: bool
) -> None:
    early = fact(61, labels=first, started_ms=START, observed_ms=START + MINUTE)
    late = fact(62, labels=later, started_ms=START, observed_ms=START + 2 * MINUTE)
    if late_first:
        booked.observe(Facts(pods=(("prod", late),)), START + HOUR)
    booked.append([batch(61, facts=(early,))], START + HOUR)
    booked.observe(Facts(pods=(("prod", late),), namespaces=(SHARED,)), START + HOUR)
    assert by(booked, "team") == {team: 60}


def test_a_label_that_is_first_seen_late_in_a_pods_life_names_nobody(booked: DuckLedger) -> None:
    late = fact(0, labels={"team": "nlp"}, started_ms=START - 2 * HOUR, observed_ms=START)
    booked.observe(Facts(pods=(("prod", late),), namespaces=(SHARED,)), START + HOUR)
    assert by(booked, "team") == {"platform": 60}


@pytest.mark.parametrize("cluster_first", [False, True])
def test_the_cluster_knows_the_whole_chain_the_node_the_nearest_owner(booked: DuckLedger, cluster_first: bool) -> None:
    node = fact(61, owners=(Owner("Job", "train-1"),), queue_ref="kai:vision", observed_ms=START + 9)
    cluster = fact(0, owners=(Owner("Job", "train-1"), Owner("CronJob", "train")), observed_ms=START)
    for from_cluster in (cluster_first, not cluster_first):
        if from_cluster:
            booked.observe(Facts(pods=(("prod", cluster),)), START + HOUR)
        else:
            booked.append([batch(61, facts=(node,))], START + HOUR)
    assert by(booked, "job") == {"CronJob/train": 60}
