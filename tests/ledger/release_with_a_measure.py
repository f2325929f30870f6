"""What a release with one more measure does with the data of this release. It is run with a copy of the sources to
which the measure was added (`tests.ledger.test_measures`), and prints what it sees as JSON."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from accountant.lake.duckdb_engine import DuckDbEngine
from accountant.lake.iceberg_catalog import Catalogue
from accountant.lake.lake_ledger import LakeLedger, ledgers
from accountant.lake.publisher import Publisher
from accountant.storage.duckdb_ledger import open_ledger
from accountant.storage.folder_or_object_store import in_folder
from agent.wire import UsageInterval
from gputally.base.clock import VirtualClock
from gputally.client import Client
from tests.empty_ledger import fresh
from tests.moments import present
from tests.seams.site import H100, HOUR_MS, HOUR_US, Site, site, uid_of
from tests.usage_records import interval, pod_holder

START_MS = 1_790_812_800_000
SPAN = START_MS, START_MS + 4 * HOUR_MS
NAME = "encoder_busy"
FIELDS = (f"{NAME}_us", "encoder_unknown_us", "sm_active_us", "sm_unknown_us")


def hours_of(gpu: str, first: int, hours: int, *, held: bool = False, **fields: int) -> list[UsageInterval]:
    """Build hours of a GPU in quarters. fields: the figures of each quarter."""
    quarter_ms = HOUR_MS // 4
    holder = pod_holder("train", "vision", uid_of("vision/train")) if held else None
    given = {"busy_us": HOUR_US // 8 if held else None, "gpu_model": H100, "span_ms": quarter_ms, **fields}
    begin_ms = START_MS + first * HOUR_MS
    return [interval(begin_ms + number * quarter_ms, gpu, holder, **given) for number in range(4 * hours)]


@contextmanager
def accountant(folder: Path, hours: int, **given: Any) -> Iterator[tuple[Site, Publisher]]:
    """An accountant some hours after the start, with a lake and an archive, and its publisher. given: settings."""
    clock = VirtualClock(START_MS + hours * HOUR_MS)
    (folder / "lake").mkdir(exist_ok=True)
    lake = {"warehouse": str(folder / "lake"), "ledger": "prod"}
    with site(folder, clock, lake=lake, archive={"to": str(folder / "archive")}, **given) as found:
        service = found.service
        assert service.settings.lake is not None
        catalogue = Catalogue.connect(service.settings.lake)
        with closing(catalogue):
            yield found, Publisher(service.ledger, service.books, service.settings, clock, lambda: catalogue)


def before(folder: Path) -> None:
    """Two hours of this release: a held and an unheld GPU, archived and published."""
    with accountant(folder, 2) as (found, publisher):
        found.send([*hours_of("A", 0, 2, held=True, sm_active_us=7), *hours_of("B", 0, 2)])
        found.service.ledger.archive(SPAN[0] + 2 * HOUR_MS)
        publisher.publish()


def by_hour(found: Site) -> list[list[Any]]:
    """Return FIELDS of the pod's GPU by hour."""
    query = {"start": "2026-10-01T00:00:00Z", "end": "2026-10-01T04:00:00Z", "where.gpu": "A"}
    return [[line[name] for name in FIELDS] for line in found.get("/v1/usage", by="hour", **query)["lines"]]


def relation(ledger: Any) -> Any:
    """Return all figures, also of parts of rows."""
    with ledger.moment(*SPAN) as moment:
        return [
            [line.model_dump() for line in moment.usage(span, ("gpu", "hour")).lines()]
            for span in (SPAN, (START_MS + 1_000_003, START_MS + 2 * HOUR_MS + 1_000_003))
        ]


class Reached:
    """A client's connection to a site."""

    def __init__(self, found: Site) -> None:
        self._found = found

    def get(self, path: str, query: dict[str, Any]) -> bytes:
        return self._found.client.get(path, params={k: v for k, v in query.items() if v is not None}).content


def after(folder: Path) -> dict[str, Any]:
    """Two more hours, with the measure in one of them, and all that shows it."""
    told: dict[str, Any] = {}
    with accountant(folder, 4) as (found, publisher):
        told["of data from before"] = by_hour(found)
        measured = {"sm_active_us": 9, f"{NAME}_us": HOUR_US // 16}
        later = [
            *hours_of("A", 2, 1, held=True, **measured), *hours_of("A", 3, 1, held=True), *hours_of("B", 2, 2),
        ]  # fmt: skip
        engine = DuckDbEngine(Catalogue.connect(found.service.settings.lake))
        with closing(engine):
            (line,) = LakeLedger(engine, ledgers(engine)["prod"]).usage((SPAN[0], SPAN[0] + 2 * HOUR_MS), ()).lines()
        told["in a lake from before"] = [getattr(line, name) for name in FIELDS]
        found.send(later, epoch="e2")
        refused = found.resend(hours_of("A", 0, 1, held=True, **{f"{NAME}_us": -1}), cluster="other", epoch="f")
        told["of a negative one"] = [refused.status_code, [one["reason"] for one in found.get("/v1/quarantine")]]
        told["API"] = by_hour(found)
        told["described"] = found.get("/openapi.json")["components"]["schemas"]["UsageLine"]["properties"][FIELDS[0]]
        view = {"by": "gpu", "columns": ["encoder", "sm_active"], "start": "2026-10-01T02:00:00Z"}
        text = found.client.get("/explore.csv", params={**view, "end": "2026-10-01T04:00:00Z"}).text
        told["CSV"] = [row for row in csv.reader(io.StringIO(text)) if row and row[0] in ("record", "line")]
        told["page"] = "Encoder" in found.client.get("/explore", params=view).text
        frame = Client(Reached(found)).usage(SPAN[0], SPAN[1], by=("gpu",))  # type: ignore[arg-type]
        told["connect"] = {name: str(frame[name].sum()) for name in FIELDS[:2]}
        publisher.publish()
        with closing(DuckDbEngine(Catalogue.connect(found.service.settings.lake))) as engine:
            lake = LakeLedger(engine, ledgers(engine)["prod"]).usage(SPAN, ("gpu", "hour"))
        ledger = found.service.ledger
        told["lake"] = [line.model_dump() for line in lake.lines()] == relation(ledger)[0]
        ledger.archive(SPAN[1])
        truth = relation(ledger)
        with closing(open_ledger(fresh(folder / "rebuilt.duckdb"), VirtualClock(SPAN[1]),
                                 archive=in_folder(folder / "archive"))) as rebuilt:  # fmt: skip
            told["rebuilt from the archive"] = relation(rebuilt) == truth
            rebuilt.checkpoint()
            told["hours only in the archive"] = rebuilt.freeze(START_MS + 2 * HOUR_MS)
            told["read from the archive"] = relation(rebuilt) == truth
            told["balanced"] = present(rebuilt).imbalance(*SPAN).total_us
    return told


if __name__ == "__main__":
    print(json.dumps(after(Path(sys.argv[1]))))
