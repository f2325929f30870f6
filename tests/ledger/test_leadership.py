"""Of several replicas of the accountant one serves: what it may commit, and what a new leader finds."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from accountant.cli.server_commands import waiting_app
from accountant.core.errors import LedgerFailed, LedgerUnavailable
from accountant.core.settings import Settings, SettingsFault
from accountant.ledger.journal import NewAct
from accountant.runtime.leadership import Leadership, take_over
from accountant.storage import backups
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from agent.wire import Batch
from gputally.base.background_tasks import BackgroundTask
from gputally.base.clock import SystemClock, VirtualClock
from tests.chaos.killing import Outbox
from tests.patience import until

START_MS = 1_790_812_800_000


class Scripted:
    """An election that goes as the test says."""

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


def _deliver(ledger: DuckLedger, quarters: int, clock: VirtualClock) -> Outbox:
    """The same records each time: what an agent sends again."""
    sender = Outbox("n1", START_MS, made=quarters)
    rows = tuple(sender._row(seq) for seq in range(1, sender.last + 1))
    batch = Batch(cluster="c", node="n1", boot_id="b", epoch=sender.epoch, first_seq=1, oldest_seq=1, intervals=rows)
    (result,) = ledger.append([batch], clock.wall_ms())
    assert not isinstance(result, Exception)
    return sender


def _act(subject: str, clock: VirtualClock) -> NewAct:
    return NewAct(at_ms=clock.wall_ms(), kind="close", subject=subject, who="ana", reason="the month is over")


def test_a_replica_that_does_not_lead_commits_nothing(tmp_path: Path, clock: VirtualClock) -> None:
    election = Scripted()
    leader = Leadership(election, clock)
    election.held = True
    ledger = open_ledger(tmp_path / "ledger.duckdb", clock, fence=leader.fence)
    _deliver(ledger, 2, clock)
    election.held = False
    with pytest.raises(LedgerUnavailable, match="no longer holds the Lease"):
        _deliver(ledger, 3, clock)
    with pytest.raises(LedgerUnavailable, match="no longer holds the Lease"):
        ledger.record([_act("2026-10", clock)], ledger.last_act())
    assert ledger.last_act() == 0
    assert ledger.extent() == (START_MS, START_MS + 2 * 900_000)
    ledger.close()


def test_a_leader_that_loses_the_lease_ends_in_time(clock: VirtualClock) -> None:
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


def test_waiting_ends_with_the_lease_or_with_a_signal() -> None:
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


def test_a_waiting_replica_lives_and_answers_nothing() -> None:
    client = TestClient(waiting_app("accountant"))
    assert client.get("/livez").status_code == 200
    for path in ("/readyz", "/leading", "/v1/usage", "/"):
        answer = client.get(path)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "waits for the Lease accountant" in answer.json()["detail"]


@pytest.fixture
def replicas(tmp_path: Path) -> tuple[Settings, Settings]:
    """Two with folders of their own, one archive and one place for backups."""

    def of(name: str) -> Settings:
        return Settings.model_validate(
            {
                "auth": "off",
                "data": tmp_path / name,
                "archive": {"to": tmp_path / "archive"},
                "backups": {"to": tmp_path / "backups"},
                "leader_election": {"lease": "accountant", "namespace": "gputally", "own_volume": True},
            }
        )

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    return of("a"), of("b")


def _opened(settings: Settings, clock: VirtualClock) -> DuckLedger:
    assert settings.archive is not None
    return open_ledger(settings.ledger_file, clock, archive=settings.archive.to, acts_at_once=True)


def test_leaders_take_turns_on_volumes_of_their_own_and_no_record_and_no_act_is_lost(
    replicas: tuple[Settings, Settings], clock: VirtualClock
) -> None:
    """Each dies without a word: what it had not archived, agents send again."""
    months = [f"2026-{month:02d}" for month in range(1, 7)]
    for turn, month in enumerate(months):
        mine = replicas[turn % 2]
        restored = take_over(mine, clock)
        assert (restored is not None) == (turn > 1)  # before there is no backup
        ledger = _opened(mine, clock)
        assert [act.subject for act in ledger.acts()] == months[:turn]
        _deliver(ledger, 4 + turn, clock)
        ledger.record([_act(month, clock)], ledger.last_act())  # in the archive when it is answered
        if turn == 1:
            backups.make(ledger, mine.backup_folder, clock.wall_ms())
        sender = _deliver(ledger, 5 + turn, clock)  # not archived: the next leader gets it from the agent
        ledger.close()
    assert take_over(mine, clock) is None  # nobody else led since
    ledger = _opened(mine, clock)
    busy = {line.key["gpu"]: line.accounts_gpu_us.busy for line in ledger.usage(START_MS, sender.end_ms, ("gpu",))}
    assert busy == {gpu: figures[0] for gpu, figures in sender.truth().items()}
    assert [act.subject for act in ledger.acts()] == months
    assert ledger.examine(START_MS, sender.end_ms).total_us == 0
    assert (mine.data / "set-aside" / "ledger.duckdb").is_file()
    ledger.close()


def test_an_act_that_the_archive_does_not_have_is_said(
    replicas: tuple[Settings, Settings], clock: VirtualClock, tmp_path: Path
) -> None:
    ledger = _opened(replicas[0], clock)
    (tmp_path / "archive").write_text("not a folder")
    with pytest.raises(LedgerUnavailable, match="recorded, and not yet in the archive"):
        ledger.record([_act("2026-10", clock)], 0)
    assert ledger.last_act() == 1
    ledger.close()


@pytest.mark.parametrize(("without", "said"), [("archive", "needs an archive"), ("backups", "needs backups.to")])
def test_volumes_of_their_own_need_a_place_that_all_reach(tmp_path: Path, without: str, said: str) -> None:
    given = {
        "auth": "off", "archive": {"to": tmp_path}, "backups": {"to": tmp_path},
        "leader_election": {"lease": "a", "namespace": "g", "own_volume": True},
    }  # fmt: skip
    del given[without]
    with pytest.raises((SettingsFault, ValueError), match=said):
        Settings.model_validate(given)
