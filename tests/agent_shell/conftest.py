"""What the agent's shell is tested with: a virtual clock, outboxes, a scripted accountant, a fake NVML."""

from __future__ import annotations

import gzip
import logging
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.core.settings import Settings
from agent.main_loop import Agent
from agent.metering.meter import ClosedSet
from agent.simulation.simulated_node import H100, SimulatedNode, SimulatedSource, make_gpu
from agent.upload.spool import Outbox
from agent.upload.uploader import Uploader
from agent.wire import PROBLEM, Ack, Batch, PodFacts, UsageInterval
from gputally.base.clock import VirtualClock
from gputally.base.units import MS_PER_DAY
from tests.agent_shell.loops import Flaky
from tests.fakes.compiled import compiled
from tests.fakes.http_server import Handler, LoopbackServer
from tests.fakes.nvml.library import FakeNvml, build, loaded

T0 = 1_790_812_800_000  # 2026-10-01T00:00:00Z


@pytest.fixture(autouse=True)
def log_as_it_was() -> Iterator[None]:
    """A command sets up the log of its process; the next test's is the same."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(T0)


def make_row(start_ms: int = T0, gpu: str = "GPU-a", part: int = 60_000_000, span_ms: int = 60_000) -> UsageInterval:
    return UsageInterval(
        seq=0,
        start_ms=start_ms,
        end_ms=start_ms + span_ms,
        gpu_uuid=gpu,
        gpu_model="NVIDIA H200",
        capacity_us=part,
        allocated_us=0,
        busy_us=0,
        method="device",
    )


def make_set(start_ms: int = T0, rows: int = 1, gpu: str = "GPU-a") -> ClosedSet:
    return ClosedSet(tuple(make_row(start_ms, gpu, 60_000_000 // rows) for _ in range(rows)))


def make_facts(uid: str, observed_ms: int = T0, **fields: Any) -> PodFacts:
    return PodFacts(seq=0, uid=uid, namespace="vision", name=f"pod-{uid}", node="n1", observed_ms=observed_ms, **fields)


@pytest.fixture
def sets() -> Callable[..., ClosedSet]:
    return make_set


@pytest.fixture
def facts() -> Callable[..., PodFacts]:
    return make_facts


@pytest.fixture
def open_outbox(tmp_path: Path, clock: VirtualClock) -> Iterator[Callable[..., Outbox]]:
    """Opens the test's outbox; everything opened is closed at the end."""
    opened: list[Outbox] = []

    def open_(name: str = "outbox.sqlite", **options: Any) -> Outbox:
        opened.append(Outbox(tmp_path / name, clock, fsync=False, **options))
        return opened[-1]

    yield open_
    for outbox in opened:
        outbox.close()


@dataclass
class Reply:
    """One scripted answer; body bytes as they are, anything else as JSON."""

    status: int
    body: Any = b""
    headers: dict[str, str] = field(default_factory=dict)


def problem(status: int, slug: str, **members: Any) -> Reply:
    return Reply(status, {"type": PROBLEM + slug, "title": slug, "status": status, "detail": slug, **members})


def ack(batch: Batch, durable: int | None = None, checkpointed: int = 0, archived: int | None = None) -> Reply:
    """Takes the batch: everything up to its last number, unless told otherwise."""
    last = max(r.seq for r in (*batch.intervals, *batch.facts, *batch.skipped))
    return Reply(
        200,
        Ack(
            epoch=batch.epoch,
            durable_seq=last if durable is None else durable,
            checkpointed_seq=checkpointed,
            archived_seq=archived,
        ),
    )


