"""How an import numbers what it sends, so that the ledger's own marks say how far it came. Pure.

An import has one outbox per node, and its sequence numbers are times: the records of a chunk that begins at T are
numbered from `first_seq(T)` on, and equal chunks give equal records. So a node's mark is the instant up to which that
node is imported; after a kill the same chunk is made again and only what lies above the mark is sent. Numbers that
no record has between two chunks are no loss, and the ledger does not record them as one.

The epoch says that it is an import, from what, and where the run of chunks began. It sorts after every agent's (a
UUIDv7 begins with a hexadecimal digit).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from accountant.overlap import Span, cut, subtract, union
from agent.units import MS_PER_HOUR, MS_PER_MINUTE

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
