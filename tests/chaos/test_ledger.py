"""The accountant is killed, its disk fills, its clock is set back, its volume is lost: the ledger is exact.

Every process is the real program (forked from one that has imported it already), killed with SIGKILL."""

from __future__ import annotations

import contextlib
import gzip
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from accountant.storage import backups
from accountant.storage.crash_recovery import COMMIT
from accountant.storage.folder_or_object_store import in_folder
from agent.wire import Batch
from tests.chaos.accountant_process import (
    GONE,
    QUARTER_MS,
    AccountantProcess,
    Outbox,
    accountant_process,
    assert_exact,
    booked,
    fork_server,
    is_running,
    outbox,
)
from tests.chaos.power_cuts import PowerCuts
from tests.deadlines import Deadline

SEED = 20261121
CUTS = 20


@pytest.fixture
def accountant(tmp_path: Path, zygote: subprocess.Popen[str]) -> Iterator[AccountantProcess]:
    with accountant_process(tmp_path, zygote) as found:
        found.settings()
        yield found


def _suffer(
    accountant: AccountantProcess,
    sender: Outbox,
    kills: int,
    chance: random.Random,
    then: Callable[[], object] = lambda: None,
) -> None:
    """Run the accountant under load for random times, with a backup or a month that closes, kill it, and call
    `then`."""
    begun = time.gmtime(sender.start_ms / 1000)
    month = f"{begun.tm_year}-{begun.tm_mon:02d}"
    acts = ((None, None), ("/v1/backups", b"{}"), (f"/v1/periods/{month}/close", b"{}"), (None, None))
    for _ in range(kills):
        accountant.start()
        # Some die while they start. The lives of the others count from when they answer, however busy the machine is;
        # some of them checkpoint, fold and archive (once a second).
        life = chance.choice((0.02, 0.1, 0.2, 0.3, 0.3, 1.5)) * chance.uniform(0.5, 1.2)
        if life > 0.15:
            accountant.listening()
        killer = threading.Timer(life, accountant.end)
        killer.start()
        path, body = chance.choice(acts)
        beside = threading.Thread(target=_ask, args=(accountant, path, body, killer)) if path else None
        if beside is not None:
            beside.start()
        while killer.is_alive():
            sender.grow(chance.randint(0, 3))
            with contextlib.suppress(*GONE):
                sender.send(accountant, chance.choice((1, 2, 30)))
            killer.join(0.01)
        if beside is not None:
            beside.join()
        then()


def _ask(accountant: AccountantProcess, path: str, body: bytes, killer: threading.Timer) -> None:
    """Send a request as soon as it listens; it may be killed meanwhile, or refuse."""
    while killer.is_alive():
        try:
            accountant.ask("POST", path, body)
        except GONE:
            killer.join(0.02)
        else:
            return


class Attack:
    """Hostile requests from threads of their own, again and again; each counts its successes."""

    def __init__(self, to: AccountantProcess, start_ms: int) -> None:
        self._to, self._start_ms = to, start_ms
        self._over = threading.Event()
        self.done: Counter[str] = Counter()

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        ways = (self.claim, self._bomb, self._half_open, self._trickle, self._ask_much)
        threads = [threading.Thread(target=self._repeat, args=(way,)) for way in ways]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join()

    def _repeat(self, way: Callable[[], None]) -> None:
        while not self._over.is_set():
            try:
                way()
            except GONE:
                self._over.wait(0.02)
            else:
                self.done[way.__name__] += 1

    def claim(self) -> None:
        """Report the first node's GPUs from another node, under the names of its pods."""
        thief = Outbox("n1", self._start_ms, made=4, epoch=f"0000-{self.done['claim']}")
        rows = [thief._row(seq) for seq in range(1, thief.last + 1)]
        told = Batch(
            cluster="c", node="n2", boot_id="b", epoch=thief.epoch, first_seq=1, oldest_seq=1, intervals=tuple(rows)
        )
        self._to.ask("POST", "/v1/usage", msgspec.json.encode(told))

    def _bomb(self) -> None:
        self._send(b"POST /v1/usage HTTP/1.1", gzip.compress(b"[" * 40_000_000, 1), b"Content-Encoding: gzip\r\n")

    def _half_open(self) -> None:
        with contextlib.ExitStack() as kept:
            for _ in range(40):
                kept.enter_context(self._dial()).sendall(b"GET / HTTP/1.1\r\nX: ")
            self._over.wait(0.2)

    def _trickle(self) -> None:
        with self._dial() as one:
            one.sendall(b"POST /v1/usage HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 8000000\r\n\r\n")
            for _ in range(10):
                one.sendall(b" ")
                self._over.wait(0.05)

    def _ask_much(self) -> None:
        self._to.ask("GET", f"/v1/usage?by=gpu,hour,pod&start={self._start_ms}")

    def _send(self, line: bytes, body: bytes, headers: bytes) -> None:
        with self._dial() as one:
            one.sendall(b"%s\r\nHost: 127.0.0.1\r\n%sContent-Length: %d\r\n\r\n%s" % (line, headers, len(body), body))
            one.recv(1)

    def _dial(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._to.port), timeout=5)


