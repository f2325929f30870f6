"""Runs one import: plans the chunks, sends the records that the ledger lacks, records finished chunks.

An interrupted import continues where it stopped, without local state. Finished chunks are recorded in the ledger. In
the unfinished chunk, the acknowledged number of each node says how far it was imported.

An import can be withdrawn, so that it can be made again. Its marks stay, so the next import has a new *generation* of
epochs.

An import has one outbox per node, and its sequence numbers represent times. The records of a chunk that begins at T are
numbered from `first_seq(T)` on, and equal chunks give equal records. The acknowledged number of a node therefore says
up to which instant it is imported. After a crash the chunk is rebuilt, and only records above that number are sent.
Unused numbers between two chunks are not recorded as lost.

A finished chunk is recorded as an act (`ImportedChunk`), so it is part of the audit trail, of the archive and of every
backup. `import_rows` lists the imports inside a span, and prorates the amounts of a chunk that lies only partly in it.
The list is shown to tell where imported figures come from; no figure is computed from it."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
from pydantic import AfterValidator, Field, model_validator

from accountant.core.claim_overlap import Span, cut, intersect, subtract, union
from accountant.core.import_epochs import epoch
from accountant.core.import_epochs import generation as generation_of
from accountant.history_import.gpu_assignment import NodeHistory, imported_time, rows
from accountant.history_import.protocol import Chunk, known_limits, known_records
from accountant.inventory.pod_facts import is_job_number
from accountant.ledger.journal import Act, ActKind
from accountant.ledger.protocols import ImportSpan
from accountant.wire.typed_accountant_client import AccountantClient
from accountant.wire.usage_cost_and_job_models import ChunkNote, ImportState, Withdrawal
from agent.wire import Batch, PodFacts, UsageInterval
from gputally.base.apportionment import prorate
from gputally.base.units import MS_PER_HOUR, MS_PER_MINUTE, US_PER_MS
from gputally.base.untrusted_text import LONGEST_PLUGIN_NAME, PLUGIN_NAME, known_epoch, known_name, known_reference
from gputally.server.config_loading import Model

Source = Annotated[str, Field(pattern=PLUGIN_NAME, max_length=LONGEST_PLUGIN_NAME)]
"""The name of a history."""
_PER_MINUTE = 1_000_000
"""Numbers per minute of a chunk; more than any node's GPUs need."""


def first_seq(chunk_ms: int) -> int:
    """The number of the first record of a chunk."""
    return chunk_ms // MS_PER_MINUTE * _PER_MINUTE + 1


def chunks(
    wanted: Span, done: Mapping[str, Sequence[Span]], source: Source, length_ms: int, generation: int = 0
) -> list[Chunk]:
    """The parts of `wanted` that are not done, oldest first, split at multiples of `length_ms` since 1970.

    done: the recorded spans, by epoch. A span that begins where an epoch of the same generation ends continues that
    epoch, since its numbers ascend; any other gets a new epoch. `wanted` begins and ends at whole hours."""
    start, end = wanted
    if start % MS_PER_HOUR or end % MS_PER_HOUR or length_ms % MS_PER_HOUR:
        raise ValueError("an import must begin and end at whole hours, and its chunks must last whole hours")
    if start >= end:
        return []
    own = [name for name in sorted(done) if done[name] and generation_of(name) == generation]
    ends = {max(stop for _, stop in done[name]): name for name in own}
    found = []
    for begin, stop in subtract(wanted, union(span for spans in done.values() for span in spans)):
        name = ends.get(begin) or epoch(source, begin, generation)
        edges = range(begin - begin % length_ms + length_ms, stop, length_ms)
        found += [Chunk(name, low, high) for low, high in cut((begin, stop), edges)]
    return found


def without(span: Span, taken: Iterable[Span]) -> list[Span]:
    """`span` without the time that agents metered."""
    return subtract(span, union(taken))


_MOST_US: Final = 2**62
"""More than all GPUs have in a chunk. What the source says of time on no GPU is believed up to this."""


