"""Who pays: queues that a scheduler enforces, then the namespace, and a pod's label only where it may."""

from __future__ import annotations

from typing import Any

import pytest

from accountant.ledger.protocols import NamespaceFacts
from accountant.ledger.team_assignment import LATE_MS, Assignment, labels_count, namespace_facts
from accountant.wire.policy_models import UNASSIGNED, Policy, PolicyVersion
from agent.wire import PodFacts


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
def test_what_a_namespace_says(labels: dict[str, str], annotations: dict[str, str], expected: NamespaceFacts) -> None:
    assert namespace_facts("c", "ns", labels, annotations, ["team"]) == expected


SPACE = NamespaceFacts("c", "ns", "platform", "team", ("vision", "speech"))
RULES = Assignment(
    PolicyVersion(
        version="v",
        effective_ms=0,
        policy=Policy.model_validate(
            {"queues": [{"name": "ml", "team": "ml"}, {"name": "x", "parent": "ml"}, {"name": "free"}]}
        ),
    )
)


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
def test_the_queue_then_the_allowed_label_then_the_namespace(
    queue: str, space: NamespaceFacts | None, labels: dict[str, str], team: str
) -> None:
    assert RULES.team(queue, space, labels) == team


def fact(**given: Any) -> PodFacts:
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
def test_labels_count_only_as_they_were_when_the_pod_began(given: dict[str, Any], counts: bool) -> None:
    assert labels_count(fact(**given)) is counts