def _killed(
    accountant: AccountantProcess, kills: int, *, attacked: bool = False, then: Callable[[], object] = lambda: None
) -> None:
    off = accountant.folder / "off"
    accountant.settings(archive={"to": str(off / "archive"), "every": 1, "keep_rows": "1d"})
    chance, sender = random.Random(SEED), outbox()
    attack = Attack(accountant, sender.start_ms)
    if attacked:  # the GPUs are known as the first node's
        accountant.serve()
        sender.deliver(accountant, 4)
        accountant.end()
        kills -= 1
    with attack.going_on() if attacked else contextlib.nullcontext():
        _suffer(accountant, sender, kills, chance, then)
    assert accountant.kills == kills + attacked
    accountant.serve()
    sender.deliver(accountant)
    if attacked:
        attack.claim()  # as well where it lived too briefly each time
        assert booked(accountant, sender.start_ms, sender.end_ms) == sender.truth()
        _, checked = accountant.ask("GET", f"/v1/check?start={sender.start_ms}&end={sender.end_ms}")
        assert (checked["imbalance_gpu_us"], checked["differences"]) == (0, [])
        assert checked["quarantined_rows"] > 0  # what the other node claimed, and nothing of it is booked
        _, refused = accountant.ask("GET", "/v1/quarantine")
        assert {(row["node"], row["reason"]) for row in refused} == {("n2", "foreign-gpu")}
    else:
        assert_exact(sender, accountant)
    for made in backups.list_backups(in_folder(accountant.folder / "data" / "backups")):
        backups.restore(in_folder(accountant.folder / "data" / "backups"), f"{made.name}.duckdb", off / made.name)


def test_killed_at_any_instant_nothing_acknowledged_is_lost_or_doubled(accountant: AccountantProcess) -> None:
    _killed(accountant, 12)


@pytest.mark.real
def test_the_same_a_hundred_times(accountant: AccountantProcess) -> None:
    _killed(accountant, 100)


def test_attackers_at_work_at_the_same_time_change_nothing(accountant: AccountantProcess) -> None:
    _killed(accountant, 12, attacked=True)


@pytest.mark.real
def test_the_same_fifty_times_under_attack(accountant: AccountantProcess) -> None:
    _killed(accountant, 50, attacked=True)


@pytest.mark.real
@pytest.mark.parametrize("attacked", [False, True])
def test_after_failures_of_power_the_books_are_exact(tmp_path: Path, attacked: bool) -> None:
    """Of data that was written but not synced, any part may remain."""
    folder, aside, chance = tmp_path / "disk", tmp_path / "aside", random.Random(SEED)
    folder.mkdir()
    aside.mkdir()
    power = PowerCuts.of(folder, ("data", "off"), aside)
    lost = 0

    def cut() -> None:
        nonlocal lost
        lost += power.cut(chance)

    with fork_server(power.environment) as zygote, accountant_process(folder, zygote) as accountant:
        _killed(accountant, CUTS, attacked=attacked, then=cut)
    assert lost > CUTS // 4, "too few files had lost anything for the test to show something"


def test_the_volume_is_deleted_and_comes_back_from_backup_archive_and_agents(accountant: AccountantProcess) -> None:
    off, sender = accountant.folder / "off", outbox()
    accountant.settings(archive={"to": str(off / "archive"), "every": 1}, backups={"to": str(off / "backups")})
    accountant.serve()
    sender.deliver(accountant, 100)
    assert accountant.ask("POST", "/v1/backups", b"{}")[0] == 200
    sender.grow(60)
    deadline = Deadline()
    while (sender.archived or 0) < 100 * sender.gpus:
        assert not deadline.passed, accountant.words()
        sender.durable = min(sender.durable, sender.last - sender.gpus)  # a replay: its answer says what is archived
        sender.send(accountant, 100)
    accountant.end()
    shutil.rmtree(accountant.folder / "data")
    (newest,) = backups.list_backups(in_folder(off / "backups"))
    backups.restore(in_folder(off / "backups"), f"{newest.name}.duckdb", accountant.folder / "data" / "ledger.duckdb")
    accountant.serve()
    sender.durable = sender.last  # as far as the agent knows; the answer tells it otherwise
    sender.deliver(accountant, 8)
    assert_exact(sender, accountant)