class ImportedChunk(Model):
    """One chunk that was sent completely. Times are UTC ms; *_us are GPU-microseconds.

    origin: the source's address, without credentials.
    sent_us: capacity of the rows.
    held_us: the held part of it.
    unknown_us: held time with unknown use.
    metered_us: left out because agents metered it.
    missing_us: time of known GPUs without records.
    unplaced_us: time that the source says is held, but on no GPU that it knows.
    left_out: records of the whole history that were left out, because the length of their time is not known."""

    cluster: Annotated[str, AfterValidator(known_name)] = Field(min_length=1)
    source: Source
    origin: Annotated[str, AfterValidator(known_reference)]
    epoch: Annotated[str, AfterValidator(known_epoch)]
    start_ms: int = Field(ge=0, le=2**53)
    end_ms: int = Field(ge=0, le=2**53)
    nodes: int = Field(ge=0, le=2**31)
    gpus: int = Field(ge=0, le=2**31)
    sent_us: int = Field(ge=0, le=_MOST_US)
    held_us: int = Field(ge=0, le=_MOST_US)
    unknown_us: int = Field(ge=0, le=_MOST_US)
    metered_us: int = Field(ge=0, le=_MOST_US)
    missing_us: int = Field(ge=0, le=_MOST_US)
    unplaced_us: int = Field(default=0, ge=0, le=_MOST_US)
    left_out: int = Field(default=0, ge=0, le=2**53)

    @model_validator(mode="after")
    def _span(self) -> ImportedChunk:
        if self.start_ms >= self.end_ms:
            raise ValueError("the chunk ends at or before its start")
        return self

    @property
    def span(self) -> Span:
        return self.start_ms, self.end_ms


@dataclass(frozen=True, slots=True)
class ImportRow:
    """The records that were imported into a span from one source, for one cluster. Figures as in `ImportedChunk`."""

    cluster: str
    source: Source
    origin: str
    start_ms: int
    end_ms: int
    sent_us: int
    held_us: int
    unknown_us: int
    metered_us: int
    missing_us: int
    unplaced_us: int
    left_out: int

    @property
    def coverage(self) -> float:
        """The recorded share of the otherwise unmetered time that the source knows; a bound if records were left
        out."""
        whole = self.sent_us + self.missing_us + self.unplaced_us
        return self.sent_us / whole if whole else 1.0

    @property
    def records(self) -> str:
        return known_records(self.source)

    @property
    def limits(self) -> tuple[str, ...]:
        return known_limits(self.source)


IMPORTING: Final[tuple[ActKind, ...]] = ("imported", "withdrawn")
"""The kinds of acts that say what is imported."""


def imported_chunks(acts: Iterable[Act]) -> list[ImportedChunk]:
    """The chunks recorded in the acts (of the kinds in `IMPORTING`), in the order of the acts, each once, without what
    was withdrawn later. Amounts of a chunk of which a part was withdrawn are prorated."""
    found: dict[tuple[str, Source, Span], ImportedChunk] = {}
    for act in acts:
        if act.kind == "imported":
            one = ImportedChunk.model_validate_json(act.content)
            found[one.cluster, one.source, one.span] = one
        elif act.kind == "withdrawn":
            gone = ImportSpan.model_validate_json(act.content)
            left = [part for one in found.values() for part in _left_of(one, gone)]
            found = {(one.cluster, one.source, one.span): one for one in left}
    return list(found.values())


def _left_of(chunk: ImportedChunk, gone: ImportSpan) -> Iterator[ImportedChunk]:
    """The parts of a chunk outside a withdrawn span."""
    if (chunk.cluster, chunk.source) != (gone.cluster, gone.source):
        yield chunk
        return
    for start, end in subtract(chunk.span, [(gone.start_ms, gone.end_ms)]):
        inside = start - chunk.start_ms, end - chunk.start_ms
        amounts = {name: prorate(getattr(chunk, name), chunk.end_ms - chunk.start_ms, *inside) for name in _AMOUNTS}
        yield chunk.model_copy(update={"start_ms": start, "end_ms": end, **amounts})


_AMOUNTS: Final = ("sent_us", "held_us", "unknown_us", "metered_us", "missing_us", "unplaced_us")


