"""The weights of a cycle, worked out by hand and read where a scheduler reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gputally.testing.fake_scheduler import QUEUE, queue_object, setup_object
from tests.fairshare.builders import cluster_of, policy_of
from tests.fairshare.conftest import Accountant

Make = Callable[..., Any]
QUEUES = [{"name": name, "weight": weight, "refs": [f"fake:{name}"]} for name, weight in (("a", 1), ("b", 2), ("c", 3))]


def test_a_queue_that_used_less_than_its_share_gets_twice_the_difference(
    accountant: Accountant, controller_of: Make
) -> None:
    """n = 1/6, 2/6, 3/6, U = 0.5, 0.3, 0.2, k = 1: 2n - U = below 0, 11/30, 24/30.

    a keeps a tenth of its weight. Of the other 5.9, b gets 11/35 and c 24/35."""
    cluster = cluster_of([*(queue_object(name, None) for name in "abc"), setup_object()])
    accountant.spend(a=0.5, b=0.3, c=0.2)
    controller_of(policy_of(QUEUES, k=1.0, targets={"fake": {"mode": "weight", "apply": "enforce"}}), cluster).cycle()
    written = {obj["metadata"]["name"]: obj["spec"]["weight"] for obj in cluster.list(QUEUE)}
    assert written == {"a": 0.1, "b": 1.85429, "c": 4.04571}
