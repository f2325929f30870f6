"""Keeps the counters of closed intervals and serves `/metrics`, `/livez` and `/readyz`.

Counters are sums of closed rows, so pods plus unattributed add up to the device, as in the ledger. They start at zero
with the process, as Prometheus expects. Gauges come from the last snapshot. A scrape reads no device. The series of a
holder that has ended stay for two scrapes after the last value, or for ten minutes without a scrape.

The server handles at most four requests at a time, five seconds each, and closes further connections. Other paths get
404, and other host names 421. It never blocks the sampling thread."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

from agent.core.readings import NodeSnapshot, Unavailable
from agent.metering.meter import ClosedSet
from agent.metrics import metric_families
from agent.metrics.metric_families import DeviceTotals, Family, Operations, Place, PodKey, TextFormat, names
from agent.wire import Holder, PodFacts, UsageInterval
from gputally.base.background_tasks import BackgroundTask, BackgroundTasks
from gputally.base.errors import AgentError
from gputally.base.host_names import PRIVATE_HOSTS, KnownHosts, refusal
from gputally.base.units import MS_PER_MINUTE

log = logging.getLogger("agent.metrics.exporter")

SCRAPES_AFTER_END = 2
"""Number of scrapes that contain the series of a former holder, so that Prometheus gets the last value even if one
scrape fails."""
UNSCRAPED_MS = 10 * MS_PER_MINUTE
"""How long the series of a former holder stay without a scrape. Without this limit, memory would grow with every past
holder."""


class CompatibleOutput(Protocol):
    """The figures under another exporter's names, for existing dashboards."""

    def observe(self, snapshot: NodeSnapshot, sets: Sequence[ClosedSet]) -> None:
        """Take a snapshot and the sets that closed with it."""

    def collect(self) -> Iterable[Family]:
        """Return the families of one scrape."""


class AgentMetrics:
    """The agent's metrics. One thread may update them while others scrape them.

    compatible: exports the figures under another exporter's names too; None does not.
    tasks: the agent's background tasks, whose state is exported too; None if there are none."""

    def __init__(
        self, node: str, version: str, compatible: CompatibleOutput | None = None, tasks: BackgroundTasks | None = None
    ) -> None:
        self._tasks = tasks
        self._node = node
        self._version = version
        self._lock = threading.Lock()
        self._text = TextFormat()
        self._snapshot = NodeSnapshot(0, (), Unavailable("not read yet"))
        self._operations = Operations()
        self._devices: dict[str, DeviceTotals] = {}
        self._pods: dict[PodKey, DeviceTotals] = {}
        self._newest: dict[Place, PodKey] = {}
        self._facts: dict[str, PodFacts] = {}
        self._gone: dict[PodKey | tuple[str, str], tuple[int, int]] = {}
        """(time, number of scrapes since then) of each series whose pod or GPU is gone."""
        self._instances: dict[tuple[str, int, int], str] = {}
        """The uuids of the MIG instances by (GPU uuid, GPU instance, compute instance)."""
        self._retired_ms = 0
        self._compatible = compatible

    def observe(self, snapshot: NodeSnapshot, sets: Sequence[ClosedSet]) -> None:
        """Update from a snapshot and the sets that closed with it."""
        if self._compatible is not None:
            self._compatible.observe(snapshot, sets)
        with self._lock:
            for closed in sets:
                for row in closed.rows:
                    self._add(row)
            # The rows of a repartitioned device are those of its former instances, so add the new instances afterwards.
            for device in snapshot.devices:
                for instance in device.gpu.mig:
                    self._instances[device.gpu.uuid, instance.gi, instance.ci] = instance.uuid
            self._snapshot = snapshot
            self._facts.update({facts.uid: facts for facts in snapshot.facts})
            if snapshot.at_ms - self._retired_ms >= MS_PER_MINUTE:
                self._retired_ms = snapshot.at_ms
                self._retire(scraped=0)

    def operate(self, operations: Operations) -> None:
        """Set the state of the agent itself."""
        with self._lock:
            self._operations = operations

    def exposition(self) -> bytes:
        """Return one scrape in the Prometheus text format."""
        return self._text.render(self.collect())

    def collect(self) -> Iterable[Family]:
        """Return the families of one scrape."""
        with self._lock:
            families = [
                *metric_families.of_devices(self._snapshot, self._devices, self._node),
                *metric_families.of_pods(self._snapshot, self._pods, self._newest, self._facts.values()),
                *metric_families.of_the_agent(self._operations, self._version, self._node),
                *(metric_families.of_tasks(self._tasks.states()) if self._tasks is not None else ()),
            ]
            self._retire(scraped=1)
        return families if self._compatible is None else [*families, *self._compatible.collect()]

    def _add(self, row: UsageInterval) -> None:
        self._devices.setdefault(row.gpu_uuid, DeviceTotals()).add_device(row)
        self._gone.pop(("gpu", row.gpu_uuid), None)
        if row.holder is None or row.holder.kind == "unattributed":
            return
        mig = self._instances.get((row.gpu_uuid, row.slice.gi, row.slice.ci), "") if row.slice else ""
        key = self._key(row, row.holder, mig)
        self._pods.setdefault(key, DeviceTotals()).add(row)
        self._newest[key[:5]] = key
        self._gone.pop(key, None)

    def _key(self, row: UsageInterval, holder: Holder, mig_uuid: str) -> PodKey:
        """Return the labels of a row. A row without busy time has no method of its own and gets the holder's last
        method."""
        place, sharing = (row.gpu_uuid, mig_uuid, *names(holder)), row.sharing.mode if row.sharing else ""
        last = self._newest.get(place)
        if row.busy_us is None and last is not None and last[5] == sharing:
            return last
        return (*place, sharing, row.method)

    def _retire(self, scraped: int) -> None:
        """Remove the series of former pods and GPUs that were exported long enough. While the holders are unknown,
        remove none.

        scraped: 1 if this is a scrape, else 0."""
        if isinstance(self._snapshot.allocations, Unavailable):
            return
        holders = {(a.gpu_uuid, a.mig_uuid, *names(a.holder)) for a in self._snapshot.allocations}
        for key in [key for key in self._pods if key[:5] not in holders and self._is_expired(key, scraped)]:
            del self._pods[key]
            if self._newest.get(key[:5]) == key:
                del self._newest[key[:5]]
        uids = {a.holder.uid for a in self._snapshot.allocations}
        for uid in list(self._facts):
            if uid in uids:
                self._gone.pop(("pod", uid), None)
            elif self._is_expired(("pod", uid), scraped):
                del self._facts[uid]
        listed = {device.gpu.uuid for device in self._snapshot.devices}
        for uuid in [uuid for uuid in self._devices if uuid not in listed and self._is_expired(("gpu", uuid), scraped)]:
            del self._devices[uuid]

    def _is_expired(self, key: PodKey | tuple[str, str], scraped: int) -> bool:
        """Return True if the series of a former pod or GPU was exported long enough. If not, add `scraped` to its
        number of scrapes."""
        at_ms = self._snapshot.at_ms
        since_ms, scrapes = self._gone.pop(key, (at_ms, 0))
        if scrapes + scraped >= SCRAPES_AFTER_END or at_ms - since_ms >= UNSCRAPED_MS:
            return True
        self._gone[key] = since_ms, scrapes + scraped
        return False


