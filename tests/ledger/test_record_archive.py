"""Copies, the archive and old rows in the archive restore the ledger exactly."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable
from contextlib import closing
from functools import partial
from hashlib import sha256
from pathlib import Path

import duckdb
import pytest
from fsspec.implementations.local import LocalFileSystem
from pyarrow.fs import FSSpecHandler, PyFileSystem, SubTreeFileSystem

from accountant.core.errors import LedgerDamaged, LedgerUnavailable
from accountant.ledger.journal import NewAct
from accountant.ledger.protocols import EpochReport, Facts, JobKey, NodeFacts, Retirement
from accountant.ledger.usage import coverage
from accountant.storage.duckdb_ledger import DuckLedger
from accountant.storage.folder_or_object_store import FileStore, in_folder
from accountant.wire.policy_models import Decision, Policy, QueuePolicy
from gputally.base.clock import VirtualClock
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR
from tests.deadlines import patience_s
from tests.ledger.archived_books import POLICY, everything, filled, sent
from tests.ledger.conftest import MINUTE, NOW_MS, START_MS, Opener, booked
from tests.moments import acks, present

LATER_MS = NOW_MS + 10 * MS_PER_DAY
TWO_HOURS = START_MS, START_MS + 2 * MS_PER_HOUR
JOB = JobKey("prod", "vision", "Job/train")
Make = Callable[..., DuckLedger]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return tmp_path / "elsewhere" / "archive"


in_both_stores = pytest.mark.parametrize("store", ["folder", "object store"], indirect=True)
"""For tests of what a store does: the others are about parts and rows, which are the same in both."""


@pytest.fixture
def store(archive: Path, tmp_path: Path, request: pytest.FixtureRequest) -> FileStore:
    """The archive, in a folder or as an object store whose files are on this disk."""
    if getattr(request, "param", "folder") == "folder":
        return in_folder(archive)
    files = PyFileSystem(FSSpecHandler(LocalFileSystem(auto_mkdir=True)))
    return FileStore(str(archive), SubTreeFileSystem(str(archive), files), tmp_path)


@pytest.fixture
def make(opened: Opener, store: FileStore) -> Make:
    """Opens ledgers on the same archive."""
    return partial(opened, archive=store)


def put_back(ledger: DuckLedger, copy: Path, path: Path) -> None:
    """Replaces the file of the ledger by an earlier copy."""
    ledger.close()
    path.unlink()
    shutil.copy(copy, path)


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[DuckLedger], Path]:
    """Copies a ledger's file, and returns the copy."""

    def copy(ledger: DuckLedger) -> Path:
        place = tmp_path / "copied" / "ledger.duckdb"
        place.parent.mkdir()
        ledger.copy_to(place)
        return place

    return copy


def test_only_what_the_archive_has_is_acknowledged_as_archived(make, hand):
    ledger = filled(make(), hand)
    assert acks(ledger, "n1", "prod")["0192-a"].archived_seq == 0
    assert ledger.archive(NOW_MS).rows == 32
    assert acks(ledger, "n1", "prod")["0192-a"].archived_seq == 35
    assert ledger.archive(NOW_MS) is None  # nothing came since: no record stands in two parts


def test_without_an_archive_nothing_is_said_of_one(ledger, hand):
    filled(ledger, hand)
    assert (ledger.archive(NOW_MS), ledger.freeze(LATER_MS)) == (None, 0)
    assert acks(ledger, "n1", "prod")["0192-a"].archived_seq is None


@in_both_stores
def test_a_lost_volume_is_rebuilt_from_the_archive(make, hand, path, tmp_path):
    ledger = make()
    first, second = sent(hand)
    ledger.put_policy(POLICY, START_MS, "ann")
    ledger.append([first], NOW_MS)
    ledger.archive(NOW_MS)
    filled(ledger, hand)
    ledger.archive(NOW_MS)
    truth = everything(ledger)
    ledger.close()
    rebuilt = make(tmp_path / "other" / "ledger.duckdb")
    assert everything(rebuilt) == truth
    assert acks(rebuilt, "n1", "prod")["0192-a"].archived_seq == 35
    again = rebuilt.append([first, second], NOW_MS)
    assert [(r.stored, r.duplicates) for r in again if not isinstance(r, Exception)] == [(0, 30), (0, 3)]


