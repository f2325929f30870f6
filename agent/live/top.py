"""`gputally agent top`: the live table of this machine, from NVML itself or from a running agent's /metrics.

It meters and ships nothing. Without arguments it reads NVML and says who runs on what (Slurm steps, containers,
pods by their log folders, processes). With --metrics it shows what that agent last closed, which changes with
its intervals. Exit codes: 0, 1 without a GPU (or where the page cannot be read), 2 wrong call.
"""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

from agent import logs
from agent.clock import Clock, SystemClock
from agent.errors import SettingsError
from agent.live.frames import Frame, from_exposition, from_snapshot
from agent.live.prices import Prices, load, uniform

TIMEOUT_S = 2.0
MAX_BYTES = 8 * 1024 * 1024
MIN_PERIOD_S, MAX_PERIOD_S = 0.2, 5.0

Look = Callable[[], Frame]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The arguments of `gputally agent top`."""
    parser = commands.add_parser("top", help="show a live table of this machine's GPUs", description=__doc__)
    parser.add_argument("--once", action="store_true", help="Print the table once and exit.")
    parser.add_argument("--metrics", default="", metavar="URL", help="Read a running agent's http://HOST:PORT/metrics.")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="Time between two readings (1).")
    prices = parser.add_mutually_exclusive_group()
    prices.add_argument("--price-per-hour", metavar="PRICE", help="What an hour of any GPU costs.")
    prices.add_argument("--prices", type=Path, metavar="FILE", help="Prices by GPU model (YAML: currency, per_hour).")
    parser.add_argument("--proc", default="/proc", help="The process table (default /proc).")
    parser.add_argument(
        "--pod-logs", default="/var/log/pods", help="The kubelet's log folders (default /var/log/pods)."
    )


def run(arguments: argparse.Namespace) -> int:
    """The command; returns its exit code. Raises SettingsError, FileFault, DriverReplaced."""
    from agent.live.watch import LiveTable, print_frame

    if not MIN_PERIOD_S <= arguments.every <= MAX_PERIOD_S:
        raise SettingsError(
            f"--every: between {MIN_PERIOD_S} and {MAX_PERIOD_S:g} seconds, the driver forgets after 10"
        )
    prices = _prices(arguments)
    logs.configure("ERROR")
    clock = SystemClock()
    with ExitStack() as stack:
        look = page(arguments.metrics, clock) if arguments.metrics else _machine(arguments, clock, stack)
        if arguments.once:
            return print_frame(look, clock, prices=prices)
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        table = stack.enter_context(LiveTable(prices=prices))
        seen = False
        while not stop.is_set():
            frame = look()
            seen = seen or bool(frame.devices)
            table.draw(frame)
            clock.wait(arguments.every, stop)
    return 0 if seen else 1


def _prices(arguments: argparse.Namespace) -> Prices:
    if arguments.prices is not None:
        return load(arguments.prices)
    return uniform(arguments.price_per_hour) if arguments.price_per_hour is not None else Prices()


def _machine(arguments: argparse.Namespace, clock: Clock, stack: ExitStack) -> Look:
    from agent.driver.gpus import Gpus
    from agent.kube.podlogs import PodLogs
    from agent.node import NodeSource
    from agent.nvml import Driver
    from agent.processes import ProcessTable

    names = PodLogs(Path(arguments.pod_logs))
    source = NodeSource(Gpus(Driver()), ProcessTable(Path(arguments.proc)), None, names)
    stack.callback(source.close)
    return lambda: from_snapshot(source.snapshot(clock.wall_ms()))


def page(url: str, clock: Clock) -> Look:
    """Pictures of a running agent; one that does not answer is a picture without GPUs that says so.

    Raises SettingsError for anything but a plain http:// address."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise SettingsError(f"--metrics: expected http://HOST:PORT/metrics, got {url!r}")
    host, port, path = parts.hostname, parts.port or 9401, parts.path or "/metrics"

    def look() -> Frame:
        at_ms = clock.wall_ms()
        import http.client

        connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", path, headers={"Accept": "text/plain"})
            answer = connection.getresponse()
            body = answer.read(MAX_BYTES)
            if answer.status != http.client.OK:
                raise ValueError(f"HTTP {answer.status}")
            return from_exposition(body.decode("utf-8", "replace"), at_ms)
        except (OSError, http.client.HTTPException, ValueError) as error:
            return Frame(at_ms, (), f"{host}:{port}: {error}")
        finally:
            connection.close()

    return look
