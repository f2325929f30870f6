"""The contract of query engines, as tests. Derive a class from `EngineSuite`. If the engine does not read the lake by
the settings that it is opened with, say how it comes to know of a lake:

    class TestMine(EngineSuite):
        plugin = ENGINE

        @pytest.fixture(scope="class")
        @classmethod
        def reach(cls, server):
            def url_of(lake):
                server.add_catalog(lake.catalog.name, lake.catalog.uri, lake.warehouse)
                return server.url

            return url_of

Two small ledgers publish into one lake, in a folder of this machine with a catalog in SQLite. An engine is right if it
answers as the ledgers do themselves."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Final
from urllib.parse import unquote, urlparse

import pyarrow as pa
import pytest
from sqlglot import exp

from accountant.billing.usage_pricing import cost
from accountant.bookkeeping.bookkeeper import Bookkeeper
from accountant.core.errors import LakeUnavailable
from accountant.core.settings import Lake, LakeCatalog, Settings
from accountant.lake.engines.guard import checked
from accountant.lake.engines.protocol import SEAM, Engine, EnginePlugin
from accountant.lake.iceberg_catalog import PREFIX, Catalogue, namespace_of
from accountant.lake.lake_ledger import LakeLedger, ledgers
from accountant.lake.publisher import Publisher
from accountant.lake.tables import DAYS, USAGE_HOURLY
from accountant.ledger.protocols import Facts, NamespaceFacts, ReadableLedger
from accountant.ledger.usage import MEASURES, START_UP
from accountant.prices.price_book import PriceBook
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from accountant.wire.policy_models import WindowSpec
from accountant.wire.usage_cost_and_job_models import label_dimension
from agent.wire import Batch, Holder, PodFacts, UsageInterval
from gputally.base.clock import VirtualClock
from gputally.base.plugins import usable
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR, US_PER_MS

START_MS = 1_790_812_800_000
"""2026-10-01T00:00:00Z."""
SPAN = START_MS, START_MS + 2 * MS_PER_DAY
HOSTILE = "o'brien\\' OR 1=1 -- \"; drop table days, {a: 1} %s ? ä\u202e"
"""A name as a user of the cluster may choose it."""
HOSTILE_PIECES = (
    "'", '"', "`", "\\", "\\'", "''", "\n", "\r", "\t", "--", "/*", "*/", ";", "?", "$1", "$p0", ":p0", "@p0", "%s",
    "%", "{x}", "\\u0027", "${env:PATH}", "${system:user.name}", "\u2028", "\u202e", "ä",
    "\U0001f600", " OR 1=1", "",
)  # fmt: skip
"""What ends a text, begins a comment or a parameter, or is replaced, in some engine."""
MODEL = "NVIDIA H100 80GB HBM3"
BOOK = PriceBook.model_validate({
    "schema": 1, "currency": "EUR", "timezone": "UTC",
    "rows": [{
        "id": "h100", "model": "H100", "price": "2.055", "per": "gpu-hour", "valid_from": "2026-01-01",
        "source": "a contract", "as_of": "2026-01-01", "basis": "gpu-only",
    }],
})  # fmt: skip
NORTH, SOUTH = "north", "south"
PROJECT = label_dimension("project")
Question = Callable[[Any], object]


def _window(ledger: ReadableLedger) -> Mapping[str, int]:
    with ledger.moment() as moment:
        return moment.window(WindowSpec(size=86_400), SPAN[1], "allocated", 0.0).usage


QUESTIONS: Final[Mapping[str, Question]] = {
    "usage in all": lambda one: one.usage(SPAN, ()).lines(),
    "usage by team": lambda one: one.usage(SPAN, ("team",)).lines(),
    "usage by team, queue and hour": lambda one: one.usage(SPAN, ("team", "queue", "hour")).lines(),
    "usage by day and GPU": lambda one: one.usage(SPAN, ("day", "gpu", "gpu_model")).lines(),
    "usage in another time zone": lambda one: one.usage(SPAN, ("day", "team"), None, "Asia/Tokyo").lines(),
    "usage of a name with quotes": lambda one: one.usage(SPAN, ("pod",), {"team": (HOSTILE,)}).lines(),
    "usage of a name that nobody has": lambda one: one.usage(SPAN, ("pod",), {"team": ("x' OR '1'='1",)}).lines(),
    "usage of several names": lambda one: one.usage(SPAN, ("pod",), {"team": (HOSTILE, "vision")}).lines(),
    "usage by project": lambda one: one.usage(SPAN, (PROJECT, "hour")).lines(),
    "usage of a project": lambda one: one.usage(SPAN, ("team",), {PROJECT: ("ä", "")}).lines(),
    "usage of one hour": lambda one: one.usage((START_MS, START_MS + MS_PER_HOUR), ("team",)).lines(),
    "usage of a span before all records": lambda one: one.usage((START_MS - MS_PER_DAY, START_MS), ("team",)).lines(),
    "every measure": lambda one: one.usage(SPAN, ("pod", "gpu"), measures=(*START_UP, *MEASURES)).lines(),
    "cost by team and day": lambda one: cost(one, BOOK, *SPAN, ("team", "day")),
    "pods": lambda one: list(one.pods(*SPAN)),
    "GPUs of nodes": lambda one: one.status().gpus_at(*SPAN),
    "acts": lambda one: one.acts(),
}
OF_LEDGERS: Final[Mapping[str, Question]] = {
    "nodes": lambda one: one.status().nodes,
    "extent": lambda one: one.status().extent,
    "teams": lambda one: one.status().teams,
    "a window": _window,
}


@dataclass(frozen=True)
class PublishedLedger:
    """A ledger that publishes into a lake. ends_ms: until when it has records."""

    name: str
    ledger: DuckLedger
    clock: VirtualClock
    publisher: Publisher
    ends_ms: list[int]

    @property
    def namespace(self) -> str:
        return namespace_of(self.name)

    def record(self, hours: int) -> None:
        """Book these hours of use after those that are booked, and publish."""
        begin = (self.ends_ms[-1] - START_MS) // MS_PER_HOUR
        (receipt,) = self.ledger.append([_records(self.name, begin, begin + hours)], self.clock.wall_ms())
        if isinstance(receipt, Exception):
            raise receipt
        self.ends_ms.append(START_MS + (begin + hours) * MS_PER_HOUR)
        self.publisher.publish()


@dataclass(frozen=True)
class TwoLedgers:
    lake: Lake
    north: PublishedLedger
    south: PublishedLedger


def _records(name: str, begin: int, end: int) -> Batch:
    """Three GPUs; teams hold two of them in odd hours, and nobody holds the third."""
    teams = ("vision", HOSTILE) if name == NORTH else ("speech", HOSTILE)
    rows: list[UsageInterval] = []
    facts = []
    first = begin * 6 + 1
    for number, team in enumerate(teams):
        uid = f"{name}-{number}"
        facts.append(
            PodFacts(
                seq=first + number, uid=uid, namespace=team, name=uid, node="n", observed_ms=START_MS,
                labels={} if number else {"project": "ä"},
            )
        )  # fmt: skip
    for hour in range(begin, end):
        for gpu in range(3):
            whole_us = MS_PER_HOUR * US_PER_MS
            held = gpu < len(teams) and hour % 2 == 1
            holder = Holder("pod", f"{name}-{gpu}", teams[gpu], f"{name}-{gpu}") if held else None
            start_ms = START_MS + hour * MS_PER_HOUR
            rows.append(
                UsageInterval(
                    seq=first + len(teams) + len(rows), start_ms=start_ms, end_ms=start_ms + MS_PER_HOUR,
                    gpu_uuid=f"GPU-{name}-{gpu}", gpu_model=MODEL, holder=holder, capacity_us=whole_us,
                    allocated_us=whole_us if held else 0, busy_us=whole_us // (hour + 3) if held else 0,
                    energy_uj=10**12 + hour if gpu else None, method="simulated",
                )
            )  # fmt: skip
    return Batch(
        cluster="c", node="n", boot_id="b", epoch=f"e{begin}", first_seq=first, oldest_seq=first, facts=tuple(facts),
        intervals=tuple(rows),
    )  # fmt: skip


@contextmanager
def two_ledgers() -> Iterator[TwoLedgers]:
    """Publish two ledgers into one lake."""
    with TemporaryDirectory() as folder, ExitStack() as stack:
        warehouse = Path(folder) / "lake"
        warehouse.mkdir()
        # A name of its own, because some engines keep what they know of a catalog by its name.
        catalog = LakeCatalog(uri=f"sqlite:///{warehouse}/catalog.db", name=f"books{uuid.uuid4().hex}")
        lake = Lake(warehouse=str(warehouse), catalog=catalog)
        yield TwoLedgers(lake, *(_published(Path(folder), lake, name, stack) for name in (NORTH, SOUTH)))


def _published(folder: Path, lake: Lake, name: str, stack: ExitStack) -> PublishedLedger:
    clock = VirtualClock(SPAN[1])
    ledger = open_ledger(folder / f"{name}.duckdb", clock, exported_labels=("project",))
    stack.callback(ledger.close)
    own = lake.model_copy(update={"ledger": name})
    spaces = ("vision", "speech", HOSTILE)
    ledger.observe(Facts(namespaces=tuple(NamespaceFacts("c", one, one, since_ms=0) for one in spaces)), SPAN[1])
    books = Bookkeeper(ledger, clock, "UTC")
    books.prices.take(BOOK, "put", "ana", "new prices", SPAN[1])
    catalogue = stack.enter_context(closing(Catalogue.connect(own)))
    settings = Settings(auth="off", data=folder, lake=own, timezone="UTC", exported_labels=("project",))
    found = PublishedLedger(
        name, ledger, clock, Publisher(ledger, books, settings, clock, lambda: catalogue), [START_MS]
    )  # fmt: skip
    found.record(30)
    return found


class EngineSuite:
    """The tests that every engine passes.

    hostile_pieces: what this engine alone could take for more than a text, such as its own variables."""

    plugin: ClassVar[EnginePlugin]
    hostile_pieces: ClassVar[tuple[str, ...]] = ()

    @pytest.fixture(scope="class")
    @classmethod
    def reach(cls) -> Callable[[Lake], str]:
        """A function that lets the engine know of a lake, and returns the address behind `--engine-url`."""
        return lambda _lake: ""

    @pytest.fixture(scope="class")
    @classmethod
    def known(cls) -> Iterator[TwoLedgers]:
        with two_ledgers() as found:
            yield found

    @classmethod
    def opened(cls, lake: Lake, url: str) -> Engine:
        return cls.plugin.open(lake, url)

    @pytest.fixture(scope="class")
    @classmethod
    def address(cls, known: TwoLedgers, reach: Callable[[Lake], str]) -> str:
        return reach(known.lake)

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, known: TwoLedgers, address: str) -> Iterator[Engine]:
        found = cls.opened(known.lake, address)
        yield found
        found.close()

    def test_its_manifest_is_complete(self) -> None:
        assert self.plugin.reaches, "say what a query reads and connects to"
        assert self.plugin.page, "name the page about it"

    def test_it_is_found_by_its_name(self) -> None:
        assert usable(SEAM, EnginePlugin).get(self.plugin.name) is self.plugin, "register the entry point, and install"

    def test_it_names_the_ledgers_alone(self, known: TwoLedgers, engine: Engine) -> None:
        with closing(Catalogue.connect(known.lake)) as catalogue:
            for name in ("somebody", f"{PREFIX}unfinished"):
                catalogue._catalog.create_namespace_if_not_exists(name)
        assert list(engine.namespaces()) == [known.north.namespace, known.south.namespace]

    @pytest.mark.parametrize("name", [NORTH, SOUTH])
    def test_it_answers_as_the_ledger(self, known: TwoLedgers, engine: Engine, name: str) -> None:
        self._same(known.north if name == NORTH else known.south, engine)

    def _same(self, published: PublishedLedger, engine: Engine) -> None:
        asked = LakeLedger(engine, ledgers(engine)[published.name])
        with published.ledger.moment(*SPAN) as moment:
            for name, question in QUESTIONS.items():
                assert question(asked) == question(moment), name
        for name, question in OF_LEDGERS.items():
            assert question(asked) == question(published.ledger), name

    def test_its_figures_are_exact(self, known: TwoLedgers, engine: Engine) -> None:
        sums = [exp.cast(exp.func("sum", exp.column(name)), "DECIMAL(38, 9)").as_(name) for name in ("cost", "busy_us")]
        question = exp.select("team", *sums).from_("usage_hourly").group_by("team")
        for row in checked(engine.query(question, known.north.namespace), question).to_pylist():
            assert row["cost"] == round(row["cost"], 9)

    def test_texts_are_values_whatever_they_contain(self, known: TwoLedgers, engine: Engine) -> None:
        """In an answer and in a filter."""
        pieces = (*HOSTILE_PIECES, *self.hostile_pieces)
        pairs = [[first + second for second in pieces] for first in pieces]
        for texts in pairs:
            asked = exp.select(*(exp.Literal.string(text).as_(f"v{number}") for number, text in enumerate(texts)))
            found = engine.query(asked.from_("ledgers"), known.north.namespace).to_pylist()
            assert found == [{f"v{number}": text for number, text in enumerate(texts)}]
        named = exp.column("ledger").isin(*(exp.Literal.string(text) for texts in pairs for text in texts))
        filtered = exp.select("ledger").from_("ledgers").where(named)
        assert engine.query(filtered, known.north.namespace).num_rows == 0

    def test_a_column_that_an_earlier_version_lacks_is_unknown_in_its_rows_and_in_no_other(
        self, known: TwoLedgers, engine: Engine
    ) -> None:
        """The rows of a ledger as a version published them that knew fewer columns; then one with all columns adds
        some."""
        name, new = f"{PREFIX}earlier", ("energy_uj", "energy_unknown_us", "sm_active_us", "sm_unknown_us", "user_name")
        with closing(Catalogue.connect(known.lake)) as catalogue:
            rows = catalogue.open(USAGE_HOURLY, known.north.namespace).scan().to_arrow()
            catalogue._catalog.create_namespace(name)
            earlier = catalogue._catalog.create_table((name, USAGE_HOURLY.name), rows.drop_columns([*new]).schema)
            earlier.append(rows.drop_columns([*new]))
            self._without(new, rows, rows.slice(0, 0), engine, name)
            status = replace(ledgers(engine)[known.north.name], namespace=name)
            for line in LakeLedger(engine, status).usage(SPAN, ("team",)).lines():
                held_us = line.accounts_gpu_us.allocated
                assert line.sm_unknown_us == held_us
                assert not held_us or line.sm_active_us is None
                assert line.energy_unknown_us == held_us + line.accounts_gpu_us.unallocated
            with earlier.update_schema() as update:
                update.union_by_name(rows.schema)
            earlier.append(rows)
            self._without(new, rows, rows, engine, name)

    def _without(self, new: Sequence[str], earlier: pa.Table, later: pa.Table, engine: Engine, namespace: str) -> None:
        """Checks what is known of rows of which the earlier ones lack these columns."""
        figure, text = new[0], new[-1]
        counted = [exp.func("count", exp.column(column)).as_(column) for column in ("busy_us", *new)]
        asked = exp.select(*counted).from_(USAGE_HOURLY.name)
        (found,) = checked(engine.query(asked, namespace), asked).to_pylist()
        known = {column: len(later) - later[column].null_count for column in new}
        assert {column: int(count) for column, count in found.items()} == known | {"busy_us": len(earlier) + len(later)}
        total = exp.cast(exp.func("sum", exp.column(figure)), "DECIMAL(38, 0)").as_(figure)
        asked = exp.select("gpu", text, total).from_(USAGE_HOURLY.name).group_by("gpu", text)
        sums = {(row["gpu"], row[text]): row[figure] for row in engine.query(asked, namespace).to_pylist()}
        assert {gpu for gpu, of in sums if of is None} == set(earlier["gpu"].to_pylist())
        assert all(sums[gpu, of] is None for gpu, of in sums if of is None)
        asked = exp.select("gpu").from_(USAGE_HOURLY.name).where(exp.column(figure) >= exp.Literal.number(0))
        assert engine.query(asked, namespace).num_rows == known[figure]

    def test_days_bound_what_is_read(self, known: TwoLedgers, engine: Engine) -> None:
        first = exp.cast(exp.Literal.string("2026-10-01"), "DATE")
        question = exp.select("day").from_("days").where(exp.column("day").eq(first))
        found = engine.query(question, known.north.namespace, (date(2026, 10, 1), date(2026, 10, 1)))
        assert checked(found, question).to_pylist() == [{"day": date(2026, 10, 1)}]

    def test_no_rows_are_an_empty_table(self, known: TwoLedgers, engine: Engine) -> None:
        question = exp.select("day", "ledger").from_("days").where(exp.false())
        found = checked(engine.query(question, known.north.namespace), question)
        assert (found.num_rows, found.column_names) == (0, ["day", "ledger"])

    def test_an_open_engine_sees_what_is_published_later(self, known: TwoLedgers, engine: Engine) -> None:
        self._total(known.south, engine)
        known.south.record(3)
        self._same(known.south, engine)

    def test_what_is_not_there_is_refused(self, engine: Engine) -> None:
        with pytest.raises(LakeUnavailable):
            engine.query(exp.select("day").from_("days"), f"{PREFIX}nobody")

    def test_a_table_whose_files_are_missing_is_refused(self, known: TwoLedgers, engine: Engine) -> None:
        """A volume that is not mounted, or a cleaned bucket, is no empty ledger."""
        name = f"{PREFIX}lost"
        with closing(Catalogue.connect(known.lake)) as catalogue:
            rows = catalogue.open(DAYS, known.north.namespace).scan().to_arrow()
            catalogue._catalog.create_namespace(name)
            lost = catalogue._catalog.create_table((name, DAYS.name), rows.schema)
            lost.append(rows)
            for task in lost.scan().plan_files():
                Path(unquote(urlparse(task.file.file_path).path)).unlink()
        with pytest.raises(LakeUnavailable):
            engine.query(exp.select("day").from_("days"), name)
        # Some engines count by the table's metadata, without opening its files.
        with suppress(LakeUnavailable):
            found = engine.query(exp.select(exp.func("count", exp.Star()).as_("n")).from_("days"), name)
            assert found["n"].to_pylist() == [rows.num_rows]

    def test_a_refused_query_spoils_no_later_one(self, known: TwoLedgers, engine: Engine) -> None:
        with pytest.raises(LakeUnavailable):
            engine.query(exp.select("no_such_column").from_("days"), known.north.namespace)
        assert self._total(known.north, engine)

    def _total(self, published: PublishedLedger, engine: Engine) -> list[Any]:
        question = exp.select("day", "busy_us").from_("days")
        rows: list[Any] = engine.query(question, published.namespace).to_pylist()
        return sorted((row["day"], int(row["busy_us"])) for row in rows)

    def test_several_threads_may_ask_at_one_time(self, known: TwoLedgers, engine: Engine) -> None:
        with ThreadPoolExecutor(4) as threads:
            first, *others = threads.map(lambda _: self._total(known.north, engine), range(8))
        assert all(other == first for other in others)

    def test_a_query_stays_as_it_was(self, known: TwoLedgers, engine: Engine) -> None:
        question = exp.select("day").from_("days")
        before = question.sql()
        engine.query(question, known.north.namespace)
        assert question.sql() == before

    def test_it_can_be_closed_without_a_query(self, known: TwoLedgers, address: str) -> None:
        engine = self.opened(known.lake, address)
        assert callable(getattr(engine, "close", None)), "an engine has a method `close`, which may do nothing"
        engine.close()
