"""The accountant's background tasks, and a failure in one: the others continue, and the failure is reported."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from accountant.composition import Service
from accountant.core.errors import LedgerUnavailable
from accountant.core.settings import Lake, Settings
from accountant.lake.iceberg_catalog import Catalogue
from accountant.lake.tables import USAGE_HOURLY
from accountant.ledger.journal import NewAct, record
from accountant.ledger.protocols import Facts, NodeFacts
from accountant.runtime.background_tasks import Maintenance, Routine, Routines
from accountant.runtime.job_and_task_metrics import upkeep_metrics
from accountant.storage import backups
from accountant.storage.backups import KeptBackups
from accountant.storage.folder_or_object_store import in_folder
from accountant.wire.policy_models import Decision, Policy
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import VirtualClock
from gputally.base.units import MS_PER_DAY
from tests import empty_ledger
from tests.deadlines import until
from tests.http.conftest import client_of, encoded, pod_minutes
from tests.lake.comparison_queries import overwrite
from tests.moments import present
from tests.price_books import price_book_text

POLICY = "schema: 1\nqueues:\n  - {{name: a, deserved: {deserved}}}\n"


def figure(service: Service, series: str) -> float | None:
    """Return one series of the accountant's metrics; None without it."""
    found = [line for line in service.metrics.exposition().decode().splitlines() if line.startswith(f"{series} ")]
    return float(found[0].rpartition(" ")[2]) if found else None


def failing(service: Service, task: str) -> float | None:
    return figure(service, f'gputally_upkeep_failing{{task="{task}"}}')


def after(clock: VirtualClock, service: Service, span_ms: int) -> None:
    """Run maintenance once, after the span has passed."""
    clock.advance(span_ms)
    service.maintain()


def parts(settings: Settings) -> int:
    """Return the archive's settings."""
    return len(list(Path(settings.archive.to).glob("part-*")))


def ready(service: Service):
    answer = client_of(service).get("/readyz")
    return answer.status_code, answer.json().get("tasks")


def test_a_backup_and_an_archive_that_cannot_be_made_are_said_and_tried_again_within_a_minute(archiving, clock):
    newest = "gputally_backup_last_timestamp_seconds"
    with Service(archiving, clock) as service:
        assert {failing(service, task) for task in ("archive", "backup")} == {0}
        assert (figure(service, newest), figure(service, "gputally_backups")) == (None, 0)
        off = Path(archiving.backups_to).parent
        off.write_text("no folder")
        after(clock, service, 7_200_000)
        assert {failing(service, task) for task in ("archive", "backup")} == {1}
        assert ready(service) == (200, {"archive": "failed", "backup": "failed"})
        page = client_of(service).get("/").text
        assert "archive fails" in page
        assert "backup fails" in page
        assert figure(service, 'gputally_task_stopped{task="backup"}') == 0, "a full volume is no defect"
        receipt = service.ingest.submit_batch(pod_minutes(rows=3)).result()
        assert (receipt.ack.durable_seq, receipt.ack.archived_seq) == (3, 0), "nothing else stops"
        off.unlink()
        after(clock, service, 60_000)
        assert {failing(service, task) for task in ("archive", "backup")} == {0}
        assert ready(service) == (200, {})
        assert figure(service, newest) == clock.wall_ms() / 1000
        assert len(backups.list_backups(in_folder(Path(archiving.backups_to)))) == 1


@pytest.mark.parametrize(
    ("file", "task", "good", "bad"),
    [
        ("prices", "prices file", price_book_text(H100="2.4"), "schema: 1\nrows: what\n"),
        ("inventory", "inventory", "schema: 1\nnodes: []\n", "schema: 1\nnodes: what\n"),
    ],
)
def test_a_refused_file_is_said_until_it_is_mended(archiving, clock, tmp_path, file, task, good, bad):
    path = tmp_path / f"{file}.yaml"
    path.write_text(good)
    with Service(archiving.model_copy(update={file: path}), clock) as service:
        assert failing(service, task) == 0
        for text, expected in ((bad, 1), (good + "# mended\n", 0)):
            path.write_text(text)
            after(clock, service, 600_000)
            assert failing(service, task) == expected


class Inventory:
    """An empty inventory that calls the given function."""

    def __init__(self) -> None:
        self.meanwhile = lambda: None

    def read(self, now_ms: int) -> Facts:
        self.meanwhile()
        return Facts()

    def taken(self) -> None:
        pass


def raising(error: Exception):
    def meanwhile() -> None:
        raise error

    return meanwhile


