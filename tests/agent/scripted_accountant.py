"""A scripted accountant, an uploader of an outbox, and a simulated node whose agent sends to the accountant on a
virtual clock."""

from __future__ import annotations

import gzip
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from agent.core.readings import Allocation, NodeSnapshot
from agent.core.settings import AgentSettings
from agent.main_loop import Agent
from agent.metering.meter import ClosedSet
from agent.simulation.simulated_node import H100, SimulatedNode, SimulatedSource, make_gpu
from agent.upload.spool import Outbox
from agent.upload.uploader import ShipResult, Uploader
from agent.wire import PROBLEM, Ack, Batch, Holder, PodFacts, UsageInterval
from gputally.base.clock import VirtualClock
from gputally.base.units import MS_PER_DAY
from gputally.testing.http_server import Handler, LoopbackServer
from tests.agent.sample_values import MINUTE, T0


@dataclass
class Reply:
    """One scripted answer. A body of bytes is sent as it is; any other body is encoded as JSON."""

    status: int
    body: Any = b""
    headers: dict[str, str] = field(default_factory=dict)


def refuse(status: int, slug: str, **members: Any) -> Reply:
    return Reply(status, {"type": PROBLEM + slug, "title": slug, "status": status, "detail": slug, **members})


def accept(batch: Batch, durable: int | None = None, checkpointed: int = 0, archived: int | None = None) -> Reply:
    """Acknowledge the batch up to its last number, unless the arguments give other numbers."""
    seqs = [r.seq for r in batch.intervals] + [r.seq for r in batch.facts] + [r.seq for r in batch.skipped]
    last = max(seqs, default=batch.first_seq - 1)
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
    """An HTTP server on the loopback that answers each batch as `script` says."""

    def __init__(self) -> None:
        self.script: Callable[[Batch], Reply] = accept
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
        """Serve TLS from now on, and return the URL with the name in the certificate. client_ca: clients have to
        present a certificate of this authority."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        if client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(client_ca)
        return self._server.speak_tls(context)

    def close(self) -> None:
        self._server.close()


class Shipping:
    """Creates uploaders and closes them after the test."""

    def __init__(self, outbox: Outbox, accountant: ScriptedAccountant, clock: VirtualClock) -> None:
        self.outbox = outbox
        self.accountant = accountant
        self.clock = clock
        self._made: list[Uploader] = []

    @property
    def batches(self) -> list[Batch]:
        return self.accountant.batches

    def append(self, *sets: ClosedSet, facts: Sequence[PodFacts] = ()) -> None:
        self.outbox.append(sets, facts, None)

    def reply(self, answer: Reply) -> None:
        """Answer every following batch with `answer`."""
        self.accountant.script = lambda batch: answer

    def refuse(self, status: int, slug: str, **members: Any) -> None:
        """Answer every following batch with this problem."""
        self.reply(refuse(status, slug, **members))

    def uploader(self, token_file: Path | None = None, **options: Any) -> Uploader:
        options = {"timeout_s": 5.0, "jitter": lambda: 1.0, "url": self.accountant.url, **options}
        url = options.pop("url")
        self._made.append(Uploader(self.outbox, url, "c1", "n1", "boot-1", token_file, self.clock, **options))
        return self._made[-1]

    def close(self) -> None:
        for uploader in self._made:
            uploader.close()


def drain(uploader: Uploader, steps: int = 200) -> list[ShipResult]:
    """Run the uploader until it has nothing to do without waiting."""
    results = []
    for _ in range(steps):
        results.append(uploader.ship())
        if not results[-1].progress:
            return results
    raise AssertionError(f"no end after {steps} steps: {results[-3:]}")


class Flaky:
    """A source in front of a simulated node that fails on demand."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.error: Exception | None = None
        self.closed = False

    def snapshot(self, at_ms: int) -> NodeSnapshot:
        if self.error is not None:
            raise self.error
        snapshot: NodeSnapshot = self.inner.snapshot(at_ms)
        return snapshot

    def close(self) -> None:
        self.closed = True


def place(node: SimulatedNode, uid: str, at_ms: int) -> None:
    facts = PodFacts(seq=0, uid=uid, namespace="vision", name=uid, node="n1", observed_ms=at_ms)
    holder = Holder(kind="pod", uid=uid, namespace="vision", name=uid, container="main")
    node.place(at_ms, Allocation("GPU-a", holder), 500_000, 1_000, facts)


class Site:
    """A node with its outbox and its current agent. `source` and `outbox` belong to the agent that started last."""

    agent: Agent
    source: Flaky
    outbox: Any

    def __init__(self, open_outbox: Callable[..., Outbox], accountant: ScriptedAccountant, clock: VirtualClock) -> None:
        self.node = SimulatedNode("n1", [make_gpu("GPU-a", 0, H100)], start_ms=T0)
        self.accountant = accountant
        self.clock = clock
        self._open_outbox = open_outbox
        self._uploaders: list[Uploader] = []

    def start(
        self,
        boot_id: str = "boot-1",
        pod: str = "",
        wrap: Any = lambda o: o,
        max_age_ms: int = MS_PER_DAY,
        **options: Any,
    ) -> Agent:
        """Start an agent. pod: a pod that keeps the GPU half busy from now on."""
        if pod:
            self.place(pod)
        self.source = Flaky(SimulatedSource(self.node))
        outbox = self._open_outbox(max_age_ms=max_age_ms)
        self.outbox = wrap(outbox) if wrap else outbox
        url, jitter = self.accountant.url, lambda: 1.0
        self._uploaders.append(Uploader(self.outbox, url, "c1", "n1", boot_id, None, self.clock, jitter=jitter))
        self.agent = Agent(
            AgentSettings(node="n1"), self.source, self.outbox, self._uploaders[-1], self.clock, **options
        )
        return self.agent

    def place(self, uid: str) -> None:
        """Let a pod keep the GPU half busy from now on."""
        place(self.node, uid, self.clock.wall_ms())

    def turn(self, minutes: int, step_ms: int = 20_000) -> None:
        for _ in range(minutes * MINUTE // step_ms):
            self.agent.sample()
            self.clock.advance(step_ms)

    @property
    def rows(self) -> list[UsageInterval]:
        """Return the intervals that the accountant received."""
        return [row for batch in self.accountant.batches for row in batch.intervals]

    @property
    def facts(self) -> list[PodFacts]:
        return [fact for batch in self.accountant.batches for fact in batch.facts]

    def close(self) -> None:
        for uploader in self._uploaders:
            uploader.close()
