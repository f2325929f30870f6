"""Runs one import: plans the chunks, sends what the ledger lacks, notes what is done.

Interrupted anywhere it goes on where it stopped: finished chunks are noted in the ledger, and of the one that was under
way each node's mark says how far it came. Nothing is kept on this side.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from accountant.core.claim_overlap import Span, intersect, subtract, union
from accountant.history_import.gpu_holds import imported_time, rows
from accountant.history_import.import_chunks import Chunk, ImportedChunk, Source, chunks, first_seq, without
from accountant.history_import.kubernetes_history import NodeHistory
from accountant.wire.http_client import AccountantClient
from accountant.wire.usage_models import ChunkNote, ImportState
from agent.wire import Batch, PodFacts, UsageInterval
from gputally.base.units import US_PER_MS
from gputally.server.config_models import Model

RECORDS = 10_000
"""Of one batch, unless a set of rows is larger."""
_SENDERS = 4
Read = Callable[[Chunk], Sequence[NodeHistory]]


class Acknowledged(Model):
    """An agent.wire.Ack."""

    epoch: str
    durable_seq: int
    checkpointed_seq: int
    archived_seq: int | None = None
    clock_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Destination:
    """Where to and as what. origin: for people, without credentials."""

    remote: AccountantClient
    cluster: str
    source: Source
    origin: str


@dataclass(slots=True)
class Summary:
    """chunks: (done before, done now); *_us: GPU-microseconds, see ImportedChunk; unplaced_us: held time for which
    there was no GPU."""

    before: int = 0
    done: int = 0
    nodes: int = 0
    gpus: int = 0
    sent_us: int = 0
    held_us: int = 0
    unknown_us: int = 0
    metered_us: int = 0
    missing_us: int = 0
    unplaced_us: int = 0

    def add(self, chunk: ImportedChunk, unplaced_us: int) -> None:
        self.done += 1
        self.nodes, self.gpus = max(self.nodes, chunk.nodes), max(self.gpus, chunk.gpus)
        self.sent_us += chunk.sent_us
        self.held_us += chunk.held_us
        self.unknown_us += chunk.unknown_us
        self.metered_us += chunk.metered_us
        self.missing_us += chunk.missing_us
        self.unplaced_us += unplaced_us


def run(to: Destination, read: Read, wanted: Span, chunk_ms: int, progress: Callable[[int, int], None]) -> Summary:
    """Import [start, end), whole hours. progress hears of (chunks done, chunks in all)."""
    state = to.remote.ask(ImportState, "/v1/imports", {"cluster": to.cluster, "source": to.source})
    done: dict[str, list[Span]] = {}
    for one in state.done:
        done.setdefault(one.epoch, []).append((one.start_ms, one.end_ms))
    left = chunks(wanted, done, to.source, chunk_ms)
    covered = sum(end - start for spans in done.values() for start, end in intersect(union(spans), [wanted]))
    summary = Summary(before=-(-covered // chunk_ms))
    total = summary.before + len(left)
    marks = {(one.node, one.epoch): one.durable_seq for one in state.marks}
    metered = {one.node: (one.start_ms, one.end_ms) for one in state.metered}
    with ThreadPoolExecutor(_SENDERS) as pool:
        for chunk in left:
            progress(summary.before + summary.done, total)
            made = [_NodeChunk.of(history, chunk, metered.get(history.node)) for history in read(chunk)]
            for _ in pool.map(lambda one: _send(to, chunk, one, marks.get((one.node, chunk.epoch), 0)), made):  # noqa: B023 - drained before the next chunk
                pass
            note = _note(to, chunk, made)
            to.remote.act(ChunkNote, "/v1/imports", note.model_dump())
            summary.add(note, sum(one.unplaced_us for one in made))
    progress(total, total)
    return summary


@dataclass(frozen=True, slots=True)
class _NodeChunk:
    """One node's part of a chunk, in the order in which it is numbered."""

    node: str
    gpus: int
    facts: tuple[PodFacts, ...]
    rows: tuple[UsageInterval, ...]
    metered_us: int
    missing_us: int
    unplaced_us: int

    @classmethod
    def of(cls, history: NodeHistory, chunk: Chunk, metered: Span | None) -> _NodeChunk:
        span = (chunk.start_ms, chunk.end_ms)
        taken = [] if metered is None else [metered]
        allowed = without(span, taken)
        found: list[UsageInterval] = []
        metered_us = missing_us = 0
        for gpu in history.gpus:
            made = rows(gpu, history.holds.get(gpu.uuid, ()), span, allowed)
            found += made
            told = union((row.start_ms, row.end_ms) for row in made)
            metered_us += _length(intersect(union(gpu.known), taken))
            missing_us += _length(
                piece for blind in history.blind.get(gpu.uuid, ()) for piece in subtract(blind, union([*told, *taken]))
            )
        found.sort(key=lambda row: (row.start_ms, row.gpu_uuid))
        return cls(
            history.node,
            len(history.gpus),
            history.facts if found else (),
            tuple(found),
            metered_us,
            missing_us,
            history.unplaced_us,
        )

    def batches(self, to: Destination, chunk: Chunk, mark: int) -> Iterator[Batch]:
        """What lies above the mark, in batches that split no set."""
        seq = first_seq(chunk.start_ms)
        facts = tuple(msgspec.structs.replace(fact, seq=seq + n) for n, fact in enumerate(self.facts))
        seq += len(facts)
        numbered = [msgspec.structs.replace(row, seq=seq + n) for n, row in enumerate(self.rows)]
        facts = tuple(fact for fact in facts if fact.seq > mark)
        numbered = [row for row in numbered if row.seq > mark]
        while facts or numbered:
            room = max(0, RECORDS - len(facts))
            count = len(numbered) if room >= len(numbered) else _edge(numbered, room)
            first = facts[0].seq if facts else numbered[0].seq
            yield Batch(
                cluster=to.cluster,
                node=self.node,
                boot_id="",
                epoch=chunk.epoch,
                first_seq=first,
                oldest_seq=first,
                intervals=tuple(numbered[:count]),
                facts=facts,
            )
            facts, numbered = (), numbered[count:]


