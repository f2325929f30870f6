"""The cost of the whole installation in quiet operation: 1,000 GPUs metered, booked and weighed.

In real time: one real agent on eight simulated GPUs; the accountant, to which 124 further nodes send eight rows a
minute; and the controller, enforcing, on a real API server with nodes, KAI's queues and pod groups. Each is a process
of its own whose metrics page is read every half minute; /proc gives its figures. The goals are the chart's requests."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import yaml

from agent.wire import Batch
from fairshare.schedulers.kai.kinds import POD_GROUP, QUEUE, SHARD
from gputally.kubernetes.objects import GPU, NODE, Object
from tests.bench import load
from tests.bench.figure import Figure, Goal
from tests.bench.service import Spent, accountant, post, program
from tests.deadlines import patience_s
from tests.fairshare.real_api_server import served, standing
from tests.fairshare.scheduler_kinds import KINDS
from tests.real.programs import free_ports

GPUS, MINUTE_S, SCRAPE_S = 8, 60, 30
CHART = Path(__file__).parents[2] / "helm" / "gputally" / "values.yaml"
SAMPLE = Path(__file__).parents[2] / "fairshare" / "samples" / "cluster.yaml"


@dataclass(frozen=True)
class Size:
    """warm_s: seconds before the measurement. api_server: use a real one; without it the controller works on a file."""

    nodes: int = 125
    warm_s: float = 90
    seconds: float = 300
    groups: int = 200
    api_server: bool = True


FULL = Size()
TINY = Size(nodes=2, warm_s=0.5, seconds=1, groups=0, api_server=False)


def measure(size: Size = FULL) -> list[Figure]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        books = stack.enter_context(accountant(folder / "ledger"))
        ports = free_ports(2)
        agent = stack.enter_context(_agent(folder, books.url, ports[0]))
        controller = stack.enter_context(_controller(folder, books.url, ports[1], size))
        pages = [f"{books.url}/metrics", *(f"http://127.0.0.1:{port}/metrics" for port in ports)]
        done = threading.Event()
        stack.enter_context(_thread(lambda: _send(books.url, size.nodes - 1, done), done))
        stack.enter_context(_thread(lambda: _scrape(pages, done), done))
        programs = {"agent": agent, "accountant": books, "fairshare": controller}
        time.sleep(size.warm_s)
        before = {name: program.cpu_s() for name, program in programs.items()}
        began = time.monotonic()
        time.sleep(size.seconds)
        hours = (time.monotonic() - began) / 3_600
        found = []
        for name, program in programs.items():
            cpu, memory = (program.cpu_s() - before[name]) / hours, program.resident_mib()
            asked = requests(name)
            found += [
                Figure(f"{name}: processor, {size.nodes * GPUS:,} GPUs", max(cpu, 1e-3), "s/h", goal=Goal(asked[0])),
                Figure(f"{name}: memory", memory, "MiB", goal=Goal(asked[1]), memory_mib=program.peak_mib()),
            ]
        return found


def requests(program: str) -> tuple[float, float]:
    """Return the chart's requests: CPU seconds an hour, MiB."""
    asked = yaml.safe_load(CHART.read_text(encoding="utf-8"))[program]["resources"]["requests"]
    return int(asked["cpu"].removesuffix("m")) * 3.6, float(asked["memory"].removesuffix("Mi"))


@contextlib.contextmanager
def _agent(folder: Path, url: str, port: int) -> Iterator[Spent]:
    held = [{"gpu": gpu, "namespace": "ns-0", "pod": f"p{gpu}", "utilisation_ppm": 800_000} for gpu in range(GPUS - 1)]
    scenario = {"gpus": [{"model": "H100"}] * GPUS, "events": [{"after_ms": 0, "place": place} for place in held]}
    (folder / "scenario.yaml").write_text(yaml.safe_dump(scenario), encoding="utf-8")
    flags = ["--simulated", str(folder / "scenario.yaml"), "--cluster", "bench", "--node", "node-0", "--url", url]
    command = ["agent", "run", *flags, "--spool", str(folder / "spool"), "--port", str(port), "--listen", "127.0.0.1"]
    with program(f"http://127.0.0.1:{port}/livez", *command) as spent:
        yield spent