def test_a_copy_and_later_parts_and_what_agents_still_have_give_the_truth(make, hand, copied):
    ledger = make()
    first, second = sent(hand)
    ledger.put_policy(POLICY, START_MS, "ann")
    ledger.append([first], NOW_MS)
    copy = copied(ledger)
    ledger.append([second], NOW_MS)
    ledger.archive(NOW_MS)
    filled(ledger, hand)
    last = hand.batch(hand.row(36, 45, 46), hand.row(37, 46, 47))
    ledger.append([last], NOW_MS)
    ledger.archive(NOW_MS)
    unarchived = hand.batch(hand.row(38, 47, 48))
    ledger.append([unarchived], NOW_MS)
    truth = everything(ledger)
    ledger.close()
    restored = make(copy)
    assert acks(restored, "n1", "prod")["0192-a"].durable_seq == 37
    restored.append([last, unarchived], NOW_MS)
    assert everything(restored) == truth


def test_records_are_booked_while_a_far_archive_is_listed(opened, hand, archive):
    """An object store may take seconds to list: agents do not wait for it."""
    listing, booked_meanwhile = threading.Event(), threading.Event()

    class FarStore(FileStore):
        def names(self, folder: str = "") -> list[str]:
            listing.set()
            assert watching is None or booked_meanwhile.wait(patience_s(30)), "the writer is locked"
            return super().names(folder)

    watching: threading.Thread | None = None
    archive.mkdir(parents=True)
    ledger = filled(opened(archive=FarStore(str(archive), in_folder(archive)._files, archive, archive)), hand)
    watching = threading.Thread(target=ledger.archive, args=(NOW_MS,))
    listing.clear()
    watching.start()
    assert listing.wait(patience_s(30))
    assert booked(ledger, NOW_MS, hand.batch(hand.row(1, 0, 1, "GPU-9"), node="n9", epoch="0192-late")).stored
    booked_meanwhile.set()
    watching.join()


@in_both_stores
def test_a_part_that_was_written_and_not_entered_is_taken_over(make, hand, path, copied):
    """The accountant was killed between the two steps: the archive has a part that the ledger has not recorded."""
    ledger = filled(make(), hand)
    before = copied(ledger)
    ledger.archive(NOW_MS)
    truth = everything(ledger)
    put_back(ledger, before, path)
    reopened = make()
    assert everything(reopened) == truth
    ack = acks(reopened, "n1", "prod")["0192-a"]
    assert (ack.archived_seq, ack.durable_seq) == (35, 35)


@in_both_stores
def test_frozen_rows_are_still_asked_for_and_come_back_when_late_ones_touch_them(make, hand):
    ledger, whole = make(), [hand.batch(*(hand.row(n, n, n + 1) for n in range(1, 150)))]
    hand.now_ms = LATER_MS
    ledger.append(whole, LATER_MS)
    ledger.append([hand.batch(hand.row(150, 400, 401))], LATER_MS)
    ledger.checkpoint()
    assert ledger.freeze(LATER_MS) == 0  # not archived yet
    ledger.archive(LATER_MS)
    truth = everything(ledger)
    assert ledger.freeze(TWO_HOURS[1]) == 2
    assert everything(ledger) == truth
    assert ledger.freeze(TWO_HOURS[1]) == 0
    (replayed,) = ledger.append(whole, LATER_MS)
    assert (replayed.duplicates, replayed.quarantined) == (149, 0)
    ledger.close()

    again = make()
    assert everything(again) == truth
    again.append([hand.batch(hand.row(151, 3.25, 4.5, gpu="gpu-1", method="carried"))], LATER_MS)
    assert present(again).imbalance(*TWO_HOURS).total_us == 0
    assert everything(again) == truth  # what is carried gives way to what was metered


