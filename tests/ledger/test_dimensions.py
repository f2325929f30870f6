"""A dimension is a row of one table: everything that groups, filters, shows or publishes usage knows it from there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accountant.wire.dimensions import DIMENSIONS
from tests.ledger import release_with_a_measure

ROOT = Path(__file__).parents[2]
TABLE = ")  # fmt: skip\nDECLARED"
ROWS = """
    DeclaredDimension("rack", "Rack", "label", "rack of the node", labels=("example.com/rack",)),
    DeclaredDimension("vendor", "Vendor", "model", "maker of the GPU", read=lambda model: model.partition(" ")[0]),
    DeclaredDimension(
        "workload_kind", "Kind", "holder", "kind of the workload", "job", lambda job: job.partition("/")[0]
    ),
    DeclaredDimension(
        "half", "Half-day", "time", "half of the local day", "hour",
        lambda hour: hour[:10] + (" am" if hour[11:13] < "12" else " pm"),
    ),
"""
NEW = ["rack", "vendor", "workload_kind", "half"]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a release in whose table there are four more rows makes of the data of this one."""
    copy, folder = tmp_path_factory.mktemp("later"), tmp_path_factory.mktemp("data")
    for package in ("agent", "accountant", "gputally"):
        shutil.copytree(ROOT / package, copy / package, copy_function=os.symlink, symlinks=True)
    place = copy / "accountant" / "wire" / "dimensions.py"
    text = place.read_text("utf-8")
    assert text.count(TABLE) == 1
    place.unlink()
    place.write_text(text.replace(TABLE, ROWS.lstrip("\n") + TABLE), "utf-8")
    release_with_a_measure.before(folder)
    done = subprocess.run(
        [sys.executable, "-m", "tests.ledger.release_with_dimensions", str(folder)],
        capture_output=True,
        text=True,
        cwd=copy,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(copy), str(ROOT)]), "PYTHONDONTWRITEBYTECODE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_people_programs_and_commands_can_choose_it(told):
    known = [one.name for one in DIMENSIONS]
    assert told["API"] == [*known, *NEW]
    assert set(told["filters"]) == {*known, *NEW, "label"}
    assert all(told["page"].values())
    assert all(name in told[place] for place in ("commands", "assistant") for name in NEW)


def test_usage_is_grouped_and_filtered_by_it(told):
    """GPU A is held by a pod for four hours, and GPU B is not; the rack is known from the second hour on."""
    held, unheld = {"busy": 2.0, "allocated_idle": 2.0}, {"unallocated": 4.0}
    assert told["usage"]["vendor"] == {"NVIDIA": held | unheld}
    assert told["usage"]["workload_kind"] == {"": unheld, "Pod": held}
    assert told["usage"]["rack"] == {
        "": {"busy": 0.5, "allocated_idle": 0.5, "unallocated": 1.0},
        "r7": {"busy": 1.5, "allocated_idle": 1.5, "unallocated": 3.0},
    }
    assert told["usage"]["half"] == {"2026-10-01 am": held | unheld}
    assert told["usage"]["rack,workload_kind,half"]["r7/Pod/2026-10-01 am"] == {"busy": 1.5, "allocated_idle": 1.5}
    found = told["filtered"]
    assert found["rack=r7"] == {"A": {"busy": 1.5, "allocated_idle": 1.5}, "B": {"unallocated": 3.0}}
    assert found["vendor=NVIDIA"] == found["half=2026-10-01 am"] == {"A": held, "B": unheld}
    assert (found["workload_kind=Pod"], found["workload_kind="]) == ({"A": held}, {"B": unheld})


def test_files_have_it(told):
    head, *lines = told["CSV"]
    hours = {line[head.index("rack")]: float(line[head.index("allocated_gpu_hours")]) for line in lines}
    assert hours == {"": 1.0, "r7": 3.0}


def test_the_lake_has_it(told):
    """In hours that a release without it published, it is unknown until they are published again."""
    assert told["in a lake from before"] == told["unknown of it"] == [["", 4.0]]
    assert told["lake"] is True
    assert told["of the lake"] == {
        "rack": [["", 2.0], ["r7", 6.0]],
        "vendor": [["NVIDIA", 8.0]],
        "workload_kind": [["", 4.0], ["Pod", 4.0]],
        "half": [["2026-10-01 am", 8.0]],
    }
    assert told["filtered lake"] == [["r7", 3.0]]
    assert told["rebuilt from the archive"] is True


def test_it_is_read_of_the_labels_of_nodes(told):
    """Of two inventories, one suffices."""
    assert told["of a node's labels"] == ["r8", "r8"]