def test_a_torn_log_is_cut_and_what_was_in_it_is_sent_again(accountant: AccountantProcess) -> None:
    accountant.settings(checkpoint_seconds=3600)
    sender = outbox()
    accountant.serve()
    sender.deliver(accountant, 50, at_once=5)
    accountant.end()
    log = accountant.folder / "data" / "ledger.duckdb.wal"
    whole = log.read_bytes()
    log.write_bytes(whole[: whole.rindex(COMMIT) - 7])
    accountant.serve()
    sender.grow(1)
    sender.durable = sender.last - sender.gpus
    sender.deliver(accountant)
    assert_exact(sender, accountant)
    assert (accountant.folder / "data" / "ledger.duckdb.wal.torn").exists()


def test_a_second_accountant_on_the_same_ledger_says_so_and_ends(accountant: AccountantProcess) -> None:
    accountant.serve()
    first = accountant.pid
    accountant.start()
    second, accountant.pid = accountant.pid, first
    assert second is not None
    accountant.until(lambda: not is_running(second), "the second still lives")
    assert "another process has this ledger open, and only one may" in accountant.words()
    assert accountant.ask("GET", "/readyz")[0] == 200
    accountant.end(signal.SIGTERM)


@pytest.fixture
def small_disk(tmp_path: Path, accountant: AccountantProcess) -> Iterator[Path]:
    """A file system of 90 MiB; nothing uses it when it is removed."""
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=90m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        message = f"no file system may be mounted here: {done.stderr.strip()}"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    try:
        yield place
    finally:
        accountant.end()
        subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_refuses_and_loses_nothing(accountant: AccountantProcess, small_disk: Path) -> None:
    accountant.settings(data=str(small_disk / "data"))
    sender = outbox()
    accountant.serve()
    sender.deliver(accountant, 20)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(30 * 2**20))
    sender.grow(20)
    before = sender.durable
    sender.send(accountant, 20)
    assert sender.durable == before  # 503: nothing was taken
    assert booked(accountant, sender.start_ms, sender.start_ms + 20 * QUARTER_MS)
    accountant.end()
    ballast.unlink()
    accountant.serve()
    sender.deliver(accountant)
    assert_exact(sender, accountant)


def file_size(place: Path) -> int:
    return place.stat().st_size if place.exists() else 0


def test_no_room_in_the_middle_of_a_commit_refuses_it_and_the_next_are_taken(accountant: AccountantProcess) -> None:
    """The log ends at a different byte each time: within a record, between two, at the end of the commit."""
    accountant.settings(checkpoint_seconds=3_600)
    sender = outbox()
    accountant.serve()
    log = accountant.folder / "data" / "ledger.duckdb.wal"
    sender.deliver(accountant, 4)
    begin = file_size(log)
    sender.deliver(accountant, 4)
    of_a_commit = file_size(log) - begin
    assert of_a_commit > 1_000
    for part in (0, 13, of_a_commit // 2, of_a_commit - 1_000):
        sender.grow(4)
        before = sender.durable
        accountant.no_file_beyond(file_size(log) + part)
        for _ in range(2):
            sender.send(accountant, 4)
            assert sender.durable == before, "503: nothing was taken"
        assert booked(accountant, sender.start_ms, sender.start_ms + before // sender.gpus * QUARTER_MS)
        accountant.no_file_beyond(None)
        sender.send(accountant, 4)
        assert sender.durable == sender.last, "the same process takes it as soon as there is room"
    assert_exact(sender, accountant)
    accountant.end()
    accountant.serve()
    assert_exact(sender, accountant)


@pytest.mark.parametrize("room", [0, 100_000])
def test_no_room_in_the_middle_of_a_checkpoint_loses_nothing(accountant: AccountantProcess, room: int) -> None:
    """The engine stops, and the process ends with a line that says so; after a restart all data is there."""
    sender = outbox()
    accountant.serve()
    ledger, log = (accountant.folder / "data" / name for name in ("ledger.duckdb", "ledger.duckdb.wal"))
    accountant.no_file_beyond(file_size(ledger) + room)
    with contextlib.suppress(*GONE):
        while accountant.alive():
            sender.deliver(accountant, 20)
            # Were the log not folded in after every few sets, it would be the first to meet the bound: refusals then.
            accountant.until(lambda: not file_size(log) or not accountant.alive(), "it makes no checkpoint")
    accountant.gone()
    assert sender.durable > 0
    assert "the database is no longer usable" in accountant.words()
    accountant.serve()
    sender.deliver(accountant)
    assert_exact(sender, accountant)