def test_a_record_that_is_sent_again_is_compared_with_its_own_part_of_the_archive(make, hand, archive):
    """The other parts are not read: the writer would wait for the whole archive."""
    ledger = make()
    hand.now_ms = LATER_MS
    batches = [hand.batch(*(hand.row(n, n, n + 1) for n in range(first, first + 20))) for first in range(1, 120, 20)]
    for records in batches:
        ledger.append([records], LATER_MS)
        ledger.checkpoint()
        ledger.archive(LATER_MS)
    ledger.append([hand.batch(hand.row(121, 400, 401))], LATER_MS)
    ledger.checkpoint()
    ledger.archive(LATER_MS)
    assert ledger.freeze(TWO_HOURS[1]) == 2
    for rows in archive.glob("part-*/rows.parquet"):
        if rows.parent.name != "part-00000003":
            rows.unlink()
    (replayed,) = ledger.append([batches[2]], LATER_MS)
    assert (replayed.duplicates, replayed.quarantined) == (20, 0)
    (contradicting,) = ledger.append([hand.batch(hand.row(45, 90, 91, busy_us=7))], LATER_MS)
    assert (contradicting.duplicates, contradicting.quarantined) == (0, 1)


def test_an_archive_that_says_something_else_keeps_the_rows_in_the_file(make, hand, archive):
    ledger = make()
    ledger.append([hand.batch(*(hand.row(n, n, n + 1) for n in range(1, 30)))], NOW_MS)
    ledger.append([hand.batch(hand.row(30, 59, 60))], LATER_MS)
    ledger.append([hand.batch(hand.row(31, 400, 401))], LATER_MS)
    ledger.checkpoint()
    ledger.archive(LATER_MS)
    (rows,) = archive.glob("part-*/rows.parquet")
    duckdb.sql(f"SELECT * FROM read_parquet('{rows}') LIMIT 20").write_parquet(f"{rows}.new")
    Path(f"{rows}.new").replace(rows)
    with pytest.raises(LedgerDamaged, match="differ from the ledger's, so the ledger keeps them"):
        ledger.freeze(LATER_MS)
    assert coverage(present(ledger).usage((START_MS + MINUTE, START_MS + 30 * MINUTE), ())) == 1.0


@in_both_stores
def test_a_damaged_or_missing_part_is_not_taken_over(make, hand, archive, tmp_path):
    ledger = filled(make(), hand)
    ledger.archive(NOW_MS)
    ledger.append([hand.batch(hand.row(36, 45, 46))], NOW_MS)
    ledger.archive(NOW_MS)
    (archive / "part-00000002" / "rows.parquet").write_bytes(b"PAR1")
    with pytest.raises(LedgerDamaged, match=r"part-00000002/rows\.parquet: the file is missing, or its"):
        make(tmp_path / "a.duckdb")
    shutil.rmtree(archive / "part-00000001")
    with pytest.raises(LedgerDamaged, match="part 1 is missing: restore its folder"):
        make(tmp_path / "b.duckdb")


def test_an_archive_that_cannot_be_written_leaves_everything_as_it_was(opened, hand, tmp_path):
    (tmp_path / "file").write_text("")
    ledger = filled(opened(archive=in_folder(tmp_path / "file" / "archive")), hand)
    with pytest.raises(
        LedgerUnavailable,
        match=r"file/archive: the store cannot be read or written: .*Not a directory.*: check the address",
    ):
        ledger.archive(NOW_MS)
    assert acks(ledger, "n1", "prod")["0192-a"].archived_seq == 0


def test_epochs_that_jobs_reported_leave_the_volume_and_come_back(opened, tmp_path, hand):
    archive = in_folder(tmp_path / "archive")
    reports = [EpochReport(JOB, number, hand.start_ms + number, "ann") for number in range(3)]
    first = opened(archive=archive)
    assert first.report_epochs(reports, hand.now_ms) == 3
    first.archive(hand.now_ms)
    assert first.report_epochs([reports[2]], hand.now_ms) == 0
    with opened(tmp_path / "rebuilt.duckdb", archive=archive).moment() as moment:
        assert moment.epochs(of={JOB}) == reports
        assert moment.epochs((hand.start_ms + 1, hand.start_ms + 2)) == [reports[1]]
        assert moment.epochs((hand.start_ms + 1, hand.start_ms + 2), of={JOB}) == [reports[1]]
        assert moment.epochs(of={JOB._replace(job="Job/other")}) == moment.epochs(of=set()) == []


