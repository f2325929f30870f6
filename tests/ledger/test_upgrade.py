"""An upgrade of a ledger of an earlier release by the steps of docs/operations.md, and the rollback."""

from __future__ import annotations

import gzip
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb
import pytest

from tests.ledger.earlier_schemas import KEPT, SCHEMAS
from tests.patience import patience_s
from tests.real.programs import free_ports, running, wait_ready


def _ledger_of(schema: int, folder: Path) -> Path:
    place = folder / "ledger.duckdb"
    folder.mkdir()
    place.write_bytes(gzip.decompress((KEPT / f"schema-{schema}.duckdb.gz").read_bytes()))
    return place


@contextmanager
def _accountant(folder: Path) -> Iterator[str]:
    """Starts the present release with this data folder, and returns its address when it is ready."""
    (port,) = free_ports(1)
    words = ["accountant", "serve", "--data", str(folder), "--listen", f"127.0.0.1:{port}", "--auth", "off"]
    log = folder / "log"
    with running([sys.executable, "-m", *words], log) as process:
        wait_ready(f"http://127.0.0.1:{port}/readyz", process, log)
        yield f"http://127.0.0.1:{port}"


def _gputally(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "gputally", *words], capture_output=True, text=True, check=False, timeout=patience_s(60)
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("schema", [1, SCHEMAS - 1])
def test_an_earlier_ledger_is_upgraded_checked_and_can_be_gone_back_to(schema: int, tmp_path: Path) -> None:
    place = _ledger_of(schema, tmp_path / "data")
    before = hashlib.sha256(place.read_bytes()).hexdigest()
    copy = tmp_path / "copies" / "ledger.duckdb"  # step 1, made by the earlier release
    copy.parent.mkdir()
    copy.write_bytes(place.read_bytes())

    with _accountant(place.parent) as url:  # step 2
        _gputally("accountant", "check", "--url", url)  # step 3
        month = ("--start", "2026-10-01", "--end", "2026-11-01")
        answer = json.loads(_gputally("accountant", "usage", "--by", "node", *month, "--url", url, "--format", "json"))
    (line,) = answer["lines"]
    assert line["key"] == {"node": "n1"}
    assert line["accounts_gpu_us"]["busy"] > 0
    with duckdb.connect(str(place), read_only=True) as ledger:
        assert ledger.execute("SELECT max(number) FROM migration").fetchall() == [(SCHEMAS,)]

    restored = tmp_path / "again" / "ledger.duckdb"  # to go back
    restored.parent.mkdir()
    restored.write_bytes(copy.read_bytes())
    assert hashlib.sha256(restored.read_bytes()).hexdigest() == before


def test_an_earlier_release_refuses_a_later_ledger_and_leaves_it_as_it_is(tmp_path: Path) -> None:
    place = _ledger_of(SCHEMAS, tmp_path / "data")
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
