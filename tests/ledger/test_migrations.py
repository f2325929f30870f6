"""Ledgers of every earlier schema are opened, migrated and give the same answers; an upgrade and its rollback."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import duckdb
import pytest

from accountant.__main__ import main
from accountant.ledger.protocols import EpochReport, Facts, JobKey, NamespaceFacts, NodeFacts
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from accountant.storage.folder_or_object_store import in_folder
from accountant.wire.policy_models import Policy, QueuePolicy, WindowSpec
from accountant.wire.usage_cost_and_job_models import UsageLine
from agent.wire import Skipped
from gputally.base.clock import VirtualClock
from gputally.base.units import MS_PER_HOUR
from tests.deadlines import patience_s
from tests.ledger.conftest import NOW_MS, START_MS, Hand, booked
from tests.real.programs import free_ports, running, wait_ready

KEPT = Path(__file__).parents[1] / "golden" / "ledger"
"""Compressed ledger files of every earlier schema."""
SCHEMAS = len([f for f in (resources.files("accountant.storage") / "migrations").iterdir() if f.name.endswith(".sql")])


def packed(schema: int) -> Path:
    return KEPT / f"schema-{schema}.duckdb.gz"


def unpacked(schema: int, folder: Path) -> Path:
    """Unpacks the stored ledger file of a schema into the folder, and returns its path."""
    place = folder / "ledger.duckdb"
    place.write_bytes(gzip.decompress(packed(schema).read_bytes()))
    return place


every_schema = pytest.mark.parametrize("schema", range(1, SCHEMAS + 1))


def figures(line: UsageLine) -> list[int]:
    """The fields of a usage line that the first schema already had."""
    of = line.accounts_gpu_us
    accounts = (of.busy, of.allocated_idle, of.allocated_unknown, of.unallocated, of.unmetered, of.down)
    memory = line.memory_mib_s or 0  # the kept files were told an unknown memory as 0
    return [*accounts, line.borrowed_busy_us, line.unattributed_busy_us, memory, line.energy_uj]


def told(ledger: DuckLedger) -> Mapping[str, Any]:
    """Return the ledger's answers to users and schedulers, as JSON."""
    span = (START_MS, START_MS + 3 * MS_PER_HOUR)
    spec = WindowSpec(size=10_800, half_life=3_600)
    window = ledger.window(spec, span[1], "allocated", 0.98)
    lines = ledger.usage(*span, ("gpu", "team", "queue", "job", "pool"))
    minutes = ledger.usage(START_MS + 90_001, START_MS + 2_000_000, ())
    return {
        "usage": [[*line.key.values(), *figures(line)] for line in lines],
        "minutes": [figures(line) for line in minutes],
        "window": {"usage": window.usage, "capacity": window.capacity, "coverage": window.coverage},
        "acks": {epoch: ack.durable_seq for epoch, ack in ledger.acks("n1", "prod").items()},
        "acts": [[act.number, act.kind, act.subject, act.digest] for act in ledger.acts()],
        "holes": [[hole.first_seq, hole.last_seq, hole.reason] for hole in ledger.holes()],
        "quarantined": [[row.seq, row.reason] for row in ledger.quarantined()],
        "imbalance": ledger.imbalance(*span),
    }


def write(place: Path, hand: Hand) -> None:
    """A small ledger with rows in every table."""
    ledger = open_ledger(place, VirtualClock(NOW_MS), archive=in_folder(place.parent / "archive"))
    queue = QueuePolicy(name="left", team="red", refs=("kai:left",))
    ledger.put_policy(Policy(queues=(queue,)), START_MS, "ann")
    spaces = (NamespaceFacts("prod", "vision", team="blue"),)
    ledger.observe(Facts(nodes=(NodeFacts("prod", "n1", pool="a"),), namespaces=spaces), NOW_MS)
    rows = [hand.row(n, n - 2, n - 1, energy_uj=n * 1000) for n in range(2, 62)]
    ledger.append([hand.batch(hand.fact(1, queue_ref="kai:left"), *rows)], NOW_MS)
    ledger.append([hand.batch(hand.row(62, 3.5, 4.5, method="carried"), Skipped(63, "outbox-full"))], NOW_MS)
    ledger.append([hand.batch(hand.row(64, 100_000, 100_001), hand.row(65, 60, 61, gpu="gpu-2"))], NOW_MS + MS_PER_HOUR)
    ledger.report_epochs([EpochReport(JobKey("prod", "vision", "Pod/train-0"), 1, START_MS + 60_000, "ann")], NOW_MS)
    ledger.archive(NOW_MS)
    ledger.checkpoint()
    ledger.close()


def test_the_present_schema_is_kept(tmp_path, hand):
    kept = packed(SCHEMAS)
    if os.environ.get("GPUTALLY_GOLDEN") == "update" and not kept.exists():
        place = tmp_path / "ledger.duckdb"
        write(place, hand)
        KEPT.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(gzip.compress(place.read_bytes(), mtime=0))
        with closing(open_ledger(place, VirtualClock(NOW_MS))) as ledger:
            text = json.dumps(told(ledger), indent=1, sort_keys=True)
        kept.with_name(f"schema-{SCHEMAS}.json").write_text(text + "\n")
    assert kept.exists(), f"no ledger of schema {SCHEMAS} is kept: run this test with GPUTALLY_GOLDEN=update"


