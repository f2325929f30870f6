"""Fills the volume of an agent's spool during an outage, frees it again, and compares the metered time with the log.

    nice python -m tests.attacks.spool_volumes --volumes 64 200 400 1000 4000 --outages 5 60 300 1200 2500

needs the right to mount file systems (root). Each trial runs an agent with one simulated GPU and ten pods on a virtual
clock, with its spool on a tmpfs of some KiB. The accountant is a model: it stores batches, and checkpoints every five
minutes. It is unreachable for some minutes. In half of the trials another program fills the volume for a while, too.
The trial fails if the metered time is not the true time minus the time that the agent's log names as lost, or if a
volume with room for the spool is not metered once the outage is over."""

from __future__ import annotations

import argparse
import contextlib
import gzip
import itertools
import logging
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from agent.core.lean_http_client import Response, Unreachable
from agent.core.readings import Allocation
from agent.core.settings import AgentSettings
from agent.main_loop import Agent
from agent.simulation.simulated_node import H100, SimulatedNode, SimulatedSource, make_gpu
from agent.upload.spool import Outbox
from agent.upload.uploader import Uploader
from agent.wire import Ack, Batch, Holder
from gputally.base.clock import VirtualClock
from gputally.base.units import MS_PER_DAY, MS_PER_MINUTE
from tests.agent.sample_values import T0

PODS = 10
CHECKPOINT_MS = 5 * MS_PER_MINUTE
SMALLEST_KIB = 300
"""A smaller volume has no room for records beside the reserve: records wait in memory."""
LATEST_MS = 5 * MS_PER_DAY
"""When everything that waited in memory has arrived."""
Span = tuple[int, int]


class Accountant:
    """A model of the accountant, in place of the network: it stores what arrives, and checkpoints now and then."""

    encrypted = True

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.reachable = True
        self.durable = self.checkpointed = 0
        self._checkpoint_ms = clock.monotonic_ms()
        self.spans: dict[int, Span] = {}
        """The spans of the stored rows by number."""

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> Response:
        if not self.reachable:
            raise Unreachable("accountant unreachable: outage")
        batch = msgspec.json.decode(gzip.decompress(body), type=Batch)
        if self._clock.monotonic_ms() - self._checkpoint_ms >= CHECKPOINT_MS:
            self._checkpoint_ms, self.checkpointed = self._clock.monotonic_ms(), self.durable
        seqs = [row.seq for row in batch.intervals] + [fact.seq for fact in batch.facts]
        seqs += [skip.seq for skip in batch.skipped]
        assert sorted(seqs) == list(range(batch.first_seq, batch.first_seq + len(seqs)))
        assert batch.first_seq <= self.durable + 1
        self.spans |= {row.seq: (row.start_ms, row.end_ms) for row in batch.intervals}
        self.durable = max([self.durable, *seqs])
        ack = Ack(epoch=batch.epoch, durable_seq=self.durable, checkpointed_seq=self.checkpointed)
        return Response(200, msgspec.json.encode(ack), "")

    def close(self) -> None:
        """Nothing is open."""


class Named(logging.Handler):
    """Collects the spans that the log names as lost."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.spans: list[Span] = []

    def emit(self, record: logging.LogRecord) -> None:
        extra: Any = record
        if getattr(extra, "sets", 0):
            self.spans.append((extra.first_ms, extra.last_ms))


def length(spans: list[Span]) -> int:
    """Return the length of the union of the spans."""
    total, end = 0, 0
    for start, stop in sorted(spans):
        total += max(stop - max(start, end), 0)
        end = max(end, stop)
    return total


@contextlib.contextmanager
def volume(kib: int) -> Iterator[Path]:
    """Mount a file system of this size."""
    with tempfile.TemporaryDirectory() as place:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", place], check=True)
        try:
            yield Path(place)
        finally:
            subprocess.run(["umount", "-l", place], check=True)


@contextlib.contextmanager
def _named() -> Iterator[Named]:
    handler, logger = Named(), logging.getLogger("agent")
    before = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


def trial(folder: Path, outage: int, kib: int, *, filled: bool) -> str:
    """Run an agent whose accountant is away for `outage` minutes. Return what is wrong; "" if nothing is."""
    clock = VirtualClock(T0)
    node = SimulatedNode("n1", [make_gpu("GPU-a", 0, H100)], start_ms=T0)
    for pod in range(PODS):
        holder = Holder(kind="pod", uid=f"u{pod}", namespace="vision", name=f"pod-{pod}", container="main")
        node.place(T0, Allocation("GPU-a", holder, sharing="time-slicing", sharing_replicas=PODS), 50_000, 1_000)
    accountant = Accountant(clock)
    with _named() as named:
        outbox = Outbox(folder / "outbox.sqlite", clock, max_age_ms=30 * MS_PER_DAY, patient=True)
        uploader = Uploader(outbox, "http://127.0.0.1:9", "c1", "n1", "boot-1", None, clock, jitter=lambda: 1.0)
        uploader._sender = accountant  # type: ignore[assignment]
        agent = Agent(AgentSettings(node="n1"), SimulatedSource(node), outbox, uploader, clock)

        def run(minutes: int) -> None:
            for _ in range(minutes):
                agent.sample()
                while agent.ship().progress:
                    pass
                clock.wait(60, threading.Event())

        run(7)
        accountant.reachable = False
        run(outage // 2)
        if filled:
            with contextlib.suppress(OSError), (folder / "other").open("wb") as other:
                other.write(bytes(kib * 1024))
        run(outage - outage // 2)
        accountant.reachable = True
        run(10)
        (folder / "other").unlink(missing_ok=True)
        while kib >= SMALLEST_KIB and clock.monotonic_ms() < LATEST_MS and agent.health.backlog_rows:
            run(5)
        run(15)
        end_ms = T0 + clock.monotonic_ms()
        agent.shutdown()
    true_ms, metered_ms, lost_ms = end_ms - T0, length(list(accountant.spans.values())), length(named.spans)
    if metered_ms + lost_ms != true_ms:
        return f"{true_ms} ms are {metered_ms} metered and {lost_ms} named"
    if kib >= SMALLEST_KIB and max(end for _, end in accountant.spans.values()) != end_ms:
        return "after the outage nothing is metered"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--volumes", type=int, nargs="+", default=[64, 128, 200, 300, 400, 700, 1_000, 2_000, 5_000])
    parser.add_argument("--outages", type=int, nargs="+", default=[0, 5, 17, 60, 150, 400, 1_000, 2_500])
    parser.add_argument("--random", type=int, default=0, help="further trials with a random size and outage")
    chosen = parser.parse_args()
    chance = random.Random(1)
    cases = list(itertools.product(chosen.volumes, chosen.outages))
    cases += [(chance.randint(64, 3_000), chance.randint(0, 600)) for _ in range(chosen.random)]
    failed = 0
    for (kib, outage), filled in itertools.product(cases, (False, True)):
        with volume(kib) as folder:
            fault = trial(folder, outage, kib, filled=filled)
        failed += bool(fault)
        print(
            f"{kib} KiB, {outage} minutes{', filled' if filled else ''}: {fault or 'metered = true - named'}",
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
