"""The credit for a node: what its holders were billed for its time in the span, and for no other node's.

Two clusters have nodes n1 and n2, each with an H100 at 2, which a team of its own holds for four hours."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

from gputally.base.clock import VirtualClock
from tests.seams.site import book, hours_of, site
from tests.seams.small_month import at

NODES = {("prod", "n1"): "vision", ("prod", "n2"): "nlp", ("test", "n1"): "speech", ("test", "n2"): "ops"}


def test_a_credit_is_of_the_holders_of_one_node_of_one_cluster(tmp_path: Path) -> None:
    with site(tmp_path, VirtualClock(at(5)), prices=book("id: h, model: H100, price: 2")) as found:
        for (cluster, node), space in NODES.items():
            found.send(hours_of(f"{cluster}-{node}", at(0), 4, f"{space}/x", 1), node=node, cluster=cluster)
        span = {"cluster": "prod", "node": "n1", "start": "2026-10-25T01:00:00Z", "end": "2026-10-25T03:30:00Z"}
        answer = found.post("/v1/credits/preview", {**span, "share": "0.5"})
    (line,) = answer["lines"]
    assert (line["gpu_us"], Decimal(line["billed"]), line["amount"]) == (2.5 * 3_600_000_000, 5, "-2.50")
    assert answer["amount"] == "-2.50"