def test_the_number_of_backups_that_cannot_be_listed_is_absent_and_not_zero(clock):
    series = upkeep_metrics(BackgroundTasks(clock), {}, raising(LedgerUnavailable("no answer from the store")))
    assert [metric.name for metric in series if metric.samples] == []


def test_a_damaged_backup_is_counted_apart_and_the_next_one_is_made(archiving, clock):
    folder = Path(archiving.backups_to)
    folder.mkdir(parents=True)
    (folder / "ledger-20261001T000000000Z.json").write_text("{cut")
    with Service(archiving, clock) as service:
        assert (figure(service, "gputally_backups"), figure(service, "gputally_backups_damaged")) == (0, 1)
        after(clock, service, 7_200_000)
        assert (figure(service, "gputally_backups"), figure(service, "gputally_backups_damaged")) == (1, 1)
        assert failing(service, "backup") == 0


def test_a_defect_in_one_routine_ends_none_of_the_others_and_is_seen(archiving, clock):
    inventory = Inventory()
    with Service(archiving, clock, inventory) as service:
        assert ready(service) == (200, {})
        service.ingest.submit_batch(pod_minutes(rows=3)).result()
        inventory.meanwhile = raising(ValueError("a label of None"))
        after(clock, service, 7_200_000)
        assert len(backups.list_backups(in_folder(Path(archiving.backups_to)))) == 1
        assert parts(archiving)
        assert service.ledger.wal_bytes() < 100_000
        assert ready(service) == (200, {"inventory": "failed"})
        assert figure(service, 'gputally_task_stopped{task="inventory"}') == 1
        assert figure(service, 'gputally_task_stopped{task="backup"}') == 0
        assert failing(service, "inventory") == 1
        assert figure(service, 'gputally_task_failures_total{task="inventory"}') == 1
        inventory.meanwhile = lambda: None
        after(clock, service, 60_000)
        assert ready(service) == (200, {})
        assert figure(service, 'gputally_task_stopped{task="inventory"}') == 0
        assert figure(service, 'gputally_task_failures_total{task="inventory"}') == 1


def test_a_routine_that_hangs_is_seen_within_a_minute(archiving, clock):
    inventory, reading, go = Inventory(), threading.Event(), threading.Event()
    with Service(archiving, clock, inventory) as service:

        def hang() -> None:
            reading.set()
            go.wait(30)

        inventory.meanwhile = hang
        clock.advance(30_000)
        maintenance = threading.Thread(target=service.maintain)
        maintenance.start()
        assert reading.wait(30)
        assert ready(service) == (200, {})
        clock.advance(50_000)
        assert ready(service) == (200, {"inventory": "has not ended for 50 s"})
        assert figure(service, 'gputally_task_stopped{task="inventory"}') == 1
        go.set()
        maintenance.join(30)
        assert ready(service) == (200, {})


def test_the_threads_of_a_service_go_on_after_a_defect(archiving, clock):
    """Each task really runs: once a second."""
    inventory, twice = Inventory(), threading.Semaphore(0)
    with Service(archiving, clock, inventory) as service:

        def fail() -> None:
            twice.release()
            raise ZeroDivisionError

        inventory.meanwhile = fail
        clock.advance(60_000)
        service.start()
        assert twice.acquire(timeout=30)
        again = (twice.acquire(timeout=0.2) or clock.advance(60_000) for _ in range(150))
        assert any(again), "the thread has ended"
        until(lambda: service.tasks.states()["maintenance"].fault is None, "the round that has begun should end")
        assert set(service.tasks.states()) >= {
            "archive", "backup", "checkpoint", "correct", "inventory", "ledger-writer", "maintenance", "pages",
            "windows",
        }  # fmt: skip


def test_a_long_backup_stops_no_other_routine(archiving, clock):
    inventory, copying, go = Inventory(), threading.Event(), threading.Event()
    read = threading.Semaphore(0)
    inventory.meanwhile = read.release
    with Service(archiving, clock, inventory) as service:
        read.acquire(timeout=0)  # that of the start

        class Slow(KeptBackups):
            def make(self, ledger, now_ms):
                copying.set()
                go.wait(60)
                return super().make(ledger, now_ms)

        deps = service.app.state.deps
        slow = Slow(deps.backups.store, deps.settings.backups.keep)
        maintenance = Maintenance(service.ledger, service.books, archiving, clock, slow)
        routines = Routines(
            clock, [*maintenance.routines(), Routine("inventory", 30, service._read_inventory)], service.tasks
        )
        clock.advance(7_200_000)
        routines.start_due(service.fail)
        assert copying.wait(30)
        assert read.acquire(timeout=30)
        clock.advance(30_000)
        until(
            lambda: routines.start_due(service.fail) or read.acquire(timeout=0.1),
            "the inventory is not read while the backup goes on",
        )
        go.set()
        routines.join()
        assert len(deps.backups.listed()) == 1, "a backup that runs is not started again"


