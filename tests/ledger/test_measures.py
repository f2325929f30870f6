"""What is made of the table of measures stays as it is for the measures that are there: columns of the ledger's tables,
of the archive, the relation of usage, the lake, `gputally.connect` and Explore, and fields of the API."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pyarrow.parquet as pq
import pytest

from accountant.core.errors import LedgerUnavailable
from accountant.lake.tables import USAGE_HOURLY
from accountant.ledger.usage import LENT, MEASURES, START_UP, names_of
from accountant.storage.duckdb_ledger import open_ledger
from accountant.storage.folder_or_object_store import in_folder
from accountant.storage.write.record_columns import contents, digests
from accountant.web.explore_page import _SUFFIXES
from accountant.web.explore_table import COLUMNS, FIGURES
from accountant.wire.usage_cost_and_job_models import UsageLine
from gputally.base.clock import VirtualClock
from gputally.client import Client
from tests.empty_ledger import fresh
from tests.ledger import release_with_a_measure
from tests.ledger.conftest import NOW_MS, Hand, booked
from tests.seams.site import HOUR_US

GOLDEN = Path(__file__).parents[1] / "golden" / "measures.json"
"""For each place the columns of the first release, in their order."""


class OneLine:
    """An accountant whose usage has one line without a key."""

    def get(self, path: str, query: object) -> bytes:
        kinds = {"starting_us": 0, "gang_waiting_us": 0, "running_idle_us": 0, "reserved_unused_us": 0}
        line = UsageLine(key={}, **kinds).model_dump(mode="json")
        return json.dumps({"lines": [line], "coverage": 1.0, "next_page": None}).encode()


def columns_of_a_ledger(folder: Path) -> dict[str, Any]:
    """Return the columns of the tables, and those of the archived rows."""
    place, hand = fresh(folder / "ledger.duckdb"), Hand()
    with closing(open_ledger(place, VirtualClock(NOW_MS), archive=in_folder(folder / "archive"))) as ledger:
        booked(ledger, NOW_MS, hand.batch(hand.row(1)))
        ledger.archive(NOW_MS)
    (rows,) = (folder / "archive").rglob("rows*.parquet")
    with duckdb.connect(str(place), read_only=True) as connection:
        found = connection.execute(
            "SELECT table_name, column_name || ' ' || data_type || CASE WHEN is_nullable THEN '' ELSE ' NOT NULL' END "
            "FROM duckdb_columns() WHERE schema_name = 'main' AND NOT internal ORDER BY table_name, column_index"
        ).fetchall()
    tables: dict[str, list[str]] = {}
    for table, column in found:
        tables.setdefault(f"table {table}", []).append(column)
    return {**tables, "archived rows": [f"{field.name} {field.type}" for field in pq.read_schema(rows)]}


def of_explore(name: str) -> str:
    column = FIGURES[name]
    return f"{name}{_SUFFIXES.get(column.kind, '')}: {column.title}, {column.kind}"


def columns_of_connect() -> list[str]:
    frame: pd.DataFrame = Client(OneLine()).usage(by=(), breakdown=True)
    return [f"{name} {kind}" for name, kind in frame.dtypes.items()]


def made(folder: Path) -> dict[str, Any]:
    return {
        **columns_of_a_ledger(folder),
        "relation": list(names_of((*MEASURES, *START_UP, *LENT))),
        "API": [f"{name}: {field.annotation} = {field.default!r}" for name, field in UsageLine.model_fields.items()],
        "lake": [f"{name} {kind}: {text}" for name, kind, text in USAGE_HOURLY.columns],
        "connect": columns_of_connect(),
        "Explore": [of_explore(name) for name in COLUMNS],
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return made(tmp_path_factory.mktemp("measures"))


PLACES: dict[str, list[str]] = json.loads(GOLDEN.read_text("utf-8")) if GOLDEN.exists() else {}


@pytest.mark.parametrize("place", PLACES)
def test_the_columns_of_the_first_release_stay_in_their_order(found, place):
    """Later ones may stand between them."""
    later = set(found[place]) - set(PLACES[place])
    assert [column for column in found[place] if column not in later] == PLACES[place]


def test_a_ledgers_own_columns_are_only_ever_added_at_the_end(found):
    for place, columns in PLACES.items():
        if place.startswith("table "):
            assert found[place][: len(columns)] == columns


def test_records_have_the_digests_of_the_first_release():
    """A resent record is compared with the stored one by its digest."""
    hand = Hand()
    rows = [hand.row(1), hand.row(1, sm_active_us=5, energy_uj=7, memory_mib_s=0)]
    assert digests(contents(rows)).tolist() == [3393796449923774374, 1281719780404808380]


WIRE = "    energy_uj: int | None = None\n"
TABLE = ")  # fmt: skip\nSHOWN"
ROW = """
    Measure(
        "encoder_busy", "GPU-µs", "encoder_unknown", "encoder_busy_us", "encoder_blind_us", "held",
        "activity of the encoders, GPU-µs", "held time whose encoder activity is not known, GPU-µs",
        (Shown("encoder", "Encoder", "share", "mean activity of the encoders in held time"),),
    ),
"""


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources with one more measure: a field of the record, and a row of the table."""
    root, copy = Path(__file__).parents[2], tmp_path_factory.mktemp("later")
    for package in ("agent", "accountant", "gputally"):
        shutil.copytree(root / package, copy / package, copy_function=os.symlink, symlinks=True)
    for name, place, more in (
        ("agent/wire.py", WIRE, f"{WIRE}    encoder_busy_us: int | None = None\n"),
        ("gputally/base/measures.py", TABLE, ROW.lstrip("\n") + TABLE),
    ):
        text = (root / name).read_text("utf-8")
        assert text.count(place) == 1
        (copy / name).unlink()
        (copy / name).write_text(text.replace(place, more), "utf-8")
    return copy


def test_a_measure_is_a_field_of_the_record_and_a_row_of_the_table(later, tmp_path):
    """Data from before have it as unknown. A ledger that knows it is refused by a release that does not."""
    release_with_a_measure.before(tmp_path)
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.ledger.release_with_a_measure", str(tmp_path)]
    path = {"PYTHONPATH": os.pathsep.join([str(later), str(root)]), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=later, env=os.environ | path, check=False)
    assert done.returncode == 0, done.stderr
    told, unknown = json.loads(done.stdout.splitlines()[-1]), [None, HOUR_US, 28, 0]
    expected = {
        "of data from before": [unknown, unknown, [0, 0, 0, 0], [0, 0, 0, 0]],
        "in a lake from before": [None, 2 * HOUR_US, 56, 0],
        "of a negative one": [200, 4 * ["negative"]],
        "API": [unknown, unknown, [HOUR_US // 4, 0, 36, 0], [None, HOUR_US, None, HOUR_US]],
        "page": True,
        "connect": {"encoder_busy_us": str(HOUR_US // 4), "encoder_unknown_us": str(3 * HOUR_US)},
        "lake": True,
        "rebuilt from the archive": True,
        "hours only in the archive": 2,
        "read from the archive": True,
        "balanced": 0,
    }
    assert {name: told[name] for name in expected} == expected
    assert told["described"]["description"] == "activity of the encoders, GPU-µs"
    head, *lines = told["CSV"]
    assert {line[head.index("gpu")]: line[head.index("encoder_share")] for line in lines} == {"A": "0.25", "B": ""}
    with pytest.raises(LedgerUnavailable, match="encoder_busy_us"):
        open_ledger(tmp_path / "data" / "ledger.duckdb", VirtualClock(NOW_MS))
