"""Creates the agent's parts from its settings and runs them until a signal arrives.

The agent logs one JSON object per line. The functions of single commands import the libraries that only they need."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

from agent.core import settings
from agent.core.lean_http_client import ClientCertificate
from agent.core.readings import NodeSnapshot, Source
from agent.core.settings import AgentSettings, comma_separated
from agent.core.steady_clock import SteadyClock
from agent.main_loop import Agent
from agent.metrics.exporter import AgentMetrics, Exposition
from agent.upload.spool import Outbox
from agent.upload.uploader import Uploader
from gputally.base.background_tasks import BackgroundTasks, set_on_signals
from gputally.base.clock import Clock, SystemClock
from gputally.base.errors import AgentError
from gputally.base.host_names import KnownHosts
from gputally.base.units import MS_PER_DAY
from gputally.base.version import __version__

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


def run(chosen: AgentSettings, *, watch: bool, restarted: bool) -> int:
    """Meter until a signal arrives, and return the exit code.

    watch: shows a live table meanwhile.
    restarted: this process replaced itself after the driver or the clock had changed."""
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
        metrics = AgentMetrics(node, __version__, dcgm_output, tasks)
        show: Callable[[NodeSnapshot], None] | None = None
        if watch:
            from agent.commands.top_command import LiveTable, from_snapshot

            table = stack.enter_context(LiveTable())
            show = lambda snapshot: table.draw(from_snapshot(snapshot))  # noqa: E731
        agent = Agent(chosen, source, outbox, uploader, clock, metrics=metrics, on_sample=show, tasks=tasks)
        hosts = KnownHosts((*comma_separated(chosen.hosts), node, socket.gethostname()), socket.getfqdn)
        exposition = Exposition(chosen.listen, chosen.port, metrics.exposition, agent.alive, tasks, hosts)
        stack.callback(exposition.close)
        log.info("agent started", extra={"node": node, "port": exposition.port, "outbox": str(outbox.path)})
        stop = threading.Event()
        set_on_signals(stop)
        agent.run(stop)
    return 0


def once(chosen: AgentSettings) -> int:
    """Print the table of the GPUs once, without metering, and return the exit code."""
    from agent.commands.top_command import from_snapshot, print_once

    _log_json("ERROR")
    clock = SystemClock()
    source = _source(chosen, chosen.node_name(os.environ), clock, BackgroundTasks(clock))
    try:
        return print_once(lambda: from_snapshot(source.snapshot(clock.wall_ms())), clock)
    finally:
        source.close()


def _source(
    chosen: AgentSettings, node: str, clock: Clock, tasks: BackgroundTasks, *, restarted: bool = False
) -> Source:
    """Return the source of readings: a simulated node or this machine.

    At SIGUSR1 the source closes the driver for some time.

    Raises FileFault for a scenario or pods file that is invalid or cannot be read, and SettingsError if this machine
    has no kubelet and the settings name no other source of holders, or for a reader or an address that cannot be
    used."""
    if chosen.simulated:
        from agent.simulation.scenario_file import load_scenario

        return load_scenario(Path(chosen.simulated), node, clock.wall_ms())
    from agent.gpu_readers.chosen import open_readers
    from agent.gpu_readers.protocol import Surroundings
    from agent.gpu_readers.release_by_signal import ReleasableSource
    from agent.holders.chosen import open_holders
    from agent.holders.process_cgroups import PodLogs, ProcessTable
    from agent.holders.protocol import NodeSurroundings
    from agent.node_reader import NodeSource

    surroundings = Surroundings(
        clock,
        tasks,
        chosen.sees_processes,
        chosen.accounting,
        Path(chosen.release_file) if chosen.release_file else None,
        restarted,
    )
    gpus = open_readers(chosen.gpu_readers, surroundings)
    logs = PodLogs(Path(chosen.pod_logs))
    name, holders = open_holders(chosen.holders, NodeSurroundings(node, clock, tasks, chosen, os.environ, gpus, logs))
    if chosen.on_kubernetes:
        level = chosen.privilege
        log.info("privileges", extra={"privilege": level, "cannot_see": settings.privilege_text(level)})
    processes = ProcessTable(Path(chosen.proc)) if chosen.sees_processes else None
    source = NodeSource(gpus, processes, holders, logs, node, clock, chosen.sharing_systems, name)
    releasable = ReleasableSource(source, gpus, clock, chosen.release_s)
    signal.signal(signal.SIGUSR1, lambda *_: releasable.close_driver())
    return releasable


def _uploader(chosen: AgentSettings, outbox: Outbox, node: str, clock: Clock) -> Uploader:
    return Uploader(
        outbox,
        chosen.url,
        chosen.cluster,
        node,
        _boot_id(chosen.proc),
        Path(chosen.token_file) if chosen.token_file else None,
        clock,
        ca_file=Path(chosen.ca_file) if chosen.ca_file else None,
        identity=ClientCertificate(Path(chosen.client_cert), Path(chosen.client_key)) if chosen.client_cert else None,
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
