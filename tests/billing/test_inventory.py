"""The YAML inventory: facts, re-reading, and faults with their place."""

from __future__ import annotations

import os

import pytest

from accountant.core.errors import InventoryError
from accountant.inventory.inventory_file import YamlInventory
from accountant.ledger.protocols import Down, NamespaceFacts, NodeFacts

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


def write(path, text, mtime_ns):
    path.write_text(text)
    os.utime(path, ns=(mtime_ns, mtime_ns))


def test_facts(tmp_path, books):
    path = tmp_path / "inventory.yaml"
    write(path, GOOD, 1)
    facts = YamlInventory(path).read(0)
    assert facts.nodes == (
        NodeFacts(
            cluster="prod", name="gpu-01", pool="training", region="eu-central-1", zone="a", capacity_type="spot",
            down=(
                Down(books.at("2026-10-05T08:00"), books.at("2026-10-05T10:00"), "firmware"),
                Down(books.at("2026-10-30"), None, "maintenance"),
            ),
            deleted_ms=books.at("2026-11-01"),
        ),
        NodeFacts(cluster="prod", name="gpu-02"),
    )  # fmt: skip
    assert facts.namespaces == (
        NamespaceFacts("edge", "vision", "edge-team"),
        NamespaceFacts("prod", "vision", "vision-team"),
    )


def test_read_again_when_it_changes_and_only_then(tmp_path):
    path = tmp_path / "inventory.yaml"
    write(path, GOOD, 1)
    inventory = YamlInventory(path)
    first = inventory.read(0)
    assert inventory.read(1) is first
    write(path, GOOD.replace("team: vision-team", "team: other"), 2)
    assert inventory.read(2).namespaces[1].team == "other"


def test_a_fault_does_not_stick_and_is_told_every_time(tmp_path):
    path = tmp_path / "inventory.yaml"
    write(path, GOOD.replace("schema: 1", "schema: 2"), 1)
    inventory = YamlInventory(path)
    for _ in range(2):
        with pytest.raises(InventoryError, match=r"inventory.yaml:1: schema"):
            inventory.read(0)
    write(path, GOOD, 2)
    assert len(inventory.read(1).nodes) == 2


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: gpu-02", "name: gpu-01", "inventory.yaml:5: nodes.1.name: 'gpu-01' occurs twice"),
        ("pool: training", "pol: training", "inventory.yaml:6: nodes.1.pol: unknown key"),
        ("capacity_type: spot", "capacity_type: cheap", "inventory.yaml:9: nodes.1.capacity_type: "),
        ("08:00:00Z", "08:00:00", "inventory.yaml:11: nodes.1.down.0.start: '2026-10-05T08:00:00' has a time of day"),
        ("12:00:00+02:00", "07:00:00Z", "inventory.yaml:11: nodes.1.down.0.end: ends at or before it begins"),
        ("deleted: 2026-11-01", "deleted: soon", "inventory.yaml:13: nodes.1.deleted: not a date: 'soon'"),
        ("team: vision-team", "team: ''", "inventory.yaml:15: namespaces.0.team: "),
    ],
)
def test_faults_name_their_place(tmp_path, old, new, message):
    path = tmp_path / "inventory.yaml"
    write(path, GOOD.replace(old, new, 1), 1)
    with pytest.raises(InventoryError) as fault:
        YamlInventory(path).read(0)
    assert message in str(fault.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(InventoryError, match="No such file"):
        YamlInventory(tmp_path / "absent.yaml").read(0)
