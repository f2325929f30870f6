"""What is noted of an imported chunk, and what the report says of several: source, extent, coverage. Pure.

The note is an act of the journal, so it is part of the audit trail, of the archive and of every backup. `said_of`
prorates notes at the edges of a span: it describes where figures come from and decides none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import AfterValidator, Field, model_validator

from accountant.importing.protocol import Source
from accountant.journal import Act
from accountant.overlap import Span
from accountant.wire import Model
from agent.identifiers import known_epoch, known_name
from agent.units import prorate

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
