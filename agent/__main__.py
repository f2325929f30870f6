"""Runs `gputally agent`. `run` creates the parts from the settings and runs them until a signal arrives; the other
commands are in `agent.commands`.

A user's mistake gives a one-line message on stderr and exit code 2, a fault of the machine (spool, port) exit code 1.
If the driver was replaced or the clock was set back, the process restarts itself. The agent logs one JSON object per
line. The functions of single commands import the libraries that only they need."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from agent.core import settings
from agent.core.lean_http_client import Identity
from agent.core.readings import Snapshot, Source
from agent.core.settings import Settings, SettingsError
from agent.core.steady_clock import ClockSetBack, SteadyClock
from agent.devices import driver_lifecycle
from agent.devices.nvml_library import DriverReplaced
from agent.main_loop import Agent
from agent.upload.spool import Outbox
from agent.upload.uploader import Uploader
from gputally.base.background_tasks import BackgroundTasks, set_on_signals
from gputally.base.clock import Clock, SystemClock
from gputally.base.errors import AgentError
from gputally.base.units import MS_PER_DAY
from gputally.base.untrusted_text import for_terminal
from gputally.base.yaml_file import FileFault

if TYPE_CHECKING:
    from agent.devices.driver_lifecycle import Gpus

log = logging.getLogger("agent")

_MIB = 1024 * 1024
_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_MAX_LOG_TEXT = 2_000
"""Largest number of characters of a log line's message and error."""


class JsonLines(logging.Formatter):
    """Formats a log record as a JSON object: time, level, logger and event, then the fields of `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "time": at.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage()[:_MAX_LOG_TEXT],
        }
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD_FIELDS}
        if record.exc_info and record.exc_info[1] is not None:
            line["error"] = repr(record.exc_info[1])[:_MAX_LOG_TEXT]
        return json.dumps(line, default=str, ensure_ascii=False)


def _log_json(level: str) -> None:
    """Write records of this level and above to stderr, one JSON object per line."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    commands = parser(words)
    arguments = commands.parse_args(words)
    if arguments.command is None:
        commands.print_help()
        return 2
    if arguments.command == "smoke":
        from agent.commands import gpu_load_check

        return gpu_load_check.run(arguments)
    restarted, began_s = driver_lifecycle.was_restarted(os.environ), time.monotonic()
    try:
        if arguments.command == "top":
            from agent.commands import top_command

            return top_command.run(arguments)
        flags = {name: getattr(arguments, name) for name in settings.names() if getattr(arguments, name) is not None}
        chosen = settings.load(arguments.config, os.environ, flags)
        if arguments.print_config:
            print(settings.render(chosen), end="")
            return 0
        if arguments.once:
            return _once(chosen)
        return _run(chosen, watch=arguments.watch, restarted=restarted)
    except (SettingsError, FileFault) as error:
        print(for_terminal(f"gputally agent: {error}"), file=sys.stderr)
        return 2
    except DriverReplaced as error:
        print(for_terminal(f"gputally agent: {error}"), file=sys.stderr)
        if not restarted or time.monotonic() - began_s > driver_lifecycle.SETTLED_S:
            driver_lifecycle.restart()
        return 0
    except ClockSetBack as error:
        print(f"gputally agent: {error}", file=sys.stderr)
        driver_lifecycle.restart()
    except AgentError as error:
        print(for_terminal(f"gputally agent: {error}"), file=sys.stderr)
        return 1


def parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of the command line.

    words: the command line. If it begins with `run`, the parser contains only that command, so that the daemon does not
        import the libraries of the other commands."""
    whole = argparse.ArgumentParser(prog="gputally agent", description="Meters the GPUs of one machine.")
    whole.add_argument("--version", action="version", version=f"gputally agent {_version()}")
    commands = whole.add_subparsers(dest="command", metavar="COMMAND")
    run = commands.add_parser("run", help="meter until stopped", description="Meter, spool and upload until stopped.")
    run.add_argument("--config", type=Path, metavar="FILE", help="Settings file (YAML).")
    run.add_argument("--print-config", action="store_true", help="Print the settings in force and exit.")
    run.add_argument("--watch", action="store_true", help="Show a live table of the GPUs while metering.")
    run.add_argument("--once", action="store_true", help="Print the table once and exit, without metering.")
    run.add_argument("--version", action="version", version=f"gputally agent {_version()}")
    for name in settings.names():
        text = settings.description(name).replace("%", "%%")
        if settings.is_switch(name):
            run.add_argument(settings.flag(name), dest=name, action="store_true", default=None, help=text)
        else:
            run.add_argument(settings.flag(name), dest=name, metavar=settings.metavar(name), help=text)
    if words[:1] != ["run"]:
        from agent.commands import gpu_load_check, top_command

        top_command.add_parser(commands)
        gpu_load_check.add_parser(commands)
    return whole


def _version() -> str:
    from importlib.metadata import version

    return version("gputally")


def _run(chosen: Settings, *, watch: bool, restarted: bool) -> int:
    from agent.metrics.exporter import AgentMetrics, Exposition

    _log_json("ERROR" if watch else chosen.log_level.upper())
    clock = SteadyClock(SystemClock())
    node = chosen.node_name(os.environ)
    with ExitStack() as stack:
        tasks = BackgroundTasks(clock, (AgentError,))
        outbox = Outbox(
            chosen.spool_path(os.environ, root=os.geteuid() == 0),
            clock,
            chosen.spool_max_mib * _MIB,
            chosen.spool_max_days * MS_PER_DAY,
            patient=True,
        )
        stack.callback(outbox.close)
        source = _source(chosen, node, clock, tasks, restarted=restarted)
        stack.callback(source.close)
        uploader = _uploader(chosen, outbox, node, clock)
        stack.callback(uploader.close)
        dcgm_output = None
        if chosen.dcgm_names:
            from agent.metrics.dcgm_compat import DcgmOutput

            dcgm_output = DcgmOutput(node)
        metrics = AgentMetrics(node, _version(), dcgm_output, tasks)
        show: Callable[[Snapshot], None] | None = None
        if watch:
            from agent.commands.top_command import LiveTable, from_snapshot

            table = stack.enter_context(LiveTable())
            show = lambda snapshot: table.draw(from_snapshot(snapshot))  # noqa: E731
        agent = Agent(chosen, source, outbox, uploader, clock, metrics=metrics, on_sample=show, tasks=tasks)
        exposition = Exposition(chosen.listen, chosen.port, metrics.exposition, agent.alive, tasks)
        stack.callback(exposition.close)
        log.info("agent started", extra={"node": node, "port": exposition.port, "outbox": str(outbox.path)})
        stop = threading.Event()
        set_on_signals(stop)
        agent.run(stop)
    return 0


def _once(chosen: Settings) -> int:
    from agent.commands.top_command import from_snapshot, print_once

    _log_json("ERROR")
    clock = SystemClock()
    source = _source(chosen, chosen.node_name(os.environ), clock, BackgroundTasks(clock))
    try:
        return print_once(lambda: from_snapshot(source.snapshot(clock.wall_ms())), clock)
    finally:
        source.close()


def _source(chosen: Settings, node: str, clock: Clock, tasks: BackgroundTasks, *, restarted: bool = False) -> Source:
    """Return the source of readings: a simulated node or this machine.

    Raises FileFault for a scenario or pods file that is invalid or cannot be read, and SettingsError if this machine
    has no kubelet and the settings name no other source of holders, or for an address that cannot be used."""
    if chosen.simulated:
        from agent.simulation.scenario_file import load_scenario

        return load_scenario(Path(chosen.simulated), node, clock.wall_ms())
    from agent.devices.driver_lifecycle import Gpus
    from agent.devices.nvml_device import Access
    from agent.devices.nvml_library import Driver
    from agent.holders.node_reader import NodeSource
    from agent.holders.pod_and_job_files import HpcJobs, PodsFile
    from agent.holders.process_cgroups import PodLogs, ProcessTable

    gpus = Gpus(
        Driver(),
        Path(chosen.release_file) if chosen.release_file else None,
        access=Access(processes=chosen.sees_processes, enable_accounting=chosen.accounting),
        restarted=restarted,
        clock=SystemClock(),  # the driver's times are the system clock's
    )
    if chosen.on_kubernetes:
        from agent.holders.kubernetes_source import kubernetes_source
        from agent.holders.lean_list_watch import BOUND_PODS_FILE, BoundPods

        spool = chosen.spool_path(os.environ, root=os.geteuid() == 0)
        bound = BoundPods(spool.with_name(BOUND_PODS_FILE))
        source = kubernetes_source(chosen, node, gpus, clock, os.environ, bound, tasks)
        level = chosen.privilege
        log.info("privileges", extra={"privilege": level, "cannot_see": settings.privilege_text(level)})
        return _with_signal_and_dcgm(source, gpus, chosen, clock, tasks)
    pods: PodsFile | HpcJobs | None = PodsFile(Path(chosen.pods), node) if chosen.pods else None
    if chosen.hpc_jobs:
        pods = HpcJobs(Path(chosen.hpc_jobs))
    logs_of_pods = PodLogs(Path(chosen.pod_logs))
    processes = ProcessTable(Path(chosen.proc))
    source = NodeSource(gpus, processes, pods, logs_of_pods, node, clock)
    return _with_signal_and_dcgm(source, gpus, chosen, clock, tasks)


def _with_signal_and_dcgm(source: Source, gpus: Gpus, chosen: Settings, clock: Clock, tasks: BackgroundTasks) -> Source:
    """Return a source around `source` that closes the driver at SIGUSR1 and, if a dcgm-exporter is configured, adds the
    exporter's figures.

    Raises SettingsError for an exporter's address that is not http://."""
    from agent.devices.driver_lifecycle import ReleasableSource

    releasable = ReleasableSource(source, gpus, clock, chosen.release_s)
    signal.signal(signal.SIGUSR1, lambda *_: releasable.close_driver())
    if not chosen.dcgm_url:
        return releasable
    from agent.devices.dcgm_exporter import Exporter, WithDcgm, fetch_from

    exporter = Exporter(fetch_from(chosen.dcgm_url), clock)
    exporter.start(tasks)
    return WithDcgm(releasable, exporter)


def _uploader(chosen: Settings, outbox: Outbox, node: str, clock: Clock) -> Uploader:
    return Uploader(
        outbox,
        chosen.url,
        chosen.cluster,
        node,
        _boot_id(chosen.proc),
        Path(chosen.token_file) if chosen.token_file else None,
        clock,
        ca_file=Path(chosen.ca_file) if chosen.ca_file else None,
        identity=Identity(Path(chosen.client_cert), Path(chosen.client_key)) if chosen.client_cert else None,
        max_rows=chosen.batch_rows,
        max_bytes=chosen.batch_kib * 1024,
        timeout_s=chosen.timeout_s,
    )


def _boot_id(proc: str) -> str:
    """Return the kernel's id of this boot; "" if it cannot be read."""
    try:
        return (Path(proc) / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


if __name__ == "__main__":
    sys.exit(main())
