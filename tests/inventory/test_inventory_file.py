"""The inventory file: facts, the maintenance calendar, faults with their place, and several inventories combined."""

from __future__ import annotations

import os
import re
from itertools import count

import pytest

from accountant.core.errors import InventoryError
from accountant.inventory.inventory_file import MergedInventory, YamlInventory
from accountant.inventory.node_facts_and_downtime import MOST_SPANS, Calendar, PlannedMaintenance
from accountant.ledger.protocols import Down, Facts, NamespaceFacts, NodeFacts
from tests.billing.usage_rows import at

GOOD = """\
schema: 1
cluster: prod
nodes:
  - name: gpu-02
  - name: gpu-01
    pool: training
    region: eu-central-1
    zone: a
    capacity_type: spot
    down:
      - {start: 2026-10-05T08:00:00Z, end: 2026-10-05T12:00:00+02:00, reason: firmware}
      - {start: 2026-10-30}
    deleted: 2026-11-01
namespaces:
  - {name: vision, team: vision-team}
  - {name: vision, cluster: edge, team: edge-team}
"""


@pytest.fixture
def inventory(tmp_path):
    """Return a function that writes the inventory file with a later modification time and returns an inventory that
    reads it."""
    path, times = tmp_path / "inventory.yaml", count(1)
    found = YamlInventory(path)

    def written(text):
        path.write_text(text)
        time_ns = next(times)
        os.utime(path, ns=(time_ns, time_ns))
        return found

    return written


def test_facts(inventory):
    facts = inventory(GOOD).read(0)
    assert facts.nodes == (
        NodeFacts(
            cluster="prod", name="gpu-01", pool="training", region="eu-central-1", zone="a", capacity_type="spot",
            down=(
                Down(at("2026-10-05T08:00"), at("2026-10-05T10:00"), "firmware"),
                Down(at("2026-10-30"), None, "maintenance"),
            ),
            deleted_ms=at("2026-11-01"),
        ),
        NodeFacts(cluster="prod", name="gpu-02"),
    )  # fmt: skip
    assert facts.namespaces == (
        NamespaceFacts("edge", "vision", "edge-team"),
        NamespaceFacts("prod", "vision", "vision-team"),
    )


def test_read_again_when_it_changes_and_only_then(inventory):
    file = inventory(GOOD)
    assert file.read(1) is file.read(0)
    assert inventory(GOOD.replace("team: vision-team", "team: other")).read(2).namespaces[1].team == "other"


def test_a_fault_does_not_stick_and_is_told_every_time(inventory):
    bad = inventory(GOOD.replace("schema: 1", "schema: 2"))
    for _ in range(2):
        with pytest.raises(InventoryError, match=r"inventory.yaml:1: schema"):
            bad.read(0)
    assert len(inventory(GOOD).read(1).nodes) == 2


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: gpu-02", "name: gpu-01", "inventory.yaml:5: nodes.1.name: 'gpu-01' occurs twice"),
        ("pool: training", "pol: training", "inventory.yaml:6: nodes.1.pol: unknown key"),
        ("capacity_type: spot", "capacity_type: cheap", "inventory.yaml:9: nodes.1.capacity_type: "),
        ("08:00:00Z", "08:00:00", "inventory.yaml:11: nodes.1.down.0.start: '2026-10-05T08:00:00' has no offset"),
        ("12:00:00+02:00", "07:00:00Z", "inventory.yaml:11: nodes.1.down.0.end: ends at or before it begins"),
        ("deleted: 2026-11-01", "deleted: soon", "inventory.yaml:13: nodes.1.deleted: not a date: 'soon'"),
        ("team: vision-team", "team: ''", "inventory.yaml:15: namespaces.0.team: "),
    ],
)
def test_faults_name_their_place(inventory, old, new, message):
    with pytest.raises(InventoryError, match=re.escape(message)):
        inventory(GOOD.replace(old, new, 1)).read(0)


def test_a_missing_file(tmp_path):
    with pytest.raises(InventoryError, match="No such file"):
        YamlInventory(tmp_path / "absent.yaml").read(0)


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
def test_an_entry_concerns_nodes_by_name_or_pool_of_its_cluster(nodes, pools, concerned):
    calendar = Calendar((PlannedMaintenance("prod", nodes, pools, 100, 200),))
    applied = calendar.applied(NODES, 150)
    assert [node.name for node in applied if node.down] == concerned
    assert all(node.down == (Down(100, 200, "maintenance"),) for node in applied if node.down)
    assert calendar.applied(NODES, 99) == NODES


def test_a_weekly_window_stays_at_its_local_hour_over_the_change_of_the_clocks():
    weekly = PlannedMaintenance(
        "prod", ("*",), (), at("2026-10-18"), None, "sunday", "0 6 * * sun", 7_200, timezone="Europe/Berlin"
    )
    spans = weekly.spans(at("2026-11-01T05:00"))
    assert [span.start_ms for span in spans] == [at("2026-10-18T04:00"), at("2026-10-25T05:00"), at("2026-11-01T05:00")]
    assert {span.end_ms - span.start_ms for span in spans if span.end_ms} == {7_200_000}
    assert len(weekly.spans(at("2026-11-01T04:59"))) == 2


def test_repetitions_end_with_the_entry_and_are_bounded():
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


def test_what_an_operator_writes_beats_what_a_cluster_says(inventory):
    cluster = Fixed(
        Facts(
            (NodeFacts("prod", "gpu-01", pool="a", zone="z"), NodeFacts("prod", "gpu-02")),
            (NamespaceFacts("prod", "vision", "theirs"), NamespaceFacts("prod", "web", "web")),
        )
    )
    yaml = inventory(FILE)
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
    ("section", "entry", "fault"),
    [
        ("maintenance", "{start: 2026-10-05}", "needs nodes or pools"),
        ("maintenance", "{nodes: [a], start: 2026-10-05, end: 2026-10-05}", "ends at or before it begins"),
        ("maintenance", "{nodes: [a], start: 2026-10-05, every: '0 6 * * sun'}", "set both every and for, or neither"),
        ("maintenance", "{nodes: [a], start: 2026-10-05, every: often, for: 1h}", "not a cron expression: 'often'"),
        ("maintenance", "{nodes: [a], start: someday}", "someday"),
        ("maintenance", "{nodes: [a], start: 2026-10-05, every: '0 6 * * *', for: 1h, timezone: Mars}", "Mars"),
        ("namespaces", "{name: a}", "needs a team"),
        ("namespaces", "{name: a, team: t, label: l}", "set both label and teams, or neither"),
        ("namespaces", "{name: a, teams: [t]}", "set both label and teams, or neither"),
    ],
)
def test_a_bad_entry_is_refused_with_its_line(inventory, section, entry, fault):
    with pytest.raises(InventoryError, match=rf"inventory.yaml:3.*{fault}"):
        inventory(f"schema: 1\n{section}:\n  - {entry}\n").read(0)
