"""A real accountant that a test starts and kills within a tenth of a second, and an outbox that sends to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import yaml

from agent.wire import Batch, Holder, UsageInterval
from gputally.base.units import MS_PER_DAY
from tests.deadlines import patience_s, until

QUARTER_MS = 900_000
GONE = (OSError, http.client.HTTPException)
"""Errors of a request while the process does not run."""


@dataclass
class AccountantProcess:
    """`accountant serve` as a process. It can be started again and again on the same folder."""

    folder: Path
    port: int
    zygote: subprocess.Popen[str]
    pid: int | None = None
    kills: int = 0

    @property
    def config(self) -> Path:
        return self.folder / "accountant.yaml"

    @property
    def log(self) -> Path:
        return self.folder / "accountant.log"

    def settings(self, **changes: Any) -> None:
        given: dict[str, Any] = {
            "data": str(self.folder / "data"), "listen": f"127.0.0.1:{self.port}", "auth": "off", "linger_ms": 1,
            "checkpoint_seconds": 1, "log_level": "error", **changes,
        }  # fmt: skip
        self.config.write_text(yaml.safe_dump(given))

    def start(self) -> None:
        self.pid = fork_program(self.zygote, ["accountant", "serve", "--config", str(self.config)], self.log)

    def serve(self) -> None:
        """Start the process and wait until it answers."""
        self.start()
        self.listening()

    def alive(self) -> bool:
        return self.pid is not None and is_running(self.pid)

    def end(self, how: signal.Signals = signal.SIGKILL) -> None:
        """Send the signal `how` and wait until the process has ended."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, how)
            self.until(lambda: not self.alive(), "it still lives")
            self.kills += how == signal.SIGKILL
            self.pid = None

    def no_file_beyond(self, size: int | None) -> None:
        """Limit the size of each file that the process writes; None removes the limit. A write beyond it fails in the
        middle, as on a full disk."""
        assert self.pid is not None
        _, hard = resource.prlimit(self.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (hard if size is None else size, hard))

    def gone(self) -> None:
        """Wait until the process ends by itself."""
        self.until(lambda: not self.alive(), "it still lives")
        self.pid = None

    def listening(self) -> None:
        def answers() -> bool:
            assert self.alive(), self.words()
            with contextlib.suppress(*GONE):
                return self.ask("GET", "/readyz")[0] == 200
            return False

        self.until(answers, "it does not listen")

    def ask(
        self, method: str, path: str, body: bytes | None = None, timeout: float | None = None, token: str = ""
    ) -> tuple[int, Any]:
        """Send a request, and return status and body. Raises OSError or HTTPException if the process does not
        answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout or patience_s())
        try:
            who = {"Authorization": f"Bearer {token}"} if token else {}
            connection.request(method, path, body, {"Content-Type": "application/json", **who})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        except ValueError as cut_off:
            raise http.client.HTTPException(str(cut_off)) from cut_off
        finally:
            connection.close()

    def words(self) -> str:
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""

    def until(self, met: Callable[[], bool], otherwise: str) -> None:
        """Wait until `met` is true. At the deadline the test fails with `otherwise` and the end of the process's
        log."""
        until(met, lambda: f"{otherwise}:\n{self.words()}")


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@contextlib.contextmanager
def fork_server(environment: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """Run the fork server until the block ends. environment: further variables for the forked programs."""
    command, given = [sys.executable, "-m", "tests.chaos.fork_server"], {**os.environ, **(environment or {})}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=given) as zygote:
        assert zygote.stdout is not None
        assert zygote.stdin is not None
        assert zygote.stdout.readline() == "ready\n"
        try:
            yield zygote
        finally:
            zygote.stdin.close()
            zygote.wait(patience_s())


def fork_program(zygote: subprocess.Popen[str], command: Sequence[str], log: Path, kill_at: int | None = None) -> int:
    """Fork a program with its arguments and return its process id. `log` receives its output.

    kill_at: the change of a file at which it is killed, 0 for never; its exit code and the number of changes are then
    the last line of `log`. The server needs the library of kill_at.c for it."""
    assert zygote.stdin is not None
    assert zygote.stdout is not None
    program, *arguments = command
    zygote.stdin.write(
        json.dumps({"program": program, "arguments": arguments, "log": str(log), "kill_at": kill_at}) + "\n"
    )
    zygote.stdin.flush()
    return int(zygote.stdout.readline())


@contextlib.contextmanager
def accountant_process(folder: Path, zygote: subprocess.Popen[str]) -> Iterator[AccountantProcess]:
    """Yield an accountant process; it is killed when the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = AccountantProcess(folder, port, zygote)
    try:
        yield found
    finally:
        found.end()