def decision(number: int) -> Decision:
    return Decision(
        id=f"d/{number}", at_ms=START_MS + number, kind="weight", target="kai", subject="vision", mode="dry-run",
        reason="below its share", policy_version="v", inputs={"digest": sha256(str(number).encode()).hexdigest()},
    )  # fmt: skip


def register(archive: Path, part: int, name: str) -> list[tuple[object, ...]]:
    return duckdb.sql(f"FROM read_parquet('{archive}/part-{part:08d}/{name}.parquet')").fetchall()


def test_a_part_holds_of_registers_only_what_is_new_since_the_part_before(make, hand, archive, tmp_path):
    ledger = filled(make(), hand)
    sizes = []
    for part in range(1, 7):
        ledger.record_decisions([decision(number) for number in range(part * 500, part * 500 + 500)], NOW_MS)
        ledger.report_epochs([EpochReport(JOB, part, START_MS + part, "ann")], NOW_MS)
        ledger.record([NewAct(NOW_MS, "delivery", f"letter {part}", "accountant", "")], ledger.status().last_act)
        assert ledger.archive(NOW_MS) is not None
        sizes.append(sum(file.stat().st_size for file in (archive / f"part-{part:08d}").iterdir()))
        assert [len(register(archive, part, name)) for name in ("decision", "progress")] == [500, 1]
    assert max(sizes[1:]) < 1.1 * min(sizes[1:])
    assert [row[3] for row in register(archive, 6, "act")] == ["letter 6"]
    assert sorted(file.name for file in archive.glob("part-00000002/*")) == [
        "act.parquet", "decision.parquet", "facts.parquet", "holes.parquet", "marks.parquet", "part.json",
        "pods.parquet", "progress.parquet", "quarantine.parquet", "rows.parquet",
    ]  # fmt: skip
    ledger.observe(Facts(nodes=(NodeFacts("prod", "n1", pool="b"),)), NOW_MS)
    ledger.archive(NOW_MS)
    assert {file.name for file in archive.glob("part-00000007/n*")} == {"node.parquet"}
    truth, told = everything(ledger), present(ledger).decisions(0, NOW_MS, 5_000)
    ledger.close()
    rebuilt = make(tmp_path / "other" / "ledger.duckdb")
    assert everything(rebuilt) == truth
    assert (present(rebuilt).decisions(0, NOW_MS, 5_000), len(told)) == (told, 3_000)
    assert rebuilt.record_decisions([decision(9_999)], NOW_MS) == 1
    rebuilt.archive(NOW_MS)
    assert len(register(archive, 8, "decision")) == 1
    with rebuilt.moment() as moment:
        assert [report.epoch for report in moment.epochs(of={JOB})] == [*range(1, 7)]


def test_what_came_while_a_part_was_lost_on_its_way_into_the_ledger_is_in_the_next(
    make, opened, hand, path, archive, copied, tmp_path
):
    """The accountant was killed after it wrote the part and before it recorded it. New decisions arrived meanwhile."""
    ledger = filled(make(), hand)
    ledger.record_decisions([decision(1), decision(2)], NOW_MS)
    before = copied(ledger)
    ledger.archive(NOW_MS)
    put_back(ledger, before, path)
    shutil.move(archive, tmp_path / "away")
    with closing(opened()) as ledger:
        ledger.record_decisions([decision(3)], NOW_MS)
    shutil.move(tmp_path / "away", archive)
    ledger = make()
    assert len(present(ledger).decisions(0, NOW_MS)) == 3
    ledger.archive(NOW_MS)
    assert [row[0] for row in register(archive, 2, "decision")] == ["d/3"]