def import_rows(noted: Iterable[ImportedChunk], start_ms: int, end_ms: int) -> tuple[ImportRow, ...]:
    """The imports of [start_ms, end_ms) by cluster, source and origin."""
    found: dict[tuple[str, Source, str], list[ImportedChunk]] = {}
    for chunk in noted:
        if chunk.start_ms < end_ms and chunk.end_ms > start_ms:
            found.setdefault((chunk.cluster, chunk.source, chunk.origin), []).append(chunk)
    return tuple(_row(key, found[key], start_ms, end_ms) for key in sorted(found))


def _row(key: tuple[str, Source, str], chunks: Sequence[ImportedChunk], start_ms: int, end_ms: int) -> ImportRow:
    inside = [(one, max(one.start_ms, start_ms), min(one.end_ms, end_ms)) for one in chunks]

    def total(name: str) -> int:
        return sum(
            prorate(getattr(one, name), one.end_ms - one.start_ms, low - one.start_ms, high - one.start_ms)
            for one, low, high in inside
        )

    return ImportRow(
        *key,
        start_ms=min(low for _, low, _ in inside),
        end_ms=max(high for _, _, high in inside),
        sent_us=total("sent_us"),
        held_us=total("held_us"),
        unknown_us=total("unknown_us"),
        metered_us=total("metered_us"),
        missing_us=total("missing_us"),
        unplaced_us=total("unplaced_us"),
        left_out=max(one.left_out for one in chunks),
    )


RECORDS = 10_000
"""Maximum number of records in one batch, unless a set (the rows of one GPU over one piece of time) is larger."""
_SENDERS = 4
Read = Callable[[Chunk], Sequence[NodeHistory]]


class Acknowledged(Model):
    """The accountant's answer to a batch, with the fields of agent.wire.Ack."""

    epoch: str
    durable_seq: int
    checkpointed_seq: int
    archived_seq: int | None = None
    clock_ms: int | None = None


@dataclass(frozen=True, slots=True)
class ImportTarget:
    """The accountant and cluster to send to. origin: the source's address for display, without credentials."""

    remote: AccountantClient
    cluster: str
    source: Source
    origin: str


@dataclass(slots=True)
class Summary:
    """The result of one run of the import.

    before, done: chunks done by earlier runs and by this one. *_us: GPU-microseconds, see ImportedChunk.
    unplaced_us: held time without a GPU.
    left_out: records that were left out, see ImportedChunk."""

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
    left_out: int = 0

    def add(self, chunk: ImportedChunk) -> None:
        self.done += 1
        self.nodes, self.gpus = max(self.nodes, chunk.nodes), max(self.gpus, chunk.gpus)
        self.sent_us += chunk.sent_us
        self.held_us += chunk.held_us
        self.unknown_us += chunk.unknown_us
        self.metered_us += chunk.metered_us
        self.missing_us += chunk.missing_us
        self.unplaced_us += chunk.unplaced_us


