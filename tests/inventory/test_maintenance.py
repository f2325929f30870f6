"""The maintenance calendar, and several inventories as one."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from accountant.core.errors import InventoryError
from accountant.inventory.inventory_file import MergedInventory, YamlInventory
from accountant.inventory.node_facts_and_downtime import MOST_SPANS, Calendar, PlannedMaintenance
from accountant.ledger.protocols import Down, Facts, NamespaceFacts, NodeFacts


def at(text: str) -> int:
    return round(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000)


NODES = [NodeFacts("prod", "gpu-01", pool="a"), NodeFacts("prod", "cpu-01", pool="b"), NodeFacts("edge", "gpu-01")]


@pytest.mark.parametrize(
    ("nodes", "pools", "concerned"),
    [
        (("gpu-*",), (), ["gpu-01"]),
        ((), ("b",), ["cpu-01"]),
        (("gpu-01",), ("b",), ["gpu-01", "cpu-01"]),
        (("x",), (), []),
    ],
)
def test_an_entry_concerns_nodes_by_name_or_pool_of_its_cluster(
    nodes: tuple[str, ...], pools: tuple[str, ...], concerned: list[str]
) -> None:
    calendar = Calendar((PlannedMaintenance("prod", nodes, pools, 100, 200),))
    applied = calendar.applied(NODES, 150)
    assert [node.name for node in applied if node.down] == concerned
    assert all(node.down == (Down(100, 200, "maintenance"),) for node in applied if node.down)
    assert calendar.applied(NODES, 99) == NODES


def test_a_weekly_window_stays_at_its_local_hour_over_the_change_of_the_clocks() -> None:
    weekly = PlannedMaintenance(
        "prod", ("*",), (), at("2026-10-18"), None, "sunday", "0 6 * * sun", 7_200, timezone="Europe/Berlin"
    )
    spans = weekly.spans(at("2026-11-01T05:00"))
    assert [span.start_ms for span in spans] == [at("2026-10-18T04:00"), at("2026-10-25T05:00"), at("2026-11-01T05:00")]
    assert {span.end_ms - span.start_ms for span in spans if span.end_ms} == {7_200_000}
    assert len(weekly.spans(at("2026-11-01T04:59"))) == 2


def test_repetitions_end_with_the_entry_and_are_bounded() -> None:
    until = PlannedMaintenance("prod", ("*",), (), at("2026-01-01"), at("2026-01-03T01:00"), "x", "0 0 * * *", 7_200)
    assert until.spans(at("2027-01-01"))[-1] == Down(at("2026-01-03"), at("2026-01-03T01:00"), "x")
    assert len(until.spans(at("2027-01-01"))) == 3
    often = PlannedMaintenance("prod", ("*",), (), 0, None, "x", "* * * * *", 1)
    assert len(often.spans(at("2026-01-01"))) == MOST_SPANS


FILE = """schema: 1
cluster: prod
nodes:
  - {name: gpu-01, pool: mine}
namespaces:
  - {name: vision, team: vision}
  - {name: shared, label: who, teams: [b, a], since: 2026-10-01}
maintenance:
  - {nodes: [gpu-*], start: 2026-10-05T08:00:00Z, end: 2026-10-05T12:00:00Z, reason: firmware}
"""


class Fixed:
    def __init__(self, facts: Facts) -> None:
        self.facts, self.took = facts, 0

    def read(self, now_ms: int) -> Facts:
        return self.facts

    def taken(self) -> None:
        self.took += 1


def test_what_an_operator_writes_beats_what_a_cluster_says(tmp_path: Path) -> None:
    path = tmp_path / "inventory.yaml"
    path.write_text(FILE)
    cluster = Fixed(
        Facts(
            (NodeFacts("prod", "gpu-01", pool="a", zone="z"), NodeFacts("prod", "gpu-02")),
            (NamespaceFacts("prod", "vision", "theirs"), NamespaceFacts("prod", "web", "web")),
        )
    )
    yaml = YamlInventory(path)
    merged = MergedInventory([yaml, cluster], lambda: yaml.calendar)
    facts = merged.read(at("2026-10-06"))
    firmware = (Down(at("2026-10-05T08:00"), at("2026-10-05T12:00"), "firmware"),)
    assert facts.nodes == (
        NodeFacts("prod", "gpu-01", pool="mine", zone="z", down=firmware),
        NodeFacts("prod", "gpu-02", down=firmware),
    )
    assert facts.namespaces == (
        NamespaceFacts("prod", "shared", "", "who", ("a", "b"), at("2026-10-01")),
        NamespaceFacts("prod", "vision", "vision"),
        NamespaceFacts("prod", "web", "web"),
    )
    merged.taken()
    assert cluster.took == 1


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        ("{start: 2026-10-05}", "name nodes or pools"),
        ("{nodes: [a], start: 2026-10-05, end: 2026-10-05}", "ends at or before it begins"),
        ("{nodes: [a], start: 2026-10-05, every: '0 6 * * sun'}", "every and for go together"),
        ("{nodes: [a], start: 2026-10-05, every: 'often', for: 1h}", "not a cron expression: 'often'"),
        ("{nodes: [a], start: someday}", "someday"),
        ("{nodes: [a], start: 2026-10-05, every: '0 6 * * *', for: 1h, timezone: Mars}", "Mars"),
    ],
)
def test_a_bad_entry_is_refused_with_its_line(tmp_path: Path, entry: str, fault: str) -> None:
    path = tmp_path / "inventory.yaml"
    path.write_text(f"schema: 1\nmaintenance:\n  - {entry}\n")
    with pytest.raises(InventoryError, match=fault) as caught:
        YamlInventory(path).read(0)
    assert str(caught.value).startswith(f"{path}:3")


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        ("{name: a}", "needs a team"),
        ("{name: a, team: t, label: l}", "go together"),
        ("{name: a, teams: [t]}", "go together"),
    ],
)
def test_a_namespace_without_anybody_to_pay_is_refused(tmp_path: Path, entry: str, fault: str) -> None:
    path = tmp_path / "inventory.yaml"
    path.write_text(f"schema: 1\nnamespaces:\n  - {entry}\n")
    with pytest.raises(InventoryError, match=fault):
        YamlInventory(path).read(0)
