"""What the outbox keeps and gives back, and how records become the parts of a batch. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from agent.wire import PodFacts, Skipped, UsageInterval

INTERVAL, FACTS, LOSS = 0, 1, 2
"""Kinds of a record: a usage row, facts of a pod, a number that stands for what was refused."""

Record = tuple[int, int, int, bytes, str | None]
"""(seq, unit, kind, payload, why it is parked)."""


@dataclass(frozen=True, slots=True)
class Appended:
    """What one `append` did. last_seq: newest number given out; refused_*: no room, the time is lost."""

    last_seq: int
    refused_sets: int = 0
    refused_facts: int = 0


@dataclass(frozen=True, slots=True)
class Loss:
    """What could not be kept: sets and facts, all of them within [first_ms, last_ms)."""

    first_ms: int
    last_ms: int
    sets: int
    facts: int

    def __add__(self, other: Loss) -> Loss:
        first_ms, last_ms = min(self.first_ms, other.first_ms), max(self.last_ms, other.last_ms)
        return Loss(first_ms, last_ms, self.sets + other.sets, self.facts + other.facts)


@dataclass(frozen=True, slots=True)
class Pending:
    """The next records to send: every number from `first_seq` to `last_seq`, whole units only."""

    first_seq: int
    last_seq: int
    oldest_seq: int
    units: int
    rows: tuple[msgspec.Raw, ...]
    """Intervals in the wire form, and so are `told` the facts: what was encoded for the spool is not encoded again."""
    told: tuple[msgspec.Raw, ...]
    skipped: tuple[Skipped, ...]

    @property
    def intervals(self) -> tuple[UsageInterval, ...]:
        return tuple(map(_interval.decode, self.rows))

    @property
    def facts(self) -> tuple[PodFacts, ...]:
        return tuple(map(_facts.decode, self.told))


@dataclass(frozen=True, slots=True)
class Stats:
    """What the outbox holds. oldest_age_ms: of the oldest record not yet durable, 0 when there is none.
    parked: records declared as skipped that are still here. lost_sets: refused for want of room, ever;
    unspooled_sets: lost before they came here, because it could not be written.
    released_early: records let go for want of space before they were archived."""

    rows: int = 0
    unsent_rows: int = 0
    bytes: int = 0
    oldest_age_ms: int = 0
    parked: int = 0
    lost_sets: int = 0
    unspooled_sets: int = 0
    released_early: int = 0


_interval = msgspec.json.Decoder(UsageInterval)
_facts = msgspec.json.Decoder(PodFacts)
_UNNUMBERED = b'{"seq":0,'


def encode(record: UsageInterval | PodFacts) -> bytes:
    """The stored form: the wire form without its number, which is the key."""
    return msgspec.json.encode(record if record.seq == 0 else msgspec.structs.replace(record, seq=0))


def later(payload: bytes, kind: int, by_ms: int) -> bytes:
    """A stored record as much later. Of a pod's facts only when they were observed is the node's own word."""
    if kind == FACTS:
        facts = _facts.decode(payload)
        return encode(msgspec.structs.replace(facts, observed_ms=facts.observed_ms + by_ms))
    row = _interval.decode(payload)
    gaps = tuple(
        msgspec.structs.replace(gap, start_ms=gap.start_ms + by_ms, end_ms=gap.end_ms + by_ms) for gap in row.gaps
    )
    moved = msgspec.structs.replace(row, start_ms=row.start_ms + by_ms, end_ms=row.end_ms + by_ms, gaps=gaps)
    return encode(moved)


def within(groups: list[list[Record]], max_bytes: int, max_units: int | None) -> list[list[Record]]:
    """The leading groups that fit, at least the first."""
    taken: list[list[Record]] = []
    size = 0
    for group in groups[:max_units]:
        size += sum([len(record[3]) for record in group])
        if taken and size > max_bytes:
            break
        taken.append(group)
    return taken


def assemble(groups: list[list[Record]], oldest_seq: int) -> Pending:
    """The units as they are sent: numbered, parked ones as declarations."""
    rows: list[msgspec.Raw] = []
    told: list[msgspec.Raw] = []
    skipped: list[Skipped] = []
    for group in groups:
        for seq, _, kind, payload, parked in group:
            if parked is not None:
                skipped.append(Skipped(seq, parked))
            else:
                (told if kind == FACTS else rows).append(_numbered(payload, seq, kind))
    return Pending(
        first_seq=groups[0][0][0],
        last_seq=groups[-1][-1][0],
        oldest_seq=oldest_seq,
        units=len(groups),
        rows=tuple(rows),
        told=tuple(told),
        skipped=tuple(skipped),
    )


def _numbered(payload: bytes, seq: int, kind: int) -> msgspec.Raw:
    """A stored record as it is sent. Its number is the first field of either kind, and its key here."""
    if payload.startswith(_UNNUMBERED):
        return msgspec.Raw(b'{"seq":%d,' % seq + payload[len(_UNNUMBERED) :])
    record = (_facts if kind == FACTS else _interval).decode(payload)
    return msgspec.Raw(msgspec.json.encode(msgspec.structs.replace(record, seq=seq)))
