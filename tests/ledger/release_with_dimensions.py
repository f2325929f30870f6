"""What a release with more dimensions does with the data of this release. It is run with a copy of the sources in which
they are declared (`tests.ledger.test_dimensions`), and prints what it sees as JSON."""

from __future__ import annotations

import csv
import io
import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from accountant.assistant import tools
from accountant.cli.usage_commands import app
from accountant.inventory.node_facts_and_downtime import described, merge_nodes
from accountant.lake.duckdb_engine import DuckDbEngine
from accountant.lake.iceberg_catalog import Catalogue
from accountant.lake.lake_ledger import LakeLedger, ledgers
from accountant.ledger.usage import Usage
from accountant.storage.duckdb_ledger import open_ledger
from accountant.storage.folder_or_object_store import in_folder
from accountant.wire.usage_cost_and_job_models import BUILT_IN
from gputally.base.clock import VirtualClock
from tests.empty_ledger import fresh
from tests.ledger.release_with_a_measure import SPAN, accountant, hours_of
from tests.seams.site import HOUR_MS, HOUR_US

RACK, VENDOR, KIND, HALF = "rack", "vendor", "workload_kind", "half"
NODES = """\
schema: 1
cluster: prod
nodes:
  - {name: n1, rack: r7, since: 2026-10-01T01:00:00Z}
"""
QUERY = {"start": "2026-10-01T00:00:00Z", "end": "2026-10-01T04:00:00Z"}


def hours(usage: Usage) -> list[list[Any]]:
    """Return the values of each row, and the GPU-hours of its capacity."""
    return [[*line.key.values(), line.accounts_gpu_us.total / HOUR_US] for line in usage.lines()]


def after(folder: Path) -> dict[str, Any]:
    """Two more hours, with an inventory that names the rack, and all that shows the dimensions."""
    told: dict[str, Any] = {}
    with accountant(folder, 4, inventory=NODES) as (found, publisher):
        engine = DuckDbEngine(Catalogue.connect(found.service.settings.lake))
        with closing(engine):
            lake, early = LakeLedger(engine, ledgers(engine)["prod"]), (SPAN[0], SPAN[0] + 2 * HOUR_MS)
            told["in a lake from before"] = hours(lake.usage(early, (RACK,)))
            told["unknown of it"] = hours(lake.usage(early, (RACK,), {RACK: ("",)}))
        found.send([*hours_of("A", 2, 2, held=True), *hours_of("B", 2, 2)], epoch="e2")
        schema = found.get("/openapi.json")
        parameters = {one["name"]: one for one in schema["paths"]["/v1/usage"]["get"]["parameters"]}
        told["API"] = parameters["by"]["schema"]["items"]["anyOf"][0]["enum"]
        told["filters"] = [name.removeprefix("where.") for name in parameters if name.startswith("where.")]
        told["commands"] = CliRunner().invoke(app, ["usage", "--help"], env={"COLUMNS": "300"}).stdout
        told["assistant"] = str(tools.By.__metadata__)
        view = {"by": RACK, **QUERY}
        page = found.client.get("/explore", params=view).text
        told["page"] = {name: f'<option value="{name}"' in page for name in BUILT_IN}
        text = found.client.get("/explore.csv", params=view).text
        told["CSV"] = [row for row in csv.reader(io.StringIO(text)) if row and row[0] in ("record", "line")]
        told["usage"] = {
            name: found.usage(name, **QUERY) for name in (RACK, VENDOR, KIND, HALF, f"{RACK},{KIND},{HALF}")
        }
        told["filtered"] = {
            f"{name}={value}": found.usage("gpu", **QUERY, **{f"where.{name}": value})
            for name, value in ((RACK, "r7"), (VENDOR, "NVIDIA"), (KIND, "Pod"), (KIND, ""), (HALF, "2026-10-01 am"))
        }
        publisher.publish()
        ledger = found.service.ledger
        with closing(DuckDbEngine(Catalogue.connect(found.service.settings.lake))) as engine:
            lake = LakeLedger(engine, ledgers(engine)["prod"])
            with ledger.moment(*SPAN) as moment:
                told["lake"] = hours(lake.usage(SPAN, BUILT_IN)) == hours(moment.usage(SPAN, BUILT_IN))
                truth = hours(moment.usage(SPAN, BUILT_IN))
            told["of the lake"] = {name: hours(lake.usage(SPAN, (name,))) for name in (RACK, VENDOR, KIND, HALF)}
            asked = (RACK,), {KIND: ("Pod",), RACK: ("r7",)}
            told["filtered lake"] = hours(lake.usage(SPAN, *asked))
        ledger.archive(SPAN[1])
        place = fresh(folder / "rebuilt.duckdb")
        archive = in_folder(folder / "archive")
        with (
            closing(open_ledger(place, VirtualClock(SPAN[1]), archive=archive)) as rebuilt,
            rebuilt.moment(*SPAN) as moment,
        ):
            told["rebuilt from the archive"] = hours(moment.usage(SPAN, BUILT_IN)) == truth
    labelled, written = described("c", "n", {"example.com/rack": "r8"}), described("c", "n", {})
    told["of a node's labels"] = [labelled.value(RACK), merge_nodes(written, labelled).value(RACK)]
    return told


if __name__ == "__main__":
    print(json.dumps(after(Path(sys.argv[1]))))
