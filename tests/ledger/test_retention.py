"""Late records of hours whose rows left the file: they count as if the rows were still there, and no writer waits for
the archive that has them."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.core.errors import ArchiveUnavailable, LedgerUnavailable
from accountant.ledger.protocols import Facts, ImportSpan, NodeFacts
from accountant.runtime.ingest import Ingest
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from accountant.storage.folder_or_object_store import FileStore, in_folder
from gputally.base.clock import VirtualClock
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR
from tests.deadlines import patience_s
from tests.empty_ledger import fresh
from tests.hypothesis_examples import examples
from tests.ledger.archived_books import everything
from tests.ledger.conftest import NOW_MS, START_MS, Hand, Opener, booked
from tests.moments import present

LATER_MS = NOW_MS + 10 * MS_PER_DAY
HOURS = tuple(START_MS + n * MS_PER_HOUR for n in range(1, 4))
"""Ends of the hours that may leave the file."""


class FarStore(FileStore):
    """An archive in a folder whose Parquet files can be read only while `near` is set."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        super().__init__(str(folder), in_folder(folder)._files, folder, folder)
        self.near, self.asked = threading.Event(), threading.Event()
        self.near.set()

    def url(self, name: str) -> str:
        self._reach(name)
        return super().url(name)

    def chunks(self, name: str) -> Iterator[bytes]:
        self._reach(name)
        return super().chunks(name)

    def _reach(self, name: str) -> None:
        if name.endswith(".parquet") and not self.near.is_set():
            self.asked.set()
            assert self.near.wait(patience_s(60))

    @contextmanager
    def far(self) -> Iterator[None]:
        self.near.clear()
        try:
            yield
        finally:
            self.near.set()


@pytest.fixture
def store(tmp_path: Path) -> FarStore:
    return FarStore(tmp_path / "archive")


@pytest.fixture
def two_hours(opened: Opener, store: FarStore, hand: Hand) -> DuckLedger:
    """A ledger in which the rows of the first two hours are only in the archive."""
    hand.now_ms = LATER_MS
    ledger = opened(archive=store)
    ledger.append([hand.batch(*(hand.row(n, 5 * n, 5 * n + 1) for n in range(1, 25)))], LATER_MS)
    ledger.append([hand.batch(hand.row(25, 400, 401))], LATER_MS)
    ledger.checkpoint()
    ledger.archive(LATER_MS)
    assert ledger.freeze(HOURS[1]) == 2
    return ledger


def late(ledger: DuckLedger, hand: Hand) -> object:
    return booked(ledger, LATER_MS, hand.batch(hand.row(26, 7, 8)))


def replayed(ledger: DuckLedger, hand: Hand) -> object:
    return booked(ledger, LATER_MS, hand.batch(hand.row(3, 15, 16)))


def withdrawn(ledger: DuckLedger, hand: Hand) -> object:
    span = ImportSpan(cluster="prod", source="slurm", start_ms=START_MS, end_ms=HOURS[1])
    return ledger.withdraw_import(span, LATER_MS, "ann", "none there")


@pytest.mark.parametrize("write", [late, replayed, withdrawn])
def test_nobody_waits_while_a_write_reads_a_far_archive(two_hours, hand, store, write):
    done: list[object] = []
    with store.far():
        waiting = threading.Thread(target=lambda: done.append(write(two_hours, hand)))
        waiting.start()
        assert store.asked.wait(patience_s(30))
        others = threading.Thread(target=_others, args=(two_hours, hand), daemon=True)
        others.start()
        others.join(patience_s(30))
        waited = others.is_alive()
    waiting.join()
    assert not waited, "the writer is locked while the archive is read"
    assert done


def test_nobody_waits_while_a_part_that_the_ledger_lacks_is_replayed(opened, store, hand, tmp_path):
    """The part was written, and the ledger could not record it, for example because its disk was full."""
    first, full = store.folder / "part-00000001" / "part.json", True
    ledger = opened(archive=store, fence=lambda: "the disk is full" if full and first.exists() else "")
    ledger.append([hand.batch(hand.row(1, 0, 1))], NOW_MS)
    with pytest.raises(LedgerUnavailable):
        ledger.archive(NOW_MS)
    full = False
    with store.far():
        waiting = threading.Thread(target=ledger.archive, args=(NOW_MS,))
        waiting.start()
        assert store.asked.wait(patience_s(30))
        others = threading.Thread(target=_others, args=(ledger, hand), daemon=True)
        others.start()
        others.join(patience_s(30))
        waited = others.is_alive()
    waiting.join()
    assert not waited, "the writer is locked while the archive is read"
    assert ledger.status().parts == 2
    assert everything(opened(tmp_path / "rebuilt.duckdb", archive=in_folder(store.folder))) == everything(ledger)


def _others(ledger: DuckLedger, hand: Hand) -> None:
    booked(ledger, LATER_MS, hand.batch(hand.row(1, 400, 401, "gpu-9"), node="n9", epoch="0192-other"))
    ledger.observe(Facts(nodes=(NodeFacts("prod", "n7"),)), LATER_MS)
    ledger.checkpoint()