def _edge(numbered: Sequence[UsageInterval], room: int) -> int:
    """The largest number of rows, at most `room` where that is possible, after which a set ends; at least one set."""
    edges = [
        n
        for n in range(1, len(numbered))
        if (numbered[n].start_ms, numbered[n].gpu_uuid) != (numbered[n - 1].start_ms, numbered[n - 1].gpu_uuid)
    ]
    fitting = [edge for edge in edges if edge <= room]
    return fitting[-1] if fitting else (edges[0] if edges else len(numbered))


def _send(to: Destination, chunk: Chunk, made: _NodeChunk, mark: int) -> None:
    for batch in made.batches(to, chunk, mark):
        body = gzip.compress(msgspec.json.encode(batch), compresslevel=1)
        to.remote.send(Acknowledged, "/v1/imports/usage", body, "application/json", encoding="gzip")


def _note(to: Destination, chunk: Chunk, made: Sequence[_NodeChunk]) -> ImportedChunk:
    tally = imported_time(row for one in made for row in one.rows)
    return ImportedChunk(
        cluster=to.cluster,
        source=to.source,
        origin=to.origin,
        epoch=chunk.epoch,
        start_ms=chunk.start_ms,
        end_ms=chunk.end_ms,
        nodes=len(made),
        gpus=sum(one.gpus for one in made),
        sent_us=tally.sent_us,
        held_us=tally.held_us,
        unknown_us=tally.unknown_us,
        metered_us=sum(one.metered_us for one in made),
        missing_us=sum(one.missing_us for one in made),
    )


def _length(spans: Iterator[Span] | Sequence[Span]) -> int:
    """In microseconds of one GPU."""
    return sum(end - start for start, end in spans) * US_PER_MS
