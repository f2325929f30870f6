"""The wire format: every payload ever sent still decodes, and the published schema describes it."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import msgspec
import pytest

from agent.wire import SCHEMA, UNATTRIBUTED, Batch, Slice, usage_batch

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "wire" / "v1"
PUBLISHED = ROOT / "docs" / "schema" / "usage-batch.v1.json"

REQUIRED = {
    "AgentReport": [],
    "Batch": ["boot_id", "cluster", "epoch", "first_seq", "node", "oldest_seq"],
    "GpuError": ["count", "kind"],
    "GpuReport": ["gpu_uuid"],
    "Gap": ["end_ms", "reason", "start_ms"],
    "Holder": ["kind", "uid"],
    "Owner": ["kind", "name"],
    "PodFacts": ["name", "namespace", "node", "observed_ms", "seq", "uid"],
    "PodStop": ["how"],
    "Sharing": ["mode"],
    "Skipped": ["reason", "seq"],
    "Slice": ["ci", "compute", "compute_of", "gi", "memory_mib", "memory_of_mib", "profile"],
    "UsageInterval": [
        "allocated_us",
        "capacity_us",
        "end_ms",
        "gpu_model",
        "gpu_uuid",
        "method",
        "seq",
        "start_ms",
    ],
}
"""What version 1 requires. A field added here would make older payloads undecodable."""


def golden(name: str) -> Batch:
    return msgspec.json.decode((GOLDEN / f"{name}.json").read_bytes(), type=Batch)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_every_golden_payload_decodes_and_survives_a_round_trip(path: Path) -> None:
    batch = msgspec.json.decode(path.read_bytes(), type=Batch)
    assert batch.schema == SCHEMA
    assert msgspec.json.decode(msgspec.json.encode(batch), type=Batch) == batch
    numbers = sorted([r.seq for r in batch.intervals] + [f.seq for f in batch.facts] + [s.seq for s in batch.skipped])
    assert numbers == list(range(batch.first_seq, batch.first_seq + len(numbers)))


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_the_sets_of_every_golden_payload_balance(path: Path) -> None:
    """Only a set that was carried over a restart may be less than the whole GPU."""
    capacity: dict[tuple[str, int, int, bool], int] = defaultdict(int)
    for row in msgspec.json.decode(path.read_bytes(), type=Batch).intervals:
        capacity[row.gpu_uuid, row.start_ms, row.end_ms, row.method == "carried"] += row.capacity_us
    for (_, start_ms, end_ms, carried), total in capacity.items():
        assert total == (end_ms - start_ms) * 1_000 or (carried and total < (end_ms - start_ms) * 1_000)


def test_every_part_of_the_language_occurs_in_a_golden_payload() -> None:
    batches = [golden(path.stem) for path in GOLDEN.glob("*.json")]
    rows = [row for batch in batches for row in batch.intervals]
    assert {row.health for row in rows} == {"ok", "lost"}
    assert {row.method for row in rows} >= {"device", "simulated", "carried"}
    assert {row.sharing.mode for row in rows if row.sharing} >= {"time-slicing", "mps"}
    assert any(row.slice and row.sharing for row in rows)
    assert any(row.holder is None for row in rows)
    assert any(row.holder == UNATTRIBUTED and row.busy_us for row in rows)
    assert {gap.reason for row in rows for gap in row.gaps} >= {"counter reset", "gpu is lost", "not observed"}
    assert any(batch.facts for batch in batches)
    assert any(batch.agent and batch.agent.version and not batch.agent.gpus for batch in batches)
    assert any(gpu.errors and gpu.needs and gpu.unread for b in batches if b.agent for gpu in b.agent.gpus or ())
    assert any(batch.skipped for batch in batches)


def test_a_golden_mig_payload_means_what_it_meant() -> None:
    first, *_ = golden("mig").intervals
    assert first.slice == Slice("3g.40gb", 1, 0, 3, 7, 40_960, 81_920)
    assert first.holder is not None
    assert (first.holder.kind, first.holder.namespace, first.holder.name) == ("pod", "nlp", "infer-1")
    assert (first.capacity_us, first.allocated_us, first.busy_us) == (25_714_286, 25_714_286, 16_457_142)


def test_only_the_required_fields_are_needed_and_the_rest_has_its_default() -> None:
    batch = golden("minimal")
    (row,), (facts,) = batch.intervals, batch.facts
    assert (row.slice, row.holder, row.sharing, row.health, row.gaps) == (None, None, None, "ok", ())
    assert (row.busy_us, row.sm_active_us, row.tensor_active_us) == (None, None, None)
    assert (row.memory_mib_s, row.energy_uj) == (None, None)
    assert (facts.labels, facts.owners, facts.queue_ref, facts.ended_ms) == ({}, (), "", None)


def test_fields_of_a_newer_agent_are_passed_over() -> None:
    batch = golden("unknown-future-fields")
    assert batch.intervals == golden("whole-gpu").intervals[:1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first_seq": "1"}, "Expected `int`, got `str`"),
        ({"intervals": [{"seq": 1}]}, "missing required field"),
        ({"skipped": [{"seq": 1.5, "reason": ""}]}, "Expected `int`, got `float`"),
    ],
)
def test_what_is_not_the_language_is_refused(change: dict[str, object], message: str) -> None:
    payload = {**json.loads((GOLDEN / "minimal.json").read_text(encoding="utf-8")), **change}
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.json.decode(json.dumps(payload).encode(), type=Batch)


def test_the_published_schema_is_the_one_in_force() -> None:
    """To update it: python -m agent.wire > docs/schema/usage-batch.v1.json"""
    assert PUBLISHED.read_text(encoding="utf-8") == usage_batch()


def test_version_one_requires_what_it_always_required() -> None:
    definitions = json.loads(usage_batch())["$defs"]
    assert {name: sorted(shape["required"]) for name, shape in definitions.items()} == REQUIRED