@pytest.fixture
def full(monkeypatch):
    """Return a function that switches a full disk on and off."""
    real = os.statvfs

    def switch(is_full: bool) -> None:
        found = SimpleNamespace(f_bavail=1, f_frsize=2**20)
        monkeypatch.setattr(os, "statvfs", (lambda _: found) if is_full else real)

    yield switch
    switch(False)


def test_a_price_change_that_meets_a_full_disk_is_put_in_force_once_there_is_room(archiving, clock, tmp_path, full):
    files = {"prices": tmp_path / "prices.yaml", "policy": tmp_path / "policy.yaml"}
    files["prices"].write_text(price_book_text(H100="2.4"))
    files["policy"].write_text(POLICY.format(deserved=1))
    with Service(archiving.model_copy(update=files), clock) as service:
        first = service.book().version
        files["prices"].write_text(price_book_text(H100="3.5"))
        files["policy"].write_text(POLICY.format(deserved=2))
        full(True)
        for _ in range(2):
            after(clock, service, 60_000)
            assert service.book().version == first
            assert failing(service, "prices file") == 1
            assert failing(service, "policy file") == 1
        full(False)
        after(clock, service, 60_000)
        assert service.book().version != first
        (_, policy) = service.ledger.status().policies(0, clock.wall_ms() + 1)
        assert policy.policy.queues[0].deserved == 2
        assert failing(service, "prices file") == 0
        assert ready(service) == (200, {})


def test_an_accountant_that_starts_on_a_full_disk_answers_and_catches_up(archiving, clock, tmp_path, full):
    prices = tmp_path / "prices.yaml"
    prices.write_text(price_book_text(H100="2.4"))
    changed = archiving.model_copy(update={"prices": prices})
    with Service(changed, clock) as service:
        first = service.book().version
    prices.write_text(price_book_text(H100="3.5"))
    full(True)
    with Service(changed, clock) as service:
        assert service.book().version == first
        client = client_of(service)
        assert client.post("/v1/usage", content=encoded(pod_minutes())).status_code == 503
        assert client.get("/v1/prices").status_code == 200
        full(False)
        after(clock, service, 60_000)
        assert service.book().version != first


def weight_decision(name: str, at_ms: int) -> Decision:
    return Decision(
        id=name, at_ms=at_ms, kind="weight", target="kai", subject="a", mode="dry-run", reason="r", policy_version="v"
    )


def test_below_the_floor_nothing_is_written(archiving, clock, full):
    decision = weight_decision("d", clock.wall_ms())
    with Service(archiving, clock) as service:
        ledger, now = service.ledger, clock.wall_ms()
        node = Facts(nodes=(NodeFacts(cluster="prod", name="n1", pool="a"),))
        policy = Policy.model_validate({"schema": 1, "queues": [{"name": "a", "deserved": 1}]})
        act = NewAct(now, "pods", "s", "ada", "")
        writes = {
            "policy": lambda: ledger.put_policy(policy, now),
            "node": lambda: ledger.observe(node, now),
            "decision": lambda: ledger.record_decisions([decision], now),
            "act": lambda: record(ledger, [act], None),
            "archive": lambda: ledger.archive(now),
        }
        full(True)
        before = ledger.wal_bytes()
        for write in writes.values():
            with pytest.raises(LedgerUnavailable, match="only 1 MiB of disk are free"):
                write()
        assert ledger.wal_bytes() == before
        assert not list(Path(archiving.archive.to).glob("*"))
        full(False)
        for write in writes.values():
            write()
        assert present(ledger).decisions(0, now + 1)


def test_an_act_of_before_a_kill_is_archived_when_the_accountant_is_up_again(archiving, clock, tmp_path):
    """Its volume may be lost before the archive's interval is over."""
    with Service(archiving, clock) as service:
        after(clock, service, 3_600_000)
        record(service.ledger, [NewAct(clock.wall_ms(), "invoiced", "2026-10", "ada", "", '{"lines": []}')], None)
    before = parts(archiving)
    with Service(archiving, clock) as service:
        after(clock, service, 1_000)
        assert parts(archiving) == before + 1
        after(clock, service, 1_000)
        assert parts(archiving) == before + 1
    shutil.rmtree(archiving.data)
    with Service(archiving.model_copy(update={"data": empty_ledger.data(tmp_path / "data")}), clock) as again:
        assert [act.kind for act in present(again.ledger).acts()] == ["invoiced"]


