"""Programs that are asked to end while they work for callers who wait or have gone: they end with exit code 0 and
without giving up a request, and leave no process and a ledger that opens.

On an idle machine it takes about six seconds: reads have five of them."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml

import fairshare
from accountant.storage.duckdb_ledger import open_ledger
from gputally.base.clock import SystemClock
from gputally.base.units import MS_PER_HOUR
from tests.deadlines import patience_s, until
from tests.plugin_cases import needs
from tests.price_books import price_book_text
from tests.real.programs import free_ports
from tests.usage_records import batch, deliver, interval, pod_holder

pytestmark = pytest.mark.real
DAYS, GPUS = 2, 10
POLICY, CLUSTER = (Path(fairshare.__file__).parent / "samples" / name for name in ("policy.yaml", "cluster.yaml"))
STEP = "4m"
"""So short that each query of the OpenCost port asks the ledger hundreds of times."""


@contextlib.contextmanager
def program(log: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    with (
        log.open("wb") as said,
        subprocess.Popen([sys.executable, "-m", *command], stdout=said, stderr=said) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def told_to_end(process: subprocess.Popen[bytes], log: Path) -> None:
    """Send SIGTERM; it must end, without a defect and without a request that it had to give up."""
    process.send_signal(signal.SIGTERM)
    assert until(lambda: process.poll() is not None, lambda: f"it still lives:\n{log.read_text()[-2000:]}")
    said = log.read_text()
    assert (process.returncode, "Traceback" in said, '"level": "error"' in said) == (0, False, False), said[-2000:]


def children(process: subprocess.Popen[bytes]) -> list[Path]:
    found: list[Path] = []
    for thread in Path(f"/proc/{process.pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has ended meanwhile
            found += [Path("/proc") / child for child in (thread / "children").read_text().split()]
    return found


def url_of(log: Path, event: str) -> tuple[str, int]:
    """Return the address that a line of the log names."""
    found = until(
        lambda: re.search(rf'^.*"url": "http://([\d.]+):(\d+)".*"event": "{event}"', log.read_text(), re.MULTILINE),
        lambda: log.read_text()[-2000:],
    )
    return found[1], int(found[2])


def asked(clients: contextlib.ExitStack, where: tuple[str, int], path: str) -> socket.socket:
    """Send a request over a connection that ends with `clients`."""
    client = clients.enter_context(socket.create_connection(where))
    client.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    return client


def read(clients: Sequence[socket.socket]) -> None:
    """Read the answers, whatever they are, until the connections end."""

    def all_of(client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while client.recv(1 << 16):
                pass

    for client in clients:
        threading.Thread(target=all_of, args=(client,), daemon=True).start()


@needs("exports.pdf")
def test_an_accountant_that_works_for_many_ends_within_seconds(tmp_path: Path) -> None:
    log, data, clock = tmp_path / "log", tmp_path / "data", SystemClock()
    data.mkdir()
    begin = (clock.wall_ms() // MS_PER_HOUR - 24 * DAYS) * MS_PER_HOUR
    rows = [
        interval(begin + hour * MS_PER_HOUR, f"GPU-{gpu}", pod_holder(f"job-{gpu}-{hour}"), span_ms=MS_PER_HOUR)
        for hour in range(24 * DAYS)
        for gpu in range(GPUS)
    ]
    with contextlib.closing(open_ledger(data / "ledger.duckdb", clock)) as ledger:
        deliver(ledger, clock.wall_ms(), batch(rows))
    (tmp_path / "prices.yaml").write_text(price_book_text(H100="2.5"))
    port = {"listen": "127.0.0.1:0"}
    settings = {"data": str(data), "auth": "off", "prices": str(tmp_path / "prices.yaml"), "opencost": port, **port}
    (tmp_path / "accountant.yaml").write_text(yaml.safe_dump(settings))
    today = datetime.now(UTC).date()
    span = f"start={today - timedelta(DAYS - 1)}&end={today}"
    with (
        contextlib.ExitStack() as clients,
        program(log, "accountant", "serve", "--config", str(tmp_path / "accountant.yaml")) as process,
    ):
        main, opencost = url_of(log, "serving"), url_of(log, "serving_for_others")
        documents = [asked(clients, main, f"/v1/report?{span}&format=pdf") for _ in range(6)]
        read(documents[::2])
        renderers = until(lambda: children(process), "no document is rendered")
        queries = [
            asked(clients, opencost, f"/allocation?window={DAYS}d&aggregate=pod&step={STEP}&accumulate=true")
            for _ in range(30)
        ]
        read(queries[::2])
        for client in [*documents[1::2], *queries[1::2]]:
            client.close()
        told_to_end(process, log)
    until(lambda: not any(child.exists() for child in renderers), "a renderer is left")
    assert [file.name for file in data.iterdir() if file.suffix == ".wal"] == []
    with contextlib.closing(open_ledger(data / "ledger.duckdb", clock)) as ledger:
        assert ledger.status().gpu_hours(begin, begin + 24 * DAYS * MS_PER_HOUR) == len(rows)


def test_a_controller_whose_accountant_hangs_ends_within_seconds(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with socket.create_server(("127.0.0.1", 0)) as accountant:
        url = f"http://127.0.0.1:{accountant.getsockname()[1]}"
        command = ("run", "--policy", str(POLICY), "--url", url, "--objects", str(CLUSTER))
        with program(log, "fairshare", *command, "--listen", "127.0.0.1:0") as process:
            accountant.settimeout(patience_s())
            connection, _ = accountant.accept()
            with connection:
                told_to_end(process, log)
            accountant.setblocking(False)
            with pytest.raises(BlockingIOError):
                accountant.accept()  # no further call once one was ended


def test_the_ports_of_a_controller_stop_at_one_time(tmp_path: Path) -> None:
    """The port of the pages waits for a client's form, and that of the probes ends meanwhile."""
    log, form = tmp_path / "log", "Content-Type: application/x-www-form-urlencoded\r\nContent-Length: 9\r\n\r\na"
    probes, pages = free_ports(2)
    command = ("run", "--policy", str(POLICY), "--url", "http://127.0.0.1:9", "--objects", str(CLUSTER))
    ports = ("--listen", f"127.0.0.1:{probes}", "--pages-listen", f"127.0.0.1:{pages}")
    with program(log, "fairshare", *command, *ports) as process, contextlib.ExitStack() as clients:
        url_of(log, "serving")
        idle = asked(clients, ("127.0.0.1", probes), "/livez")
        assert idle.recv(1 << 16)
        waiting = clients.enter_context(socket.create_connection(("127.0.0.1", pages)))
        waiting.sendall(f"POST /shares/policy/check HTTP/1.1\r\nHost: 127.0.0.1\r\n{form}".encode())
        process.send_signal(signal.SIGTERM)
        idle.settimeout(patience_s())
        while idle.recv(1 << 16):
            pass
        waiting.setblocking(False)
        with pytest.raises(BlockingIOError):  # it is open
            waiting.recv(1)
