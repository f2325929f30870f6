"""Numbers the chunks of an import, and defines the journal note about each.

An import has one outbox per node, and its sequence numbers are times: the records of a chunk that begins at T are
numbered from `first_seq(T)` on, and equal chunks give equal records. So a node's mark is the instant up to which that
node is imported; after a kill the same chunk is made again and only what lies above the mark is sent. Numbers that
no record has between two chunks are no loss, and the ledger does not record them as one.

The epoch says that it is an import, from what, and where the run of chunks began. It sorts after every agent's (a
UUIDv7 begins with a hexadecimal digit).

The note is an act of the journal, so it is part of the audit trail, of the archive and of every backup. `said_of`
prorates notes at the edges of a span: it describes where figures come from and decides none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field, model_validator

from accountant.core.claim_overlap import Span, cut, subtract, union
from accountant.ledger.journal import Act
from gputally.base.identifiers import known_epoch, known_name
from gputally.base.units import MS_PER_HOUR, MS_PER_MINUTE, prorate
from gputally.server.config_models import Model

Source = Literal["prometheus", "slurm"]
_PREFIX = "import:"
_PER_MINUTE = 1_000_000
"""Numbers per minute of a chunk: more than the most GPUs of a node could need."""


def epoch(source: Source, first_ms: int) -> str:
    """Of the outboxes of a run of chunks that began at `first_ms`."""
    return f"{_PREFIX}{source}:{first_ms:014d}"


def is_import(epoch_of: str) -> bool:
    return epoch_of.startswith(_PREFIX)


def source_of(epoch_of: str) -> str:
    """`prometheus` or `slurm`; "" for an epoch that is no import's."""
    return epoch_of.split(":")[1] if is_import(epoch_of) else ""


def first_seq(chunk_ms: int) -> int:
    """The number of the first record of a chunk."""
    return chunk_ms // MS_PER_MINUTE * _PER_MINUTE + 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stretch that is asked for, cut, sent and noted as a whole. epoch: of its outboxes."""

    epoch: str
    start_ms: int
    end_ms: int


def chunks(wanted: Span, done: Mapping[str, Sequence[Span]], source: Source, length_ms: int) -> list[Chunk]:
    """What of `wanted` is left to do, oldest first, cut at multiples of `length_ms` since 1970.

    done: the spans that were noted, by epoch. A stretch that begins where an epoch ends goes on with that epoch, as
    its numbers ascend; any other is an epoch of its own. Edges of `wanted` lie on whole hours."""
    start, end = wanted
    if start % MS_PER_HOUR or end % MS_PER_HOUR or length_ms % MS_PER_HOUR:
        raise ValueError("an import begins and ends at whole hours, and so do its chunks")
    if start >= end:
        return []
    ends = {max(stop for _, stop in spans): name for name, spans in sorted(done.items()) if spans}
    found = []
    for begin, stop in subtract(wanted, union(span for spans in done.values() for span in spans)):
        name = ends.get(begin) or epoch(source, begin)
        edges = range(begin - begin % length_ms + length_ms, stop, length_ms)
        found += [Chunk(name, low, high) for low, high in cut((begin, stop), edges)]
    return found


def without(span: Span, taken: Iterable[Span]) -> list[Span]:
    """`span` without what agents metered of it."""
    return subtract(span, union(taken))


KNOWN_LIMITS: Final[dict[Source, tuple[str, ...]]] = {
    "prometheus": (
        "who held a GPU is told by kube-state-metrics, to the scrape interval; pods between two scrapes are missed",
        "busy time is dcgm-exporter's utilisation; of pods that share a GPU it is not known whose it was",
        "time in which nothing was scraped is unmetered",
    ),
    "slurm": (
        "allocation only: Slurm's accounting does not say how busy a GPU was, nor which one it was",
        "GPUs of a job on several nodes are divided over them evenly",
        "unallocated time is up to the GPUs that a node is said to have, or was seen to use at once",
    ),
}
"""Distortions that come with a source, for people."""


class ImportedChunk(Model):
    """One chunk that was sent completely. Times are UTC ms; *_us are GPU-microseconds.

    origin: where from, without credentials. sent_us: capacity of the rows; held_us: of it, held; unknown_us: held,
    and how busy is not known. metered_us: left to agents, who metered it. missing_us: of known GPUs, unrecorded."""

    cluster: Annotated[str, AfterValidator(known_name)] = Field(min_length=1)
    source: Source
    origin: Annotated[str, AfterValidator(known_name)]
    epoch: Annotated[str, AfterValidator(known_epoch)]
    start_ms: int = Field(ge=0, le=2**53)
    end_ms: int = Field(ge=0, le=2**53)
    nodes: int = Field(ge=0, le=2**31)
    gpus: int = Field(ge=0, le=2**31)
    sent_us: int = Field(ge=0, le=2**62)
    held_us: int = Field(ge=0, le=2**62)
    unknown_us: int = Field(ge=0, le=2**62)
    metered_us: int = Field(ge=0, le=2**62)
    missing_us: int = Field(ge=0, le=2**62)

    @model_validator(mode="after")
    def _span(self) -> ImportedChunk:
        if self.start_ms >= self.end_ms:
            raise ValueError("a chunk ends after it begins")
        return self

    @property
    def span(self) -> Span:
        return self.start_ms, self.end_ms


@dataclass(frozen=True, slots=True)
class ImportRow:
    """What was imported into a span from one place, of one cluster. Figures as of `ImportedChunk`."""

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

    @property
    def coverage(self) -> float:
        """Of the time of known GPUs that no agent metered, what there was a record of."""
        whole = self.sent_us + self.missing_us
        return self.sent_us / whole if whole else 1.0

    @property
    def limits(self) -> tuple[str, ...]:
        return KNOWN_LIMITS[self.source]


def of_acts(acts: Iterable[Act]) -> list[ImportedChunk]:
    """The notes among the acts, in their order; of one chunk, one."""
    noted = [ImportedChunk.model_validate_json(act.content) for act in acts if act.kind == "imported"]
    return list({(one.cluster, one.source, one.span): one for one in noted}.values())


def said_of(noted: Iterable[ImportedChunk], start_ms: int, end_ms: int) -> tuple[ImportRow, ...]:
    """By cluster, source and origin, of [start_ms, end_ms)."""
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
    )
