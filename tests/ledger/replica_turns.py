"""Two replicas of the accountant with separate volumes that lead in turns."""

from __future__ import annotations

from pathlib import Path

from accountant.core.settings import ObjectStorage, Settings
from accountant.ledger.journal import NewAct
from accountant.runtime.leadership import take_over
from accountant.storage import backups
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from accountant.storage.folder_or_object_store import open_store
from agent.wire import Batch
from gputally.base.clock import VirtualClock
from tests.chaos.accountant_process import Outbox
from tests.ledger.conftest import START_MS, booked
from tests.moments import present


def two_replicas(
    folder: Path, archive: Path | str, backups: Path | str, object_storage: ObjectStorage | None = None
) -> tuple[Settings, Settings]:
    """Build settings of two replicas with separate data folders, and a common archive and backup folder."""

    def of(name: str) -> Settings:
        (folder / name).mkdir()
        return Settings.model_validate(
            {
                "auth": "off",
                "data": folder / name,
                "archive": {"to": archive},
                "backups": {"to": backups},
                "object_storage": object_storage or ObjectStorage(),
                "leader_election": {"lease": "accountant", "namespace": "gputally", "own_volume": True},
            }
        )

    return of("a"), of("b")


def deliver(ledger: DuckLedger, quarters: int, clock: VirtualClock) -> Outbox:
    """Send records as an agent does, and send them a second time."""
    sender = Outbox("n1", START_MS, made=quarters)
    rows = tuple(sender._row(seq) for seq in range(1, sender.last + 1))
    batch = Batch(cluster="c", node="n1", boot_id="b", epoch=sender.epoch, first_seq=1, oldest_seq=1, intervals=rows)
    booked(ledger, clock.wall_ms(), batch)
    return sender


def act(subject: str, clock: VirtualClock) -> NewAct:
    return NewAct(at_ms=clock.wall_ms(), kind="close", subject=subject, who="ana", reason="the month is over")


def opened(settings: Settings, clock: VirtualClock) -> DuckLedger:
    assert settings.archive is not None
    archive = open_store(settings.archive.to, settings.object_storage, settings.data)
    return open_ledger(settings.ledger_file, clock, archive=archive, acts_at_once=True)


def leaders_take_turns(replicas: tuple[Settings, Settings], clock: VirtualClock) -> None:
    """Let each replica lead and kill it. Agents send the records again that it had not archived."""
    months = [f"2026-{month:02d}" for month in range(1, 7)]
    for turn, month in enumerate(months):
        mine = replicas[turn % 2]
        restored = take_over(mine, clock)
        assert (restored is not None) == (turn > 1)  # before there is no backup
        ledger = opened(mine, clock)
        assert [act.subject for act in present(ledger).acts()] == months[:turn]
        deliver(ledger, 4 + turn, clock)
        ledger.record([act(month, clock)], ledger.status().last_act)  # in the archive when it is answered
        if turn == 1:
            backups.make(ledger, open_store(mine.backups_to, mine.object_storage, mine.data), clock.wall_ms())
        sender = deliver(ledger, 5 + turn, clock)  # not archived: the next leader gets it from the agent
        ledger.close()
    assert take_over(mine, clock) is None  # nobody else led since
    ledger = opened(mine, clock)
    busy = {
        line.key["gpu"]: line.accounts_gpu_us.busy
        for line in present(ledger).usage((START_MS, sender.end_ms), ("gpu",)).lines()
    }
    assert busy == {gpu: figures[0] for gpu, figures in sender.truth().items()}
    assert [act.subject for act in present(ledger).acts()] == months
    assert present(ledger).imbalance(START_MS, sender.end_ms).total_us == 0
    assert (mine.data / "set-aside" / "ledger.duckdb").is_file()
    ledger.close()
