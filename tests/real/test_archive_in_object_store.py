"""The archive and the backups in a real object store, with requests that fail on the way."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from accountant.core.errors import LedgerUnavailable
from accountant.core.settings import ObjectStorage
from accountant.storage import backups
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from accountant.storage.folder_or_object_store import FileStore, open_store
from gputally.base.clock import VirtualClock
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR
from tests.fakes.fault_proxy import Fault, FaultProxy
from tests.ledger.archived_books import everything, filled, sent
from tests.ledger.conftest import NOW_MS, START_MS, Hand
from tests.ledger.replica_turns import leaders_take_turns, two_replicas
from tests.moments import acks
from tests.real.object_store import ObjectStore

pytestmark = pytest.mark.real

STEPS = ("act.parquet", "rows.parquet", "part.json")
"""Files of a part, in the order in which they are written."""


PIECES = {
    "begun": r"^POST .*[?&]uploads",
    "a piece": r"^PUT .*partNumber=2",
    "put together": r"^POST .*uploadId=",
}
"""Requests that send a large file."""


@pytest.fixture
def hand() -> Hand:
    return Hand()


@pytest.fixture
def access(object_store: ObjectStore, store_proxy: FaultProxy, tmp_path: Path) -> ObjectStorage:
    return ObjectStorage(secrets=object_store.behind(store_proxy.url).write_secrets(tmp_path / "object-storage.yaml"))


@pytest.fixture
def address(object_store: ObjectStore) -> str:
    return f"{object_store.bucket(f'archive{uuid.uuid4().hex}')}/some/prefix"


@pytest.fixture
def store(address: str, access: ObjectStorage, tmp_path: Path) -> FileStore:
    return open_store(f"{address}/archive", access, tmp_path)


@pytest.fixture
def ledger(tmp_path: Path, store: FileStore) -> Iterator[DuckLedger]:
    opened = open_ledger(tmp_path / "ledger.duckdb", VirtualClock(NOW_MS), archive=store)
    yield opened
    opened.close()


def rebuilt(folder: Path, store: FileStore) -> object:
    """Return the answers of a ledger that was restored from the archive alone."""
    folder.mkdir()
    found = open_ledger(folder / "ledger.duckdb", VirtualClock(NOW_MS), archive=store)
    try:
        return everything(found)
    finally:
        found.close()


def test_a_lost_volume_is_rebuilt_from_an_object_store(
    ledger: DuckLedger, store: FileStore, hand: Hand, tmp_path: Path
) -> None:
    filled(ledger, hand)
    assert ledger.archive(NOW_MS) is not None
    ledger.append([hand.batch(hand.row(36, 45, 46))], NOW_MS)
    assert ledger.archive(NOW_MS) is not None
    assert acks(ledger, "n1", "prod")["0192-a"].archived_seq == 36
    assert ledger.archive(NOW_MS) is None
    assert store.names() == ["part-00000001", "part-00000002"]
    assert "node.parquet" not in store.names("part-00000002")
    assert rebuilt(tmp_path / "other", store) == everything(ledger)


@pytest.mark.parametrize("times", [1, 1_000], ids=["once", "until it is healed"])
@pytest.mark.parametrize("fault", Fault)
def test_a_spoilt_request_at_any_step_of_archiving_loses_and_doubles_nothing(
    fault: Fault, times: int, ledger: DuckLedger, store: FileStore, store_proxy: FaultProxy, hand: Hand, tmp_path: Path
) -> None:
    filled(ledger, hand)
    for number, step in enumerate(STEPS):
        before = acks(ledger, "n1", "prod")["0192-a"]
        row = hand.batch(hand.row(36 + number, 45 + number, 46 + number))
        ledger.append([row], NOW_MS)
        refused = ""
        with store_proxy.spoiling(rf"^(PUT|POST) .*{step}", fault, times):
            try:
                ledger.archive(NOW_MS)
            except LedgerUnavailable as error:
                refused = str(error)
        archived = acks(ledger, "n1", "prod")["0192-a"].archived_seq
        assert archived == (before.archived_seq if refused else 36 + number), refused
        ledger.archive(NOW_MS)
        assert acks(ledger, "n1", "prod")["0192-a"].archived_seq == 36 + number
    assert rebuilt(tmp_path / "other", store) == everything(ledger)


@pytest.mark.parametrize("times", [1, 1_000], ids=["once", "until it is healed"])
@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("request_of", PIECES.values(), ids=PIECES)
def test_a_large_file_that_is_sent_in_pieces_is_there_whole_or_not_at_all(
    request_of: str, fault: Fault, times: int, store: FileStore, store_proxy: FaultProxy, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    content = random.Random(7).randbytes(12 * 2**20)
    source.write_bytes(content)
    refused = False
    with store_proxy.spoiling(request_of, fault, times):
        try:
            store.put(source, "part-00000001/rows.parquet")
        except LedgerUnavailable:
            refused = True
    assert refused == source.exists(), "what did not arrive is still here"
    if store.exists("part-00000001/rows.parquet"):
        assert store.read("part-00000001/rows.parquet") == content
    elif not refused:
        pytest.fail("it was taken, and is not there")
    source.write_bytes(content)
    store.put(source, "part-00000001/rows.parquet")
    assert store.read("part-00000001/rows.parquet") == content
    assert store.names("part-00000001") == ["rows.parquet"]


def test_rows_that_left_the_file_are_read_from_the_object_store(
    ledger: DuckLedger, store_proxy: FaultProxy, hand: Hand
) -> None:
    later = NOW_MS + 10 * MS_PER_DAY
    hand.now_ms = later
    ledger.append([hand.batch(*(hand.row(n, n, n + 1) for n in range(1, 150)))], later)
    ledger.append([hand.batch(hand.row(150, 400, 401))], later)
    ledger.checkpoint()
    ledger.archive(later)
    truth = everything(ledger)
    assert ledger.freeze(START_MS + 2 * MS_PER_HOUR) == 2
    assert everything(ledger) == truth
    with store_proxy.spoiling("^(GET|HEAD)", Fault.REFUSED, 1_000), pytest.raises(LedgerUnavailable):
        everything(ledger)
    assert everything(ledger) == truth


def test_backups_are_made_listed_pruned_and_restored_in_an_object_store(
    ledger: DuckLedger, address: str, access: ObjectStorage, store_proxy: FaultProxy, hand: Hand, tmp_path: Path
) -> None:
    filled(ledger, hand)
    place = f"{address}/backups"
    kept = backups.KeptBackups(open_store(place, access, tmp_path / "staging"), 2)
    with store_proxy.spoiling(r"^PUT .*\.json", Fault.REFUSED, 1_000), pytest.raises(LedgerUnavailable):
        kept.make(ledger, NOW_MS)
    assert kept.listed() == []
    for minute in range(3):
        made, gone = kept.make(ledger, NOW_MS + minute * 60_000)
        assert len(gone) == (minute == 2)
    assert [one.name for one in kept.remembered()] == [one.name for one in kept.listed()]
    assert kept.listed()[0] == made
    assert len(kept.store.names()) == 4, "nothing is left of the one that failed, nor of the one removed"
    assert not list((tmp_path / "staging").iterdir())
    assert sum(map(len, backups.content(kept.store, made))) == made.bytes
    restored = tmp_path / "restored" / "ledger.duckdb"
    assert backups.restore(kept.store, f"{made.name}.duckdb", restored) == made
    found = open_ledger(restored, VirtualClock(NOW_MS))
    assert everything(found) == everything(ledger)
    found.close()


def test_leaders_take_turns_with_nothing_in_common_but_an_object_store(
    address: str, access: ObjectStorage, tmp_path: Path
) -> None:
    replicas = two_replicas(tmp_path, f"{address}/archive", f"{address}/backups", access)
    leaders_take_turns(replicas, VirtualClock(START_MS + 400 * MS_PER_DAY))


def test_an_object_store_that_is_away_is_named(object_store: ObjectStore, tmp_path: Path, hand: Hand) -> None:
    properties = {**object_store.behind("http://127.0.0.1:9").iceberg, "s3.connect-timeout": "1"}
    away = open_store("s3://nowhere/archive", ObjectStorage(properties=properties), tmp_path)
    with pytest.raises(LedgerUnavailable, match="s3://nowhere/archive: ") as refused:
        open_ledger(tmp_path / "ledger.duckdb", VirtualClock(NOW_MS), archive=away)
    assert object_store.secret_key not in str(refused.value)
    ledger = open_ledger(tmp_path / "ledger.duckdb", VirtualClock(NOW_MS))
    assert len(ledger.append(sent(hand), NOW_MS)) == 2, "the file itself was let go of"
    ledger.close()
