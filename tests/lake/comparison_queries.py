"""Queries that every engine over the lake answers as the ledger does, and a ledger published to a lake."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa

from accountant.billing.job_costs import list_jobs
from accountant.billing.usage_pricing import cost
from accountant.bookkeeping.bookkeeper import Bookkeeper
from accountant.core.settings import Lake, LakeCatalog, Settings
from accountant.lake.engines.protocol import Engine
from accountant.lake.iceberg_catalog import Catalogue, rows_where
from accountant.lake.lake_ledger import LakeLedger, ledgers
from accountant.lake.publisher import Publisher
from accountant.lake.tables import LEDGERS, LakeTable
from accountant.ledger.protocols import EpochReport, Facts, JobKey
from accountant.ledger.usage import MEASURES, START_UP, coverage
from accountant.prices.price_book import PriceBook
from accountant.reports import report_builder
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from accountant.wire.policy_models import UNASSIGNED, Decision, WindowSpec
from accountant.wire.usage_cost_and_job_models import Dimension, label_dimension
from gputally.base.clock import VirtualClock
from tests.ledger.busy_ledger import BOOK, HAND, Rows, busy_ledger
from tests.ledger.conftest import MINUTE, START_MS
from tests.usage_relation import figures_of, start_up

HOUR = 60 * MINUTE
SPAN = START_MS, START_MS + 5 * HOUR
ROWS = [(quarter, gpu, (quarter + gpu) % 6, quarter * gpu % 16, gpu == 2) for quarter in range(12) for gpu in range(4)]
"""See tests.ledger.busy_ledger."""
EXPORTED = ("project", "example.com/cost-center")
PROJECT, CENTRE = map(label_dimension, EXPORTED)
CUTS: tuple[tuple[Dimension, ...], ...] = (
    (),
    ("team",),
    ("team", "queue", "hour"),
    ("namespace", "job", "pod", "user"),
    ("cluster", "node", "gpu", "gpu_model", "mig_profile", "pool", "capacity_type"),
    ("day", "team"),
    ("month", "team"),
    (PROJECT, "team"),
    ("hour", CENTRE, PROJECT, "gpu"),
)
_PROJECTS = ((0, 0, "search"), (1, 0, "ads"), (2, 0, ""), (3, 0, "ä"), (1, 95, "search"), (0, 130, "no value"))
"""Pod, minute at which it is observed, and its label; nobody sees those of the pods 4 and 5."""
JOB = JobKey("prod", "ns-1", "Job/j1")

Reading = Callable[[Any], object]
"""A question to a moment."""


def _window(one: Any) -> tuple[object, ...]:
    """The figures of a window of whole hours."""
    found = one.window(WindowSpec(size=4 * 3_600), SPAN[1], "allocated", 0.5)
    return found.usage, found.unassigned, found.capacity, found.coverage, found.policy_version


def _report(one: Any) -> tuple[object, ...]:
    found = report_builder.read_data(one, BOOK, *SPAN)
    return (
        found.billed, found.earlier, found.by_day, found.waits, found.peaks, found.since_ms,
        [row.__repr__() for row in found.jobs.ranked(None).wasteful(10)], figures_of(found.hourly),
    )  # fmt: skip


def _jobs(one: Any) -> list[object]:
    # These go by the last minutes, of which the lake knows the last hour, and by instants inside hours.
    recent = {"held_from_ms", "held_until_ms", "gpus", "burn_per_hour"}
    listed = list_jobs(one, BOOK, *SPAN, SPAN[1])
    return [job.model_dump(exclude=recent) for job in listed.built(listed.figures)]


QUESTIONS: dict[str, Reading] = {
    **{f"usage by {', '.join(by) or 'nothing'}": lambda one, by=by: one.usage(SPAN, by).lines() for by in CUTS},
    "usage of some teams": lambda one: one.usage(SPAN, ("job",), {"team": ("blue", "green")}).lines(),
    "usage of a job": lambda one: one.usage(
        SPAN, ("hour", "gpu"), {"namespace": ("ns-1",), "job": ("Job/j1",)}
    ).lines(),
    "usage of one hour": lambda one: one.usage(SPAN, ("team",), {"hour": ("2026-10-01T01",)}).lines(),
    "usage of projects": lambda one: one.usage(
        SPAN, ("job", CENTRE), {PROJECT: ("search", UNASSIGNED, ""), CENTRE: ("4711", "", UNASSIGNED)}
    ).lines(),
    "usage of an hour of a project": lambda one: one.usage(
        SPAN, ("team",), {PROJECT: ("ads",), "hour": ("2026-10-01T01",)}
    ).lines(),
    "usage of projects of a pod whose labels are unknown": lambda one: one.usage(
        SPAN, (PROJECT,), {"pod": ("p4",)}
    ).lines(),
    "usage in another zone": lambda one: one.usage(SPAN, ("day", "hour", "queue"), None, "Asia/Tokyo").lines(),
    "usage of hour after hour": lambda one: [
        *one.usage([START_MS, START_MS + HOUR, SPAN[1]], ("team",)).lines(0),
        *one.usage([START_MS, START_MS + HOUR, SPAN[1]], ("team",)).lines(1),
    ],
    "usage of an empty span": lambda one: one.usage((SPAN[0], SPAN[0]), ("team",)).lines(),
    "what a name with quotes held": lambda one: one.usage(SPAN, ("team",), {"job": ("Job/j'1\\' OR 1=1 --",)}).lines(),
    "start-up time": lambda one: start_up(one.usage(SPAN, ("team", "job"), measures=START_UP)),
    "cost by team": lambda one: cost(one, BOOK, *SPAN, ("team",)),
    "cost by project": lambda one: cost(one, BOOK, *SPAN, (PROJECT,)),
    "cost by model and hour": lambda one: cost(one, BOOK, *SPAN, ("gpu_model", "hour")),
    "coverage": lambda one: coverage(one.usage(SPAN, ())),
    "pods": lambda one: list(one.pods(*SPAN)),
    "waiting pods": lambda one: list(one.pods(*SPAN, waiting=True)),
    "pods of a job": lambda one: list(one.pods(*SPAN, of=(JOB,))),
    "numbers of pods": lambda one: one.pods_by_job(*SPAN),
    "jobs of a namespace": lambda one: one.jobs_in("prod", "ns-1"),
    "the job of a pod": lambda one: one.job_of("prod", "p1"),
    "epochs": lambda one: one.epochs(),
    "epochs of a span and of a job": lambda one: one.epochs((START_MS, START_MS + 30 * MINUTE), of=(JOB,)),
    "numbers of epochs": lambda one: one.epoch_counts((JOB, JOB._replace(job="Job/nobody"))),
    "every measure of the lake": lambda one: figures_of(
        one.usage(SPAN, ("pod", "gpu"), measures=(*START_UP, *MEASURES))
    ),
    "acts": lambda one: one.acts(),
    "trail": lambda one: one.acts(after=0, limit=10),
    "decisions": lambda one: one.decisions(*SPAN),
    "decisions of a kind": lambda one: one.decisions(*SPAN, kind="weight", cluster="prod"),
    "decisions about a gang": lambda one: one.decisions(*SPAN, gang=("ns-0/j",)),
    "newest decisions": lambda one: one.decisions(*SPAN, 2),
    "window": _window,
    **{
        name: lambda one, name=name: getattr(one.status(), name)
        for name in (
            "last_act",
            "nodes",
            "extent",
            "newest_ms",
            "clusters",
            "newest_by_cluster",
            "teams",
            "agents",
            "newest_by_node",
        )
    },
    "GPU-hours": lambda one: one.status().gpu_hours(*SPAN),
    "GPUs of nodes": lambda one: one.status().gpus_at(*SPAN),
    "policies": lambda one: one.status().policies(*SPAN),
    "a report": _report,
    "a list of jobs": _jobs,
}


@dataclass(frozen=True)
class PublishedLedger:
    """A ledger with its bookkeeper and its lake."""

    ledger: DuckLedger
    books: Bookkeeper
    clock: VirtualClock
    publisher: Publisher
    settings: Settings
    closing: ExitStack

    def connect(self) -> Catalogue:
        """Return a catalogue that is closed together with the ledger."""
        assert self.settings.lake is not None
        found = Catalogue.connect(self.settings.lake)
        self.closing.callback(found.close)
        return found

    def asked(self, engine: Engine) -> LakeLedger:
        return LakeLedger(engine, ledgers(engine)[self.publisher.name])

    def kept(self, files: Path) -> KeptLedger:
        """Copy what is booked and published so far to `files`, a new folder."""
        self.ledger.checkpoint()
        shutil.copytree(self.settings.data, files)
        return KeptLedger(self.settings, self.clock.wall_ms(), files)


@dataclass(frozen=True)
class KeptLedger:
    """The files of a published ledger, which many tests start from, because to publish takes seconds."""

    settings: Settings
    at_ms: int
    files: Path

    @contextmanager
    def again(self) -> Iterator[PublishedLedger]:
        """Open a copy, with the publisher of a process that has just started. Only one is open at a time: a lake's
        files name each other by address, so that a copy lies where the first lake lay."""
        place = self.settings.data
        shutil.copytree(self.files, place)
        clock = VirtualClock(self.at_ms)
        exported = self.settings.exported_labels
        try:
            opened = open_ledger(place / "ledger.duckdb", clock, exported_labels=exported)
            with closing(opened) as ledger, ExitStack() as stack:
                books = Bookkeeper(ledger, clock, self.settings.timezone)
                yield _with_publisher(ledger, books, clock, self.settings, stack)
        finally:
            shutil.rmtree(place)


def _with_publisher(
    ledger: DuckLedger, books: Bookkeeper, clock: VirtualClock, settings: Settings, stack: ExitStack
) -> PublishedLedger:
    assert settings.lake is not None
    found = Catalogue.connect(settings.lake)
    stack.callback(found.close)
    return PublishedLedger(
        ledger, books, clock, Publisher(ledger, books, settings, clock, lambda: found), settings, stack
    )


@contextmanager
def published(
    warehouse: str = "",
    catalog: LakeCatalog | None = None,
    *,
    name: str = "prod",
    book: PriceBook | None = BOOK,
    rows: Rows | Mapping[str, Rows] = ROWS,
    timezone: str = "UTC",
    seed: int = 1,
    publish: bool = True,
    secrets: Path | None = None,
    epochs: bool = True,
    exported: tuple[str, ...] = EXPORTED,
) -> Iterator[PublishedLedger]:
    """Publish a ledger of some busy hours to a lake. warehouse: "" for a folder of its own."""
    with (
        TemporaryDirectory() as folder,
        busy_ledger(rows, random.Random(seed), Path(folder), exported) as ledger,
        ExitStack() as stack,
    ):
        lake = Lake(
            warehouse=warehouse or f"{folder}/lake", catalog=catalog or LakeCatalog(), ledger=name, secrets=secrets
        )
        if "://" not in lake.warehouse.removeprefix("file://"):
            Path(lake.warehouse.removeprefix("file://")).mkdir(exist_ok=True)
        settings = Settings(auth="off", data=Path(folder), lake=lake, timezone=timezone, exported_labels=exported)
        clock = VirtualClock(SPAN[1])
        books = Bookkeeper(ledger, clock, timezone)
        if book is not None:
            books.prices.take(book, "put", "ana", "new prices", SPAN[1])
        clusters = tuple(rows) if isinstance(rows, Mapping) else ("prod",)
        facts = [
            (cluster, HAND.fact(
                1_000 + pod, f"p{pod}", namespace=f"ns-{pod % 2}", name=f"p{pod}", workload=f"Job/j{pod % 4}",
                created_ms=START_MS, scheduled_ms=START_MS + pod * MINUTE,
                started_ms=START_MS + (40 + 31 * pod) * MINUTE, labels=_labels(pod, project),
                observed_ms=START_MS + minute * MINUTE,
            ))
            for cluster in clusters for pod, minute, project in _PROJECTS
        ]  # fmt: skip
        ledger.observe(Facts(pods=tuple(facts)), SPAN[1])
        ledger.report_epochs(
            [
                EpochReport(JOB._replace(cluster=cluster), number, START_MS + number * 20 * MINUTE, "ana")
                for cluster in clusters
                for number in (1, 2)
                if epochs
            ],
            SPAN[1],
        )
        decided = [
            Decision(
                id=f"d{number}", at_ms=START_MS + number * HOUR, kind=kind, target="kai", subject=f"queue/q{number}",
                mode="enforce", value=1.5, reason="share", policy_version="p", cluster=cluster,
            )
            for cluster in clusters
            for number, kind in enumerate(("weight", "hold", "weight"))
        ]  # fmt: skip
        decided += [
            Decision(
                id=f"v{number}", at_ms=START_MS + HOUR, kind="preemption", target="kai", subject=subject,
                mode="enforce",
                reason="it gave way", policy_version="p", cluster=cluster,
            )
            for cluster in clusters
            for number, subject in enumerate(("PodGroup/ns-0/j0", "Job/ns-0/j0", "pod/ns-1/p1", "ns-0/j0"))
        ]  # fmt: skip
        ledger.record_decisions(decided, SPAN[1])
        known = _with_publisher(ledger, books, clock, settings, stack)
        if publish:
            known.publisher.publish()
        yield known


def _labels(pod: int, project: str) -> dict[str, str]:
    centre = {"example.com/cost-center": "4711"} if pod % 2 else {}
    return {"team": "green", "gputally.dev/user": f"u{pod % 3}", "project": project, **centre}


def overwrite(lake: Catalogue, table: LakeTable, rows: pa.Table, partition: Mapping[str, object]) -> None:
    """Replace rows of a table, as another program would."""
    lake.open(table).overwrite(rows.cast(table.arrow), rows_where(partition))


@contextmanager
def lost(known: PublishedLedger, *parts: str) -> Iterator[None]:
    """Files of a ledger's tables that are gone for a while."""
    place = Path(known.connect().open(LEDGERS).location().removeprefix("file://")).parent.joinpath(*parts)
    away = place.with_name(f"{place.name}.away")
    place.rename(away)
    try:
        yield
    finally:
        away.rename(place)


def age(folder: Path, days: int) -> None:
    """Let the store have written all present files of a lake this many days earlier."""
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix != ".db":
            at = path.stat().st_mtime - days * 86_400
            os.utime(path, (at, at))


def differences(known: PublishedLedger, engine: Engine) -> list[str]:
    """The names of the questions that the lake answers differently from the ledger."""
    asked = known.asked(engine)
    with known.ledger.moment(*SPAN) as moment:
        return [name for name, reading in QUESTIONS.items() if reading(asked) != reading(moment)]