@contextlib.contextmanager
def _controller(folder: Path, url: str, port: int, size: Size) -> Iterator[Spent]:
    policy = load.policy().model_dump(mode="json", by_alias=True, exclude_defaults=True)
    policy["targets"] = {"kai": {"apply": "enforce"}}
    (folder / "policy.yaml").write_text(yaml.safe_dump(policy), encoding="utf-8")
    with contextlib.ExitStack() as stack:
        where = ["--objects", str(SAMPLE)]
        if size.api_server:
            server = stack.enter_context(served(Path(stack.enter_context(tempfile.TemporaryDirectory()))))
            server.request("POST", "/api/v1/namespaces", {"metadata": {"name": "gputally"}})
            stack.enter_context(standing(server, list(_objects(size)), KINDS))
            where = ["--kubeconfig", str(server.kubeconfig)]
        flags = ["--policy", str(folder / "policy.yaml"), "--url", url, "--listen", f"127.0.0.1:{port}"]
        command = ["fairshare", "run", *flags, *where, "--log-level", "error"]
        yield stack.enter_context(program(f"http://127.0.0.1:{port}/livez", *command))


def _objects(size: Size) -> Iterator[Object]:
    yield {"apiVersion": SHARD.api_version, "kind": SHARD.kind, "metadata": {"name": "default"}, "spec": {"kValue": 0}}
    for number in range(load.QUEUES):
        gpu = {"quota": 10, "limit": -1, "overQuotaWeight": 1}
        yield {
            "apiVersion": QUEUE.api_version, "kind": QUEUE.kind, "metadata": {"name": f"queue-{number}"},
            "spec": {"resources": {"gpu": gpu}},
            "status": {"requested": {GPU: "96"}, "allocated": {GPU: str(40 + number)}},
        }  # fmt: skip
    ready = {"conditions": [{"type": "Ready", "status": "True"}], "allocatable": {GPU: str(GPUS)}}
    for number in range(size.nodes):
        yield {"apiVersion": "v1", "kind": NODE.kind, "metadata": {"name": f"node-{number}"}, "status": ready}
    for number in range(size.groups):
        yield {
            "apiVersion": POD_GROUP.api_version, "kind": POD_GROUP.kind,
            "metadata": {"name": f"gang-{number}", "namespace": f"ns-{number % load.QUEUES}"},
            "spec": {"queue": f"queue-{number % load.QUEUES}", "minMember": 4},
        }  # fmt: skip


def _page(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=patience_s(10)) as answer:
        found: bytes = answer.read()
    return found


@contextlib.contextmanager
def _thread(target: Callable[[], None], done: threading.Event) -> Iterator[None]:
    thread = threading.Thread(target=target)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _scrape(pages: list[str], done: threading.Event) -> None:
    while not done.wait(SCRAPE_S):
        for url in pages:
            _page(url)


def _send(url: str, nodes: int, done: threading.Event) -> None:
    """Send what `nodes` agents send: a batch a minute each, spread over the minute, over a connection each."""
    place = urlsplit(url)

    def send(line: http.client.HTTPConnection, batch: Batch) -> None:
        post(line, "POST", "/v1/usage", gzip.compress(msgspec.json.encode(batch), compresslevel=1), "gzip")

    first_ms = (int(time.time()) // MINUTE_S - 1) * MINUTE_S * 1_000
    lines = [http.client.HTTPConnection(str(place.hostname), place.port, timeout=patience_s(30)) for _ in range(nodes)]
    rows = [load.batches(f"node-{number + 1}", GPUS, 10_000, 1, first_ms) for number in range(nodes)]
    send(lines[0], load.facts())
    pause = MINUTE_S / nodes
    due = time.monotonic()
    while True:
        for line, batches in zip(lines, rows, strict=True):
            send(line, next(batches))
            due += pause
            if done.wait(max(0.0, due - time.monotonic())):
                for each in lines:
                    each.close()
                return