MAX_REQUESTS = 4
TIMEOUT_S = 5.0


class PortUnavailable(AgentError):
    """The metrics port cannot be opened."""


class Exposition:
    """The HTTP server of the metrics and the probes. It runs until `close`. Raises PortUnavailable.

    text: returns one scrape.
    alive: returns False if sampling hangs; then /livez fails.
    tasks: the background tasks whose faults make /readyz fail, and in which the server's own thread is entered.
    hosts: the host names under which the server answers."""

    def __init__(
        self,
        host: str,
        port: int,
        text: Callable[[], bytes],
        alive: Callable[[], bool],
        tasks: BackgroundTasks,
        hosts: KnownHosts = PRIVATE_HOSTS,
    ) -> None:
        self._task = tasks.add("metrics")
        try:
            self._server = _Server((host, port), text, alive, tasks, self._task, hosts)
        except OSError as error:
            raise PortUnavailable(
                f"metrics port {host}:{port} cannot be opened: {error.strerror}; choose another with --listen or --port"
            ) from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        self._task.watch(self._thread)

    def close(self) -> None:
        self._task.end()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def __init__(
        self,
        address: tuple[str, int],
        text: Callable[[], bytes],
        alive: Callable[[], bool],
        tasks: BackgroundTasks,
        task: BackgroundTask,
        hosts: KnownHosts,
    ) -> None:
        super().__init__(address, _Handler)
        self.text, self.alive, self.tasks, self.hosts = text, alive, tasks, hosts
        self._slots = threading.BoundedSemaphore(MAX_REQUESTS)
        self._task = task

    def service_actions(self) -> None:
        """Report progress of the server's thread. The library calls this method at least twice a second."""
        self._task.progress()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the library's signature
        """Ignore a client that disconnected; log any other error as a defect."""
        error = sys.exception()
        if isinstance(error, Exception) and not isinstance(error, OSError):
            self._task.fail(error)
            log.error("a request to the metrics port failed", exc_info=error)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = TIMEOUT_S
    server_version = "gputally-agent"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if not self.server.hosts.knows(self.headers["Host"]):
            self._answer(421, "text/plain", refusal("hosts").encode())
        elif path == "/metrics":
            self._answer(200, metric_families.CONTENT_TYPE, self.server.text())
        elif path == "/livez":
            alive = self.server.alive()
            self._answer(200 if alive else 503, "text/plain", b"ok\n" if alive else b"sampling hangs\n")
        elif path == "/readyz":
            faults = "".join(f"{name}: {fault}\n" for name, fault in self.server.tasks.faults().items())
            self._answer(503 if faults else 200, "text/plain", (faults or "ok\n").encode())
        else:
            self._answer(404, "text/plain", b"not found; the paths are /metrics, /livez and /readyz\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
