"""What an import is answered with: one description for who answers and who asks. Times are UTC ms."""

from __future__ import annotations

from accountant.wire import Model


class DoneSpan(Model):
    """A chunk that was noted."""

    epoch: str
    start_ms: int
    end_ms: int


class MeteredSpan(Model):
    """Agents booked records of this node from start_ms to end_ms: an import leaves the whole span alone."""

    node: str
    start_ms: int
    end_ms: int


class ImportMark(Model):
    """The highest number of a node's import that is committed."""

    node: str
    epoch: str
    durable_seq: int


class ImportState(Model):
    """How far an import came, and what it leaves alone."""

    done: tuple[DoneSpan, ...]
    marks: tuple[ImportMark, ...]
    metered: tuple[MeteredSpan, ...]


class Noted(Model):
    """new: false where this chunk was noted before."""

    new: bool