@every_schema
def test_every_schema_there_was_is_kept(schema, tmp_path):
    with duckdb.connect(str(unpacked(schema, tmp_path)), read_only=True) as ledger:
        assert ledger.execute("SELECT max(number) FROM migration").fetchall() == [(schema,)]


@every_schema
def test_a_kept_ledger_is_opened_and_tells_the_same(schema, opened, tmp_path, hand):
    now_ms = NOW_MS + 2 * MS_PER_HOUR
    ledger = opened(unpacked(schema, tmp_path), VirtualClock(now_ms))
    assert told(ledger) == json.loads((KEPT / f"schema-{schema}.json").read_text())
    receipt = booked(ledger, now_ms, hand.batch(hand.row(66, 61, 62, gpu="gpu-2")))
    assert (receipt.stored, receipt.quarantined) == (1, 0)
    ledger.checkpoint()
    assert ledger.imbalance(START_MS, START_MS + 3 * MS_PER_HOUR) == 0
    spec, end_ms = WindowSpec(size=10_800, half_life=3_600), START_MS + 3 * MS_PER_HOUR
    alone = ledger.window(spec, end_ms, "allocated", 0.98)
    booked(ledger, now_ms, hand.batch(hand.row(1, 0, 10), cluster="staging"))
    ledger.checkpoint()
    apart = ledger.window(spec, end_ms, "allocated", 0.98, cluster="prod")
    as_before = apart.model_copy(update={"cluster": None, "policy_counting": None})
    assert as_before == alone, "rows of old name theirs too"
    assert ledger.window(spec, end_ms, "allocated", 0.98).capacity > apart.capacity


SCHEMA_OF_A_FILE = {
    "tables": "SELECT table_name, column_count FROM duckdb_tables()",
    "columns": "SELECT table_name, column_index, column_name, data_type, is_nullable, column_default"
    " FROM duckdb_columns() WHERE schema_name = 'main' AND NOT internal",
    "indexes": "SELECT table_name, index_name, is_unique, expressions FROM duckdb_indexes()",
    "constraints": "SELECT table_name, constraint_type, constraint_text FROM duckdb_constraints()",
    "views": "SELECT view_name, sql FROM duckdb_views() WHERE NOT internal",
}


def schema_of(place: Path) -> dict[str, set[tuple[Any, ...]]]:
    with duckdb.connect(str(place), read_only=True) as file:
        return {what: set(file.execute(question).fetchall()) for what, question in SCHEMA_OF_A_FILE.items()}


@every_schema
def test_a_migrated_ledger_has_the_schema_of_a_fresh_one(schema, tmp_path):
    migrated, fresh = unpacked(schema, tmp_path), tmp_path / "fresh.duckdb"
    for place in (migrated, fresh):
        open_ledger(place, VirtualClock(NOW_MS)).close()
    found, expected = schema_of(migrated), schema_of(fresh)
    assert len(expected["columns"]) > 100
    for what, wanted in expected.items():
        assert found[what] == wanted, what


@contextmanager
def _accountant(folder: Path) -> Iterator[str]:
    """Starts the present release with this data folder, and returns its address when it is ready."""
    (port,) = free_ports(1)
    words = ["accountant", "serve", "--data", str(folder), "--listen", f"127.0.0.1:{port}", "--auth", "off"]
    log = folder / "log"
    with running([sys.executable, "-m", *words], log) as process:
        wait_ready(f"http://127.0.0.1:{port}/readyz", process, log)
        yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("schema", [1, SCHEMAS - 1])
def test_an_earlier_ledger_is_upgraded_and_checked(schema, tmp_path, capsys):
    place = unpacked(schema, tmp_path)
    with _accountant(tmp_path) as url:
        assert main(["check", "--url", url]) == 0
        capsys.readouterr()
        month = ("--start", "2026-10-01", "--end", "2026-11-01")
        assert main(["usage", "--by", "node", *month, "--url", url, "--format", "json"]) == 0
    (line,) = json.loads(capsys.readouterr().out)["lines"]
    assert line["key"] == {"node": "n1"}
    assert line["accounts_gpu_us"]["busy"] > 0
    with duckdb.connect(str(place), read_only=True) as ledger:
        assert ledger.execute("SELECT max(number) FROM migration").fetchall() == [(SCHEMAS,)]


def test_an_earlier_release_refuses_a_later_ledger_and_leaves_it_as_it_is(tmp_path):
    place = unpacked(SCHEMAS, tmp_path)
    with duckdb.connect(str(place)) as ledger:
        ledger.execute(
            "INSERT INTO migration SELECT * REPLACE (number + 1 AS number) FROM migration WHERE number = ?", [SCHEMAS]
        )
    before = place.read_bytes()
    done = subprocess.run(
        [sys.executable, "-m", "accountant", "serve", "--data", str(place.parent), "--listen", "127.0.0.1:0",
         "--auth", "off"],
        capture_output=True, text=True, check=False, timeout=patience_s(60),
    )  # fmt: skip
    assert done.returncode != 0
    assert f"written by a newer release (schema {SCHEMAS + 1}, known {SCHEMAS}): start that release" in done.stderr
    assert place.read_bytes() == before