@dataclass
class Outbox:
    """The outbox of a node. Each quarter-hour it has one interval for each GPU. It keeps the intervals until they are
    archived, and sends them as an agent does.

    span_ms: what is a quarter-hour here may be another span.
    token: the node's bearer token; "" for an accountant that asks for none."""

    node: str
    start_ms: int
    gpus: int = 4
    durable: int = 0
    archived: int | None = None
    made: int = 0
    """Quarter-hours that exist."""
    epoch: str = field(default="0192-chaos")
    cluster: str = "c"
    namespace: str = "ns"
    token: str = ""
    span_ms: int = QUARTER_MS

    def grow(self, quarters: int) -> None:
        self.made += quarters

    @property
    def last(self) -> int:
        return self.made * self.gpus

    @property
    def end_ms(self) -> int:
        return self.start_ms + self.made * self.span_ms

    def batch(self, quarters: int) -> Batch:
        """Make a batch of the first unacknowledged intervals."""
        first = self.durable - self.durable % self.gpus + 1
        until = min(self.made, (first - 1) // self.gpus + quarters)
        rows = tuple(self._row(seq) for seq in range(first, until * self.gpus + 1))
        return Batch(
            cluster=self.cluster,
            node=self.node,
            boot_id="b",
            epoch=self.epoch,
            first_seq=first,
            oldest_seq=1,
            intervals=rows,
        )

    def send(self, to: AccountantProcess, quarters: int) -> None:
        """Send one batch of unacknowledged intervals; rewind if the accountant asks for it. Raises as `ask` does."""
        batch = self.batch(quarters)
        status, answer = to.ask("POST", "/v1/usage", msgspec.json.encode(batch), token=self.token)
        if status == 409:
            self.take(answer["ack"], lost=True)
        elif status == 200:
            self.take(answer, lost=False)
        else:
            assert status == 503, answer

    def deliver(self, to: AccountantProcess, new: int = 0, at_once: int = 40) -> None:
        """Add `new` quarter-hours, and send everything in batches of `at_once` quarter-hours."""
        self.grow(new)
        while self.durable < self.last:
            self.send(to, at_once)

    def take(self, ack: Mapping[str, Any], *, lost: bool) -> None:
        """Apply an acknowledgement. lost: the ledger may be an older copy, which has lost intervals that were durable
        but not archived."""
        assert ack["durable_seq"] >= (self.archived or 0 if lost else self.durable), ack
        self.durable, self.archived = ack["durable_seq"], ack["archived_seq"]

    def _row(self, seq: int) -> UsageInterval:
        quarter, gpu = divmod(seq - 1, self.gpus)
        start, whole = self.start_ms + quarter * self.span_ms, self.span_ms * 1000
        pod = Holder(kind="pod", uid=f"{self.node}-pod-{gpu}", namespace=self.namespace, name=f"{self.namespace}-{gpu}")
        return UsageInterval(
            seq=seq, start_ms=start, end_ms=start + self.span_ms, gpu_uuid=f"{self.node}-{gpu}", gpu_model="H100",
            holder=pod, capacity_us=whole, allocated_us=whole, busy_us=whole // 97 * (seq % 97),
            energy_uj=seq * 1000 + 1, method="device",
        )  # fmt: skip

    def truth(self) -> dict[str, tuple[int, int, int]]:
        """Return busy and allocated microseconds and energy of all intervals, by GPU."""
        found: dict[str, list[int]] = {}
        for seq in range(1, self.last + 1):
            row = self._row(seq)
            sums = found.setdefault(row.gpu_uuid, [0, 0, 0])
            for i, value in enumerate((row.busy_us, row.allocated_us, row.energy_uj)):
                sums[i] += value or 0
        return {gpu: (busy, allocated, energy) for gpu, (busy, allocated, energy) in found.items()}


def booked(to: AccountantProcess, start_ms: int, end_ms: int) -> dict[str, tuple[int, int, int]]:
    """Return the same figures from the accountant's ledger."""
    status, answer = to.ask("GET", f"/v1/usage?by=gpu&start={start_ms}&end={end_ms}")
    assert status == 200, answer
    found = {}
    for line in answer["lines"]:
        accounts = line["accounts_gpu_us"]
        allocated = accounts["busy"] + accounts["allocated_idle"] + accounts["allocated_unknown"]
        found[line["key"]["gpu"]] = (accounts["busy"], allocated, line["energy_uj"])
    return found


def assert_balanced(to: AccountantProcess, start_ms: int, end_ms: int) -> None:
    status, answer = to.ask("GET", f"/v1/check?start={start_ms}&end={end_ms}")
    assert status == 200
    assert (answer["imbalance_gpu_us"], answer["differences"], answer["quarantined_rows"]) == (0, [], 0)


def outbox(days: int = 300) -> Outbox:
    """Create an outbox that starts `days` ago, so that no interval lies in the future and, by default, some months are
    over."""
    now = time.time_ns() // 1_000_000
    return Outbox("n1", now - now % MS_PER_DAY - days * MS_PER_DAY)


def assert_exact(sender: Outbox, to: AccountantProcess) -> None:
    assert booked(to, sender.start_ms, sender.end_ms) == sender.truth()
    assert_balanced(to, sender.start_ms, sender.end_ms)