def test_an_act_that_the_archive_could_not_take_is_taken_once_it_can(archiving, clock):
    with Service(archiving, clock) as service:
        off = Path(archiving.archive.to)
        off.parent.mkdir(exist_ok=True)
        off.write_text("no folder")
        record(service.ledger, [NewAct(clock.wall_ms(), "invoiced", "2026-10", "ada", "", '{"lines": []}')], None)
        after(clock, service, 1_000)
        assert ready(service) == (200, {"archive": "failed"})
        off.unlink()
        after(clock, service, 60_000)
        assert parts(archiving) == 1
        assert ready(service) == (200, {})


def test_decisions_past_their_retention_are_removed_once_the_archive_has_them(archiving, clock):
    keeping = archiving.model_copy(update={"keep_decisions": 400 * 86_400})
    with Service(keeping, clock) as service:
        first = clock.wall_ms()
        both = [weight_decision(str(at), at) for at in (first, first + 2 * MS_PER_DAY)]
        service.ledger.record_decisions(both, clock.wall_ms())
        after(clock, service, 401 * MS_PER_DAY)
        assert present(service.ledger).decisions(0, clock.wall_ms()) == both[1:]
        assert list(Path(archiving.archive.to).glob("part-*/decision.parquet"))
        kept = backups.KeptBackups(in_folder(Path(archiving.backups_to)), archiving.backups.keep)
        for_ever = Maintenance(
            service.ledger, service.books, archiving.model_copy(update={"keep_decisions": None}), clock, kept
        )
        assert "retention" not in {routine.name for routine in for_ever.routines()}


@pytest.fixture
def publishing(archiving, tmp_path):
    (tmp_path / "lake").mkdir()
    return archiving.model_copy(update={"lake": Lake(warehouse=str(tmp_path / "lake"))})


def test_the_lake_is_written_and_compared_after_a_start_and_then_at_its_time(publishing, clock):
    """An accountant that restarts every half an hour publishes, too."""
    with Service(publishing, clock) as service:
        service.ingest.submit_batch(pod_minutes(rows=3)).result()
        service.publish()
        first = clock.wall_ms()
        assert figure(service, "gputally_lake_published_timestamp_seconds") == first / 1_000
        assert figure(service, "gputally_lake_differences") == 0
        clock.advance(3_500_000)
        service.publish()
        assert figure(service, "gputally_lake_published_timestamp_seconds") == first / 1_000
        clock.advance(100_000)
        service.publish()
        assert figure(service, "gputally_lake_published_timestamp_seconds") == clock.wall_ms() / 1_000


def test_a_lake_that_another_hand_changed_is_named_by_the_metric_the_log_and_the_check(publishing, clock):
    with Service(publishing, clock) as service:
        service.ingest.submit_batch(pod_minutes(rows=3)).result()
        clock.advance(2 * MS_PER_DAY)
        service.publish()
        assert figure(service, "gputally_lake_differences") == 0
        lake = Catalogue.connect(publishing.lake.model_copy(update={"ledger": publishing.kubernetes.cluster}))
        hourly = lake.open(USAGE_HOURLY).scan().to_arrow()
        day = min(hourly["day"].to_pylist())
        overwrite(lake, USAGE_HOURLY, hourly.slice(0, 0), {"day": day})
        lake.close()
        clock.advance(MS_PER_DAY)
        with capture_logs() as logged:
            service.publish()
        assert figure(service, "gputally_lake_differences") > 0
        named = [entry["difference"] for entry in logged if entry["event"] == "lake_differs"]
        found = client_of(service).get("/v1/check?lake=true").json()
        assert found["lake_differences"] == named
        assert all(line.startswith(f"{day} ") for line in named)
        assert figure(service, "gputally_lake_differences") == len(found["lake_differences"])


def test_a_lake_that_cannot_be_reached_is_tried_again_and_keeps_nothing_else_waiting(publishing, clock):
    warehouse = Path(publishing.lake.warehouse)
    warehouse.rmdir()
    with Service(publishing, clock) as service:
        service.ingest.submit_batch(pod_minutes(rows=3)).result()
        service.publish()
        assert failing(service, "lake") == 1
        after(clock, service, 7_200_000)
        assert figure(service, 'gputally_task_failures_total{task="lake"}') == 1, "its own thread tries again"
        assert list(Path(publishing.archive.to).glob("part-*"))
        warehouse.mkdir()
        service.publish()
        assert failing(service, "lake") == 0
        assert figure(service, "gputally_lake_published_timestamp_seconds") == clock.wall_ms() / 1_000