@pytest.mark.parametrize("commits", range(5))
def test_a_replay_that_is_killed_after_any_commit_is_taken_up(make, hand, path, copied, commits):
    """Whatever the killed one has booked, the registers of nodes, namespaces and retired GPUs are those of the part."""
    ledger = make()
    ledger.put_policy(POLICY, START_MS, "ann")
    copy = copied(ledger)
    ledger = filled(ledger, hand)
    ledger.retire(Retirement(node="n1"), NOW_MS, NOW_MS, "ann", "sold")
    ledger.archive(NOW_MS)
    truth = everything(ledger), present(ledger).gpu_owners()
    put_back(ledger, copy, path)
    left = commits

    def killed() -> str:
        nonlocal left
        left -= 1
        return "killed" if left < 0 else ""

    with contextlib.suppress(LedgerUnavailable):
        make(fence=killed).close()
    again = make()
    assert (everything(again), present(again).gpu_owners()) == truth


def test_a_part_with_only_an_act_and_its_register_is_newer_than_a_copy_of_before(make, hand, path, copied):
    ledger = filled(make(), hand)
    ledger.archive(NOW_MS)
    copy = copied(ledger)
    ledger.retire(Retirement(node="n1"), NOW_MS, NOW_MS, "ann", "sold")
    ledger.archive(NOW_MS)
    truth = everything(ledger), present(ledger).gpu_owners()
    put_back(ledger, copy, path)
    again = make()
    assert (everything(again), present(again).gpu_owners()) == truth


@in_both_stores
def test_a_register_of_an_earlier_part_that_is_damaged_is_not_taken_over(make, hand, archive, copied):
    ledger = filled(make(), hand)
    ledger.archive(NOW_MS)
    copy = copied(ledger)
    ledger.append([hand.batch(hand.row(36, 45, 46))], NOW_MS)
    ledger.archive(NOW_MS)
    (archive / "part-00000001" / "node.parquet").write_bytes(b"PAR1")
    with pytest.raises(LedgerDamaged, match=r"part-00000001/node\.parquet: the file is missing, or its"):
        make(copy)


@pytest.mark.parametrize("copied", [False, True], ids=["from the archive alone", "from a copy of before"])
def test_what_was_healed_stays_healed_after_a_restore(make, hand, tmp_path, copied):
    """A clock was two days ahead, its records reached the archive, and an administrator corrected them."""
    ahead_ms = NOW_MS + 2 * MS_PER_DAY
    minutes = (ahead_ms - START_MS) // MINUTE
    ledger = filled(make(), hand)
    ledger.archive(NOW_MS)
    ledger.close()
    astray = make(clock=VirtualClock(ahead_ms))
    rows = [hand.row(n, minutes + n - 40, minutes + n - 39) for n in (37, 38)]
    booked(astray, ahead_ms, hand.batch(hand.fact(36, uid="later", observed_ms=ahead_ms), *rows))
    astray.put_policy(Policy(queues=(QueuePolicy(name="left", team="green", refs=("kai:left",)),)), ahead_ms, "ann")
    astray.checkpoint()
    astray.archive(ahead_ms)
    copy = tmp_path / "restored" / "ledger.duckdb"
    copy.parent.mkdir()
    if copied:
        astray.copy_to(copy)
    astray.close()
    ledger = make()
    assert {one.kind for one in present(ledger).misdated(NOW_MS)} >= {"records", "policies"}
    ledger.redate(NOW_MS, "ann", "the clock was wrong")
    ledger.append([hand.batch(hand.row(39, 45, 46))], NOW_MS)
    ledger.checkpoint()
    assert {one.kind for one in present(ledger).misdated(NOW_MS)} <= {"acts"}
    ledger.archive(NOW_MS)
    ledger.append([hand.batch(hand.row(40, 46, 47))], NOW_MS)
    ledger.archive(NOW_MS)
    truth = everything(ledger)
    misdated, version = present(ledger).misdated(NOW_MS), ledger.status().policies(0, ahead_ms)
    ledger.close()
    rebuilt = make(copy)
    assert present(rebuilt).misdated(NOW_MS) == misdated
    assert rebuilt.status().policies(0, ahead_ms) == version
    assert everything(rebuilt) == truth
    assert [row.reason for row in present(rebuilt).quarantined()].count("future-dated") == 3
