"""Decodes request bodies, and commits waiting batches together.

A commit costs one sync of the log for any number of batches, so one thread takes the waiting batches, up to about
`MOST_ROWS` rows, and books them in one transaction. It waits for more batches, at most `linger_ms`, only while several
senders are active, and only until as many have arrived as there were senders recently, because a sender waits for its
answer before it sends again. After two commits with a single sender it does not wait any more. A future is resolved
only after the commit."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec

from accountant.core.errors import ArchiveUnavailable, BadBatch, LedgerFailed, LedgerUnavailable
from accountant.core.import_epochs import is_import
from accountant.core.record_faults import has_controls
from accountant.ledger.protocols import Ledger, Receipt
from agent.wire import SCHEMA, Batch, Gap, Labels, PodFacts
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import Clock
from gputally.base.errors import AccountantError
from gputally.base.pod_stop import bounded
from gputally.base.untrusted_text import UNDECODABLE, unprintable

MOST_RECORDS = 20_000
"""Maximum number of records in one batch; larger ones have to be split."""
MOST_REASON = 1_000
"""Maximum length of the stored reason why a number was skipped."""
MOST_GAPS = 64
MOST_GAP_REASON = 128
"""Maximum number of gaps of a row, and of characters of their reasons, that are stored. A checkpoint writes up to a
hundred thousand rows of a table again while senders wait, so each row has to be small. Agents send up to 32 gaps."""
MOST_BATCHES = 4_000
"""Maximum number of batches in one transaction."""
MOST_ROWS = 2_500
"""Rows of one transaction: a group that reaches it takes no further batch. While rows are checked, queries wait for the
interpreter's lock. With four times as many rows, a row costs a tenth less, but one query in a hundred takes up to four
times as long."""
MOST_WAITING = 10_000
"""Maximum number of waiting batches; further ones are refused until the writer has caught up."""


class _Head(msgspec.Struct):
    """The part of a batch that says whether this release can decode the batch."""

    schema: int = SCHEMA


_head = msgspec.json.Decoder(_Head)
_batch = msgspec.json.Decoder(Batch)


@dataclass(frozen=True, slots=True)
class _Waiting:
    batch: Batch
    future: Future[Receipt] = field(default_factory=Future)

    @property
    def records(self) -> int:
        return _records(self.batch)


def _records(batch: Batch) -> int:
    return len(batch.intervals) + len(batch.facts) + len(batch.skipped)


def decode(raw: bytes) -> Batch:
    """Decodes a body. Raises BadBatch: malformed-batch, unknown-schema, too-large or invalid-batch."""
    try:
        batch = _batch.decode(raw)
    except msgspec.ValidationError as error:
        schema = _schema(raw)
        raise (BadBatch("invalid-batch", str(error)) if schema == SCHEMA else _unknown(schema)) from error
    except UNDECODABLE as error:
        raise BadBatch("malformed-batch", str(error)) from error
    if batch.schema != SCHEMA:
        raise _unknown(batch.schema)
    if _records(batch) > MOST_RECORDS:
        raise BadBatch(
            "too-large", f"the batch has {_records(batch)} records, and {MOST_RECORDS} are the most: split it"
        )
    if any(fact.stop is not None for fact in batch.facts):
        batch = msgspec.structs.replace(batch, facts=with_short_stops(batch.facts))
    return _shortened(_printable(batch))


def with_short_stops(facts: Sequence[PodFacts]) -> tuple[PodFacts, ...]:
    """The facts with reasons of stops of one line and bounded length: they quote what other programs wrote."""
    return tuple(
        fact if fact.stop is None else msgspec.structs.replace(fact, stop=bounded(fact.stop)) for fact in facts
    )


def _printable(batch: Batch) -> Batch:
    """The batch without labels and requests that contain control characters. Otherwise the author of a pod could cause
    the facts of the node to be refused."""
    if not has_controls(*batch.facts):
        return batch
    facts = tuple(
        msgspec.structs.replace(fact, labels=_printable_labels(fact.labels), requests=_printable_labels(fact.requests))
        for fact in batch.facts
    )
    return msgspec.structs.replace(batch, facts=facts)


def _printable_labels(texts: Labels) -> Labels:
    return {key: text for key, text in texts.items() if not unprintable([key, text])}


def _shortened(batch: Batch) -> Batch:
    """The batch with shortened reasons and no more than MOST_GAPS gaps in a row. Otherwise a node with a long reason
    would be refused forever."""
    skipped, intervals = batch.skipped, batch.intervals
    if any(len(one.reason) > MOST_REASON for one in skipped):
        skipped = tuple(msgspec.structs.replace(one, reason=one.reason[:MOST_REASON]) for one in skipped)
    if any(row.gaps and _are_long(row.gaps) for row in intervals):
        intervals = tuple(msgspec.structs.replace(row, gaps=_few(row.gaps)) for row in intervals)
    if skipped is batch.skipped and intervals is batch.intervals:
        return batch
    return msgspec.structs.replace(batch, skipped=skipped, intervals=intervals)


def _are_long(gaps: Sequence[Gap]) -> bool:
    return len(gaps) > MOST_GAPS or any(len(gap.reason) > MOST_GAP_REASON for gap in gaps)


def _few(gaps: Sequence[Gap]) -> tuple[Gap, ...]:
    """The gaps as they are stored. Those beyond MOST_GAPS are joined, as the agent does, which overstates the unknown
    time."""
    kept, rest = gaps[: MOST_GAPS - 1], gaps[MOST_GAPS - 1 :]
    if rest:
        kept = (*kept, Gap(min(gap.start_ms for gap in rest), max(gap.end_ms for gap in rest), rest[0].reason))
    return tuple(Gap(gap.start_ms, gap.end_ms, gap.reason[:MOST_GAP_REASON]) for gap in kept)


def _schema(raw: bytes) -> int:
    """The schema version in a body that is not a valid batch."""
    try:
        return _head.decode(raw).schema
    except UNDECODABLE:
        return SCHEMA


def _unknown(schema: int) -> BadBatch:
    return BadBatch(
        "unknown-schema",
        f"the batch has the schema {schema}, and this accountant reads {SCHEMA}: upgrade the accountant first",
    )


class Ingest:
    """The only writer of usage.

    linger_ms: how long to wait for more batches when several arrive together.
    fatal: called once when the ledger needs a restart of the process.
    most_waiting: maximum number of waiting batches.
    heard: called with the cluster, the node and the sending time of a decoded batch, before it is booked."""

    def __init__(
        self,
        ledger: Ledger,
        clock: Clock,
        linger_ms: int = 10,
        fatal: Callable[[LedgerFailed], None] | None = None,
        most_waiting: int = MOST_WAITING,
        tasks: BackgroundTasks | None = None,
        heard: Callable[[str, str, int | None], None] | None = None,
    ) -> None:
        self._heard = heard
        self._ledger = ledger
        self._clock = clock
        self._linger_s = linger_ms / 1000
        self._fatal = fatal
        self._failure: LedgerFailed | None = None
        self._queue: queue.Queue[_Waiting | None] = queue.Queue(most_waiting)
        self._closing = threading.Lock()
        self._closed = False
        self._task = (tasks or BackgroundTasks(clock)).add("ledger-writer", serves=True)
        self._thread = threading.Thread(target=self._run, name="ledger-writer", daemon=True)
        self._thread.start()
        self._task.watch(self._thread)

    def submit(self, raw: bytes, *, votes: bool = False) -> Future[Receipt]:
        """Decodes and queues a batch. Raises BadBatch at once; the future returns the Receipt after the commit, or
        raises BadBatch, SequenceGap, LedgerUnavailable or LedgerFailed.

        votes: whether the sender's clock counts (`heard`), because the sender may report for this node alone."""
        batch = decode(raw)
        if is_import(batch.epoch):
            raise BadBatch("invalid-batch", "the batch has the epoch of an import: send it to /v1/imports/usage")
        if votes and self._heard is not None:
            self._heard(batch.cluster, batch.node, batch.sent_ms)
        return self.submit_batch(batch)

    def submit_batch(self, batch: Batch) -> Future[Receipt]:
        """Like `submit`, for a batch that is already decoded, whose sender has no vote."""
        waiting = _Waiting(batch)
        with self._closing:
            if self._failure is not None:
                waiting.future.set_exception(self._failure)
            elif self._closed:
                waiting.future.set_exception(LedgerUnavailable("the accountant is stopping: try again later"))
            else:
                try:
                    self._queue.put_nowait(waiting)
                except queue.Full:
                    waiting.future.set_exception(LedgerUnavailable("too many batches are waiting: try again later"))
        return waiting.future

    def close(self) -> None:
        """Books the waiting batches and stops. Idempotent."""
        with self._closing:
            first = not self._closed
            self._closed = True
        self._task.end()
        if first:
            self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        before = senders = 1
        more = True
        while more:
            group, more = self._gather(max(before, senders))
            if group:
                self._task.begin()
                self._book(group)
                self._task.succeed()
            # Batches that arrived during the commit count as concurrent; otherwise two alternating groups of senders
            # would be booked separately forever.
            before, senders = senders, len(group) + self._queue.qsize()

    def _gather(self, crowd: int) -> tuple[list[_Waiting], bool]:
        """Waits for the next group of batches. Returns it, and False if the ingest is closing. crowd: number of batches
        that are expected to arrive together."""
        group: list[_Waiting] = []
        rows = 0
        until: float | None = None
        while len(group) < MOST_BATCHES and rows < MOST_ROWS:
            try:
                if not group:
                    item = self._queue.get()
                elif until is not None and len(group) < crowd and (left := until - time.monotonic()) > 0:
                    item = self._queue.get(timeout=left)
                else:
                    item = self._queue.get_nowait()
            except queue.Empty:
                break
            if item is None:
                return group, False
            group.append(item)
            rows += item.records
            if until is None:
                until = time.monotonic() + self._linger_s
        return group, True

    def _book(self, group: list[_Waiting]) -> None:
        for waiting, result in zip(group, self._append(group), strict=True):
            if not waiting.future.set_running_or_notify_cancel():
                continue
            if isinstance(result, Exception):
                waiting.future.set_exception(result)
            else:
                waiting.future.set_result(result)

    def _append(self, group: list[_Waiting]) -> list[Receipt | Exception]:
        if self._failure is not None:
            return [self._failure] * len(group)
        try:
            return self._ledger.append([waiting.batch for waiting in group], self._clock.wall_ms())
        except LedgerFailed as failure:
            self._fail(failure)
            return [failure] * len(group)
        except Exception as error:  # noqa: BLE001 - a defect that one batch brings out must not stop the others
            concerns_all = isinstance(error, AccountantError) and not isinstance(error, ArchiveUnavailable)
            if len(group) == 1 or concerns_all:
                return [error] * len(group)
            return [result for waiting in group for result in self._append([waiting])]

    def _fail(self, failure: LedgerFailed) -> None:
        with self._closing:
            first = self._failure is None
            self._failure = failure
        if first and self._fatal is not None:
            self._fatal(failure)
