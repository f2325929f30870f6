"""Queue waits: of the instants that node and cluster know together, nothing guessed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accountant.billing.queue_waits import PodWait, WaitStatistics, merge_sources, pod_wait, wait_statistics
from accountant.ledger.protocols import Facts, NamespaceFacts
from accountant.storage.duckdb_ledger import DuckLedger
from accountant.wire.policy_models import UNASSIGNED, Policy
from agent.wire import Batch, PodFacts

NOW = 1_790_816_400_000


def fact(**given: Any) -> PodFacts:
    plain: dict[str, Any] = {"seq": 0, "uid": "u", "namespace": "ns", "name": "p", "node": "n", "observed_ms": 0}
    return PodFacts(**{**plain, **given})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"created_ms": 10, "scheduled_ms": 40, "started_ms": 45}, PodWait(30, 5, False)),
        ({"created_ms": 10}, PodWait(90, None, True)),
        ({"created_ms": 10, "ended_ms": 50}, PodWait(40, None, False)),  # given up
        ({"created_ms": 10, "started_ms": 45}, PodWait(35, None, False)),
        ({"scheduled_ms": 40, "started_ms": 45}, PodWait(None, 5, False)),
        ({"created_ms": 50, "scheduled_ms": 40, "started_ms": 39}, PodWait(0, 0, False)),
        ({}, PodWait(None, None, True)),
    ],
)
def test_what_a_pod_waited(given: dict[str, int], expected: PodWait) -> None:
    assert pod_wait(fact(**given), 100) == expected


def test_node_and_cluster_together_know_all_instants() -> None:
    node = fact(observed_ms=9, started_ms=45, ended_ms=80, node="n1")
    cluster = fact(observed_ms=5, created_ms=10, scheduled_ms=40, queue_ref="kai:a", node="")
    both = merge_sources(node, cluster)
    assert both == merge_sources(cluster, node)
    assert (both.created_ms, both.scheduled_ms, both.started_ms, both.ended_ms) == (10, 40, 45, 80)
    assert (both.node, both.queue_ref) == ("n1", "kai:a")
    assert merge_sources(None, cluster) == cluster


@given(st.lists(st.none() | st.integers(0, 1000)))
def test_percentiles_are_waits_that_happened(waits: list[int | None]) -> None:
    known = sorted(wait for wait in waits if wait is not None)
    found = wait_statistics(waits)
    if not known:
        assert found == WaitStatistics(0, 0, 0, 0)
        return
    assert found.pods == len(known)
    assert {found.median_ms, found.p95_ms} <= set(known)
    assert sum(wait <= found.p95_ms for wait in known) * 100 >= 95 * len(known)
    assert found.median_ms <= found.p95_ms <= found.longest_ms == known[-1]


def test_the_ledger_knows_the_pods_of_a_span_with_team_and_queue(ledger: DuckLedger) -> None:
    ledger.put_policy(Policy.model_validate({"queues": [{"name": "a", "refs": ["kai:a"]}]}), 0)
    ledger.observe(Facts(namespaces=(NamespaceFacts("c", "ns", "vision"),)), NOW)
    early = fact(seq=1, uid="early", created_ms=NOW - 900, ended_ms=NOW - 800, observed_ms=NOW - 800)
    both = fact(seq=2, uid="both", started_ms=NOW - 300, observed_ms=NOW - 200)
    batch = Batch(cluster="c", node="n", boot_id="b", epoch="0192", first_seq=1, oldest_seq=1, facts=(early, both))
    ledger.append([batch], NOW)
    seen = fact(uid="both", created_ms=NOW - 500, scheduled_ms=NOW - 400, queue_ref="kai:a", observed_ms=NOW - 400)
    waiting = fact(uid="waiting", namespace="other", created_ms=NOW - 100, observed_ms=NOW - 100)
    ledger.observe(Facts(pods=(("c", seen), ("c", waiting))), NOW)
    found = {pod.facts.uid: (pod.team, pod.queue, pod_wait(pod.facts, NOW)) for pod in ledger.pods(NOW - 600, NOW)}
    assert found == {
        "both": ("vision", "a", PodWait(100, 100, False)),
        "waiting": (UNASSIGNED, UNASSIGNED, PodWait(100, None, True)),
    }
    assert [pod.facts.uid for pod in ledger.pods(NOW - 1000, NOW - 850)] == ["early"]