class ScriptedAccountant:
    """A real HTTP server on the loopback that answers each batch with what `script` says."""

    def __init__(self) -> None:
        self.script: Callable[[Batch], Reply] = ack
        self.batches: list[Batch] = []
        self.headers: list[dict[str, str]] = []
        self.connections: set[tuple[str, int]] = set()
        self.hang_up = False
        outer = self

        class Batches(Handler):
            protocol_version = "HTTP/1.1"
            timeout = 10
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                batch = msgspec.json.decode(gzip.decompress(self.content()), type=Batch)
                outer.batches.append(batch)
                outer.headers.append({**dict(self.headers), "path": self.path})
                outer.connections.add(self.client_address)
                reply = outer.script(batch)
                body = reply.body if isinstance(reply.body, bytes) else msgspec.json.encode(reply.body)
                self.say(reply.status, body, **reply.headers)
                if outer.hang_up:
                    self.close_connection = True

        self._server = LoopbackServer(Batches)
        self.url = self._server.url

    def start_tls(self, certificate: Path, key: Path, client_ca: Path | None = None) -> str:
        """Speak TLS from now on; returns the url under the certificate's name. client_ca: clients have to show a
        certificate of this authority."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        if client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(client_ca)
        return self._server.speak_tls(context)

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def accountant() -> Iterator[ScriptedAccountant]:
    server = ScriptedAccountant()
    yield server
    server.close()


@pytest.fixture
def refuse() -> Callable[..., Reply]:
    return problem


@pytest.fixture
def reply() -> type[Reply]:
    return Reply


@pytest.fixture
def accept() -> Callable[..., Reply]:
    return ack


@pytest.fixture(scope="session")
def fake_nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(build, tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def fake_nvml(fake_nvml_library: Path, tmp_path: Path) -> Iterator[FakeNvml]:
    """The real binding on the fake library."""
    with loaded(fake_nvml_library, tmp_path) as fake:
        yield fake


@pytest.fixture
def proc(tmp_path: Path) -> Callable[..., Path]:
    """Adds a process to a fake process table and returns the table's root."""
    root = tmp_path / "proc"
    root.mkdir()

    def add(pid: int, cgroup: str = "0::/user.slice", comm: str = "python", start: int = 1000, uid: int = 4242) -> Path:
        folder = root / str(pid)
        folder.mkdir(exist_ok=True)
        fields = ["S", *["0"] * 18, str(start), *["0"] * 10]  # field 3 on; field 22 is the start time
        (folder / "stat").write_text(f"{pid} (odd) name ({comm})) {' '.join(fields)}\n")
        (folder / "cgroup").write_text(cgroup + "\n")
        (folder / "comm").write_text(comm + "\n")
        (folder / "status").write_text(f"Name:\t{comm}\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n")
        return root

    return add


@pytest.fixture
def outbox(open_outbox: Callable[..., Outbox]) -> Outbox:
    return open_outbox()


@pytest.fixture
def uploader(outbox: Outbox, accountant: Any, clock: VirtualClock) -> Iterator[Callable[..., Uploader]]:
    made: list[Uploader] = []

    def make(token_file: Path | None = None, **options: Any) -> Uploader:
        options = {"timeout_s": 5.0, "jitter": lambda: 1.0, "url": accountant.url, **options}
        url = options.pop("url")
        made.append(Uploader(outbox, url, "c1", "n1", "boot-1", token_file, clock, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def node() -> SimulatedNode:
    return SimulatedNode("n1", [make_gpu("GPU-a", 0, H100)], start_ms=T0)


@pytest.fixture
def agent_of(
    node: SimulatedNode, clock: VirtualClock, open_outbox: Callable[..., Outbox], accountant: Any
) -> Iterator[Callable[..., tuple[Agent, Flaky, Any]]]:
    uploaders: list[Uploader] = []

    def make(boot_id: str = "boot-1", wrap: Any = lambda o: o, max_age_ms: int = MS_PER_DAY, **options: Any) -> Any:
        source = Flaky(SimulatedSource(node))
        outbox = wrap(open_outbox(max_age_ms=max_age_ms))
        uploaders.append(Uploader(outbox, accountant.url, "c1", "n1", boot_id, None, clock, jitter=lambda: 1.0))
        return Agent(Settings(node="n1"), source, outbox, uploaders[-1], clock, **options), source, outbox

    yield make
    for uploader in uploaders:
        uploader.close()
