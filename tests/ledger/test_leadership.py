"""Only the leading replica of the accountant commits, and a new leader has its records."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from accountant.cli.serving import waiting_app
from accountant.core.errors import LedgerFailed, LedgerUnavailable
from accountant.core.settings import Settings, SettingsFault
from accountant.runtime.leadership import Leadership, take_over
from accountant.storage import backups
from accountant.storage.duckdb_ledger import open_ledger
from accountant.storage.folder_or_object_store import in_folder
from gputally.base.background_tasks import BackgroundTask
from gputally.base.clock import SystemClock, VirtualClock
from gputally.kubernetes.leader_election import Term
from tests.deadlines import until
from tests.ledger.replica_turns import START_MS, act, deliver, leaders_take_turns, opened, two_replicas
from tests.moments import present


class Scripted:
    """An election whose result the test sets."""

    fault = "the Lease could not be renewed"

    def __init__(self, number: int = 0) -> None:
        """number: that of the present term; 0 for none."""
        self.number = number

    def term(self) -> Term | None:
        return Term("a", self.number) if self.number else None

    def leaderless(self) -> str | None:
        return None if self.number else self.fault

    def run(self, stop: threading.Event, task: BackgroundTask) -> None:
        task.succeed()
        stop.wait()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(START_MS + 400 * 86_400_000)


LOST_OR_IN_ANOTHER_TERM = pytest.mark.parametrize("after", [0, 2])
"""A replica that lost the Lease and holds it again does not know what another replica wrote in between."""


@LOST_OR_IN_ANOTHER_TERM
def test_a_replica_whose_term_is_over_commits_nothing(tmp_path, clock, after):
    election = Scripted(number=1)
    leader = Leadership(election, clock)
    assert leader.wait(threading.Event())
    ledger = open_ledger(tmp_path / "ledger.duckdb", clock, fence=leader.fence)
    deliver(ledger, 2, clock)
    election.number = after
    with pytest.raises(LedgerUnavailable, match="no longer holds the Lease"):
        deliver(ledger, 3, clock)
    with pytest.raises(LedgerUnavailable, match="no longer holds the Lease"):
        ledger.record([act("2026-10", clock)], ledger.status().last_act)
    assert ledger.status().last_act == 0
    assert ledger.status().extent == (START_MS, START_MS + 2 * 900_000)
    ledger.close()


@LOST_OR_IN_ANOTHER_TERM
def test_a_leader_that_loses_the_lease_ends_in_time(clock, after):
    election = Scripted(number=1)
    leader = Leadership(election, clock)
    assert leader.wait(threading.Event())
    lost, ended = list[LedgerFailed](), threading.Event()

    def lose(failure: LedgerFailed) -> None:
        lost.append(failure)

    with leader.standing():
        leader.watch(lose, ended.set)
        assert not ended.is_set()
        election.number = after
        until(lambda: lost, "nothing says that the Lease is lost")
        assert "could not be renewed" in str(lost[0])
        until(ended.is_set, "the process is left running")
    assert len(lost) == 1


def test_waiting_ends_with_the_lease_or_with_a_signal():
    election, stop = Scripted(), threading.Event()
    leader = Leadership(election, SystemClock())
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(leader.wait(stop)))
    thread.start()
    election.number = 1
    thread.join()
    assert found == [True]
    election.number = 0
    stop.set()
    assert not leader.wait(stop)


def test_a_waiting_replica_lives_and_answers_nothing():
    leaderless = [False]
    client = TestClient(waiting_app("accountant", lambda: leaderless[0]))
    assert client.get("/livez").status_code == 200
    for path in ("/readyz", "/leading", "/v1/usage", "/"):
        answer = client.get(path)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "waits for the Lease accountant" in answer.json()["detail"]
    served = client.get("/readyz").json()["detail"]
    leaderless[0] = True
    assert client.get("/readyz").json()["detail"] != served, "that nobody serves is another reason"


@pytest.fixture
def replicas(tmp_path: Path) -> tuple[Settings, Settings]:
    return two_replicas(tmp_path, archive=tmp_path / "archive", backups=tmp_path / "backups")


def test_leaders_take_turns_on_volumes_of_their_own_and_no_record_and_no_act_is_lost(replicas, clock):
    leaders_take_turns(replicas, clock)


def test_what_is_set_aside_is_one_ledger_however_often_it_is_killed(replicas, clock):
    """Of an older ledger nothing is left, and of a newer one everything is moved."""
    one, other = replicas
    for turn, replica in enumerate((one, other, one)):
        take_over(replica, clock)
        ledger = opened(replica, clock)
        ledger.record([act(f"2026-0{turn + 1}", clock)], ledger.status().last_act)
        ledger.close()
    aside = other.data / "set-aside"
    aside.mkdir()
    (aside / "ledger.duckdb.wal").write_bytes(b"of an older ledger")
    take_over(other, clock)
    assert sorted(file.name for file in aside.iterdir()) == ["ledger.duckdb", "ledger.duckdb.lock"]
    ledger_file = other.ledger_file
    (ledger_file.with_name("ledger.duckdb.wal")).write_bytes(b"left by a killed process")
    ledger_file.unlink(missing_ok=True)
    take_over(other, clock)
    assert (aside / "ledger.duckdb.wal").read_bytes() == b"left by a killed process"
    opened(other, clock).close()


@pytest.mark.parametrize("damaged", ["json", "duckdb"])
@pytest.mark.parametrize("made", [1, 2])
def test_damaged_backups_do_not_stop_the_replica_that_takes_over(replicas, clock, damaged, made):
    """It restores the newest intact one, and without any it rebuilds the ledger from the archive."""
    one, other = replicas
    ledger = opened(one, clock)
    kept = []
    for month in ("2026-01", "2026-02", "2026-03")[:made]:
        ledger.record([act(month, clock)], ledger.status().last_act)
        kept.append(backups.make(ledger, in_folder(Path(one.backups_to)), clock.wall_ms()))
        clock.advance(1_000)
    sender = deliver(ledger, 4, clock)
    ledger.record([act("2026-04", clock)], ledger.status().last_act)
    ledger.close()
    (Path(one.backups_to) / f"{kept[-1].name}.{damaged}").write_bytes(b"cut")
    restored = take_over(other, clock)
    assert restored == (kept[0] if made == 2 else None)
    ledger = opened(other, clock)
    assert [entry.subject for entry in present(ledger).acts()] == [*["2026-01", "2026-02"][:made], "2026-04"]
    deliver(ledger, 4, clock)  # the agent sends again
    busy = {
        line.key["gpu"]: line.accounts_gpu_us.busy
        for line in present(ledger).usage((START_MS, sender.end_ms), ("gpu",)).lines()
    }
    ledger.close()
    assert busy == {gpu: figures[0] for gpu, figures in sender.truth().items()}


def test_an_act_that_the_archive_does_not_have_is_said(replicas, clock, tmp_path):
    ledger = opened(replicas[0], clock)
    (tmp_path / "archive").write_text("not a folder")
    with pytest.raises(LedgerUnavailable, match="recorded in the ledger but not yet in the archive"):
        ledger.record([act("2026-10", clock)], 0)
    assert ledger.status().last_act == 1
    deliver(ledger, 1, clock)
    with pytest.raises(LedgerUnavailable, match="recorded in the ledger but not yet in the archive"):
        ledger.redate(START_MS - 7 * 86_400_000, "ana", "the clock was a week ahead")
    assert ledger.status().last_act == 2
    ledger.close()


@pytest.mark.parametrize(
    ("without", "said"), [("archive", "needs an archive"), ("backups", "needs backups .*: set backups.to")]
)
def test_volumes_of_their_own_need_a_place_that_all_reach(tmp_path, without, said):
    given = {
        "auth": "off", "archive": {"to": tmp_path}, "backups": {"to": tmp_path},
        "leader_election": {"lease": "a", "namespace": "g", "own_volume": True},
    }  # fmt: skip
    del given[without]
    with pytest.raises((SettingsFault, ValueError), match=said):
        Settings.model_validate(given)
