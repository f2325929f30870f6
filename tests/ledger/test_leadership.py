"""Only the leading replica of the accountant commits, and a new leader has its records."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from accountant.cli.server_commands import waiting_app
from accountant.core.errors import LedgerFailed, LedgerUnavailable
from accountant.core.settings import Settings, SettingsFault
from accountant.runtime.leadership import Leadership
from accountant.storage.duckdb_ledger import open_ledger
from gputally.base.background_tasks import BackgroundTask
from gputally.base.clock import SystemClock, VirtualClock
from tests.deadlines import until
from tests.ledger.replica_turns import START_MS, act, deliver, leaders_take_turns, opened, two_replicas


class Scripted:
    """An election whose result the test sets."""

    fault = "the Lease could not be renewed"

    def __init__(self) -> None:
        self.held = False

    def leading(self) -> bool:
        return self.held

    def run(self, stop: threading.Event, task: BackgroundTask) -> None:
        task.succeed()
        stop.wait()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(START_MS + 400 * 86_400_000)


def test_a_replica_that_does_not_lead_commits_nothing(tmp_path, clock):
    election = Scripted()
    leader = Leadership(election, clock)
    election.held = True
    ledger = open_ledger(tmp_path / "ledger.duckdb", clock, fence=leader.fence)
    deliver(ledger, 2, clock)
    election.held = False
    with pytest.raises(LedgerUnavailable, match="no longer holds the Lease"):
        deliver(ledger, 3, clock)
    with pytest.raises(LedgerUnavailable, match="no longer holds the Lease"):
        ledger.record([act("2026-10", clock)], ledger.last_act())
    assert ledger.last_act() == 0
    assert ledger.extent() == (START_MS, START_MS + 2 * 900_000)
    ledger.close()


def test_a_leader_that_loses_the_lease_ends_in_time(clock):
    election = Scripted()
    election.held = True
    leader = Leadership(election, clock)
    lost, ended = list[LedgerFailed](), threading.Event()

    def lose(failure: LedgerFailed) -> None:
        lost.append(failure)

    with leader.standing():
        leader.watch(lose, ended.set)
        assert not ended.is_set()
        election.held = False
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
    election.held = True
    thread.join()
    assert found == [True]
    election.held = False
    stop.set()
    assert not leader.wait(stop)


def test_a_waiting_replica_lives_and_answers_nothing():
    client = TestClient(waiting_app("accountant"))
    assert client.get("/livez").status_code == 200
    for path in ("/readyz", "/leading", "/v1/usage", "/"):
        answer = client.get(path)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "waits for the Lease accountant" in answer.json()["detail"]


@pytest.fixture
def replicas(tmp_path: Path) -> tuple[Settings, Settings]:
    return two_replicas(tmp_path, archive=tmp_path / "archive", backups=tmp_path / "backups")


def test_leaders_take_turns_on_volumes_of_their_own_and_no_record_and_no_act_is_lost(replicas, clock):
    leaders_take_turns(replicas, clock)


def test_an_act_that_the_archive_does_not_have_is_said(replicas, clock, tmp_path):
    ledger = opened(replicas[0], clock)
    (tmp_path / "archive").write_text("not a folder")
    with pytest.raises(LedgerUnavailable, match="recorded in the ledger but not yet in the archive"):
        ledger.record([act("2026-10", clock)], 0)
    assert ledger.last_act() == 1
    deliver(ledger, 1, clock)
    with pytest.raises(LedgerUnavailable, match="recorded in the ledger but not yet in the archive"):
        ledger.redate(START_MS - 7 * 86_400_000, "ana", "the clock was a week ahead")
    assert ledger.last_act() == 2
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