def run(
    to: ImportTarget,
    read: Read,
    wanted: Span,
    chunk_ms: int,
    progress: Callable[[int, int], None],
    *,
    left_out: int = 0,
    replace: str = "",
) -> Summary:
    """Imports the span `wanted`, which begins and ends at whole hours.

    read: returns the histories of the nodes in a chunk.
    progress: called with (chunks done, chunks in all).
    left_out: records of the source that are left out.
    replace: why earlier imports of the span are withdrawn first; "" if they stay."""
    if replace and wanted[0] < wanted[1]:
        span = {"cluster": to.cluster, "source": to.source, "start_ms": wanted[0], "end_ms": wanted[1]}
        to.remote.act(Withdrawal, "/v1/imports/withdraw", {**span, "reason": replace})
    state = to.remote.ask(ImportState, "/v1/imports", {"cluster": to.cluster, "source": to.source})
    done: dict[str, list[Span]] = {}
    for one in state.done:
        done.setdefault(one.epoch, []).append((one.start_ms, one.end_ms))
    left = chunks(wanted, done, to.source, chunk_ms, state.generation)
    covered = sum(end - start for spans in done.values() for start, end in intersect(union(spans), [wanted]))
    summary = Summary(before=-(-covered // chunk_ms), left_out=left_out)
    total = summary.before + len(left)
    marks = {(one.node, one.epoch): one.durable_seq for one in state.marks}
    metered = {one.node: (one.start_ms, one.end_ms) for one in state.metered}
    with ThreadPoolExecutor(_SENDERS) as pool:
        for chunk in left:
            progress(summary.before + summary.done, total)
            made = [_NodeChunk.of(history, chunk, metered.get(history.node)) for history in read(chunk)]
            for _ in pool.map(lambda one: _send(to, chunk, one, marks.get((one.node, chunk.epoch), 0)), made):  # noqa: B023 - drained before the next chunk
                pass
            note = _note(to, chunk, made, left_out)
            to.remote.act(ChunkNote, "/v1/imports", note.model_dump())
            summary.add(note)
    progress(total, total)
    return summary


@dataclass(frozen=True, slots=True)
class _NodeChunk:
    """The records of one node in a chunk, in the order of their numbers."""

    node: str
    gpus: int
    facts: tuple[PodFacts, ...]
    rows: tuple[UsageInterval, ...]
    metered_us: int
    missing_us: int
    unplaced_us: int

    @classmethod
    def of(cls, history: NodeHistory, chunk: Chunk, metered: Span | None) -> _NodeChunk:
        """A batch system's facts about its jobs are sent also if agents metered all of their time, because no agent
        knows them."""
        span = (chunk.start_ms, chunk.end_ms)
        taken = [] if metered is None else [metered]
        allowed = without(span, taken)
        found: list[UsageInterval] = []
        metered_us = missing_us = 0
        for gpu in history.gpus:
            made = rows(gpu, history.holds.get(gpu.uuid, ()), span, allowed)
            found += made
            sent = union((row.start_ms, row.end_ms) for row in made)
            metered_us += _length(intersect(union(gpu.known), taken))
            missing_us += _length(
                piece for blind in history.blind.get(gpu.uuid, ()) for piece in subtract(blind, union([*sent, *taken]))
            )
        found.sort(key=lambda row: (row.start_ms, row.gpu_uuid))
        return cls(
            history.node,
            len(history.gpus),
            tuple(fact for fact in history.facts if found or is_job_number(fact.uid)),
            tuple(found),
            metered_us,
            missing_us,
            history.unplaced_us,
        )

    def batches(self, to: ImportTarget, chunk: Chunk, mark: int) -> Iterator[Batch]:
        """The records above `mark`, the acknowledged number, in batches that split no set."""
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
    """The largest number of rows, at most `room` if possible, after which a set ends; at least one set."""
    edges = [
        n
        for n in range(1, len(numbered))
        if (numbered[n].start_ms, numbered[n].gpu_uuid) != (numbered[n - 1].start_ms, numbered[n - 1].gpu_uuid)
    ]
    fitting = [edge for edge in edges if edge <= room]
    return fitting[-1] if fitting else (edges[0] if edges else len(numbered))


def _send(to: ImportTarget, chunk: Chunk, made: _NodeChunk, mark: int) -> None:
    for batch in made.batches(to, chunk, mark):
        body = gzip.compress(msgspec.json.encode(batch), compresslevel=1)
        to.remote.send(Acknowledged, "/v1/imports/usage", body, "application/json", encoding="gzip")


def _note(to: ImportTarget, chunk: Chunk, made: Sequence[_NodeChunk], left_out: int) -> ImportedChunk:
    tally = imported_time(row for one in made for row in one.rows)
    return ImportedChunk(
        cluster=to.cluster,
        source=to.source,
        origin=to.origin,
        epoch=chunk.epoch,
        start_ms=chunk.start_ms,
        end_ms=chunk.end_ms,
        nodes=sum(1 for one in made if one.gpus),
        gpus=sum(one.gpus for one in made),
        sent_us=tally.sent_us,
        held_us=tally.held_us,
        unknown_us=tally.unknown_us,
        metered_us=sum(one.metered_us for one in made),
        missing_us=sum(one.missing_us for one in made),
        unplaced_us=min(_MOST_US, sum(one.unplaced_us for one in made)),
        left_out=left_out,
    )


def _length(spans: Iterator[Span] | Sequence[Span]) -> int:
    """The total length of the spans, in microseconds."""
    return sum(end - start for start, end in spans) * US_PER_MS