def test_what_arrives_in_an_hour_while_it_is_read_counts_too(two_hours, hand, store, opened, tmp_path):
    """The hour is brought back, changed, archived and removed again while a second late record waits for its rows."""
    with store.far():
        waiting = threading.Thread(target=late, args=(two_hours, hand))
        waiting.start()
        assert store.asked.wait(patience_s(30))
        stolen, store.url = store.url, lambda name: FileStore.url(store, name)  # others reach the archive meanwhile
        booked(two_hours, LATER_MS, hand.batch(hand.row(1, 8, 9, "gpu-2"), epoch="0192-other"))
        two_hours.checkpoint()
        two_hours.archive(LATER_MS)
        assert two_hours.freeze(HOURS[1]) >= 1
        store.url = stolen
    waiting.join()
    two_hours.checkpoint()
    two_hours.archive(LATER_MS)
    assert everything(opened(tmp_path / "rebuilt.duckdb", archive=in_folder(store.folder))) == everything(two_hours)
    assert present(two_hours).imbalance(START_MS, HOURS[1]).total_us == 0
    lines = present(two_hours).usage((START_MS, HOURS[1]), ("gpu",)).lines()
    assert {line.key["gpu"]: line.accounts_gpu_us.allocated for line in lines} == {
        "gpu-1": 24 * 60_000_000, "gpu-2": 60_000_000,
    }  # fmt: skip


def test_an_archive_that_cannot_be_read_refuses_only_the_batches_that_need_it(two_hours, hand, store, clock):
    clock.advance(LATER_MS - clock.wall_ms())
    ingest = Ingest(two_hours, clock, linger_ms=0)
    with store.far():
        first = ingest.submit_batch(hand.batch(hand.row(26, 7, 8)))
        assert store.asked.wait(patience_s(30))
        together = [  # one group, because the writer waits
            ingest.submit_batch(hand.batch(hand.row(26, 7, 8))),
            ingest.submit_batch(hand.batch(hand.row(1, 402, 403, "gpu-9"), node="n9", epoch="0192-other")),
        ]
        store.folder.rename(store.folder.with_name("away"))
    for refused in (first, together[0]):
        with pytest.raises(ArchiveUnavailable):
            refused.result(patience_s(30))
    assert together[1].result(patience_s(30)).stored == 1
    store.folder.with_name("away").rename(store.folder)
    assert ingest.submit_batch(hand.batch(hand.row(26, 7, 8))).result(patience_s(30)).stored == 1
    ingest.close()
    assert present(two_hours).imbalance(START_MS, HOURS[1]).total_us == 0


def test_files_of_a_process_that_was_killed_while_it_read_are_removed(opened, path):
    opened(path).close()
    left = path.with_name(f".{path.name}.fetched-abc")
    left.mkdir()
    (left / "rows.parquet").write_bytes(b"PAR1")
    opened(path)
    assert not left.exists()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.sampled_from([0.0, 3.5, 58.0, 59.5, 61.0, 118.5, 125.0]), st.booleans()),
        st.tuples(st.just("again"), st.integers(0, 9), st.booleans()),
        st.tuples(st.just("leave"), st.sampled_from(HOURS), st.booleans()),
        st.tuples(st.just("reopen"), st.just(0), st.just(False)),
    ),
    min_size=3,
    max_size=7,
)
"""Late sets, sets sent again, rows leaving the file, and restarts. The last value: whether the first commit of the step
fails, as at a kill; the sender sends again."""


@given(steps=STEPS)
@settings(max_examples=examples(4, 30))
def test_figures_do_not_depend_on_when_rows_leave_the_file(steps):
    hand, clock = Hand(now_ms=LATER_MS), VirtualClock(LATER_MS)
    failing = [False]

    def fence() -> str:
        failed, failing[0] = failing[0], False
        return "killed" if failed else ""

    with tempfile.TemporaryDirectory() as folder:
        archive = in_folder(Path(folder) / "archive")
        place, plain_place = fresh(Path(folder) / "a.duckdb"), fresh(Path(folder) / "b.duckdb")
        with closing(open_ledger(plain_place, clock)) as plain:
            ledger = open_ledger(place, clock, archive=archive, fence=fence)
            sent = [hand.batch(*(hand.row(n, 3 * n, 3 * n + 2) for n in range(1, 41)), hand.row(41, 400, 401))]
            for one in (ledger, plain):
                booked(one, LATER_MS, sent[0])
            for step, value, fails in steps:
                failing[0] = fails
                if step == "reopen":
                    ledger.close()
                    ledger = open_ledger(place, clock, archive=archive, fence=fence)
                elif step == "leave":
                    _until_done(_leave, ledger, value)
                else:
                    if step == "send":
                        gpu = "gpu-1" if value < 60 else "gpu-2"
                        sent.append(hand.batch(hand.row(41 + len(sent), value, value + 1, gpu)))
                    batch = sent[-1] if step == "send" else sent[value % len(sent)]
                    receipts = [_until_done(booked, ledger, LATER_MS, batch), booked(plain, LATER_MS, batch)]
                    assert receipts[0].quarantined == receipts[1].quarantined
                failing[0] = False
            figures = [_figures(ledger), _figures(plain)]
            ledger.archive(LATER_MS)
            ledger.close()
            with closing(open_ledger(fresh(Path(folder) / "c.duckdb"), clock, archive=archive)) as rebuilt:
                figures.append(_figures(rebuilt))
    assert figures[0] == figures[1] == figures[2]


def _until_done(write: Callable[..., Any], *given: object) -> Any:
    try:
        return write(*given)
    except LedgerUnavailable:
        return write(*given)


def _leave(ledger: DuckLedger, before_ms: int) -> None:
    ledger.checkpoint()
    ledger.archive(LATER_MS)
    ledger.freeze(before_ms)


def _figures(ledger: DuckLedger) -> object:
    span = START_MS, HOURS[-1]
    assert present(ledger).imbalance(*span).total_us == 0
    return (
        present(ledger).usage(span, ("gpu", "job")).lines(),
        present(ledger).usage((START_MS + 61_001, HOURS[1] - 7), ()).lines(),
        present(ledger).quarantined(),
    )
