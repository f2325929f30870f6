"""Stores unsent intervals and pod facts on disk until the accountant has stored them safely.

`Outbox` is the queue of unsent records, on top of `agent.upload.spool_file`. `append` is one transaction, and a row is
sent only after `append` has returned. Invariants:

- Sequence numbers run from 1 without a hole within an epoch and are never used twice. The epoch is a UUIDv7 made with
  the file: if the file is lost, a new epoch begins.
- Rows are sent from `durable_seq` + 1 on. They are deleted once the accountant has archived them (acknowledged as
  `archived_seq`), or, if it has no archive, once a checkpoint contains them (`checkpointed_seq`). If the outbox or its
  volume is full, checkpointed rows are deleted before they are archived. Rows are sent again if the accountant has
  fewer than before (its ledger was restored from a backup).
- A set (the rows of one GPU over one span) is one unit: it is stored, sent, parked and refused as a whole. A unit that
  cannot be decoded is sent as skipped numbers.
- Size and age are limited. The outbox keeps the oldest rows and refuses new ones that do not fit. For each
  uninterrupted period of refusals it uses one sequence number, which it sends as "skipped", so the accountant sees the
  loss. The log names the time of each refused set.
- The newest number, the accountant's acknowledged numbers and the totals (`SpoolMarks`) change in the same transaction
  as the records that they describe.

The module neither uses the network nor checks rows."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from agent.upload.spool_file import (
    FACTS,
    INTERVAL,
    LOSS,
    METER_STATE,
    RESERVE_BYTES,
    ROW_OVERHEAD,
    SPOOL_DAMAGED,
    SYSTEM_RANDOM,
    OutboxUnavailable,
    Spool,
    SpoolRecord,
    loss,
    renumbered,
    uuid7_ms,
)
from agent.wire import Ack, PodFacts, Skipped, UsageInterval
from gputally.base.clock import Clock
from gputally.base.units import MS_PER_DAY
from gputally.base.untrusted_text import UNDECODABLE

if TYPE_CHECKING:
    from agent.metering.meter import ClosedSet

log = logging.getLogger("agent.upload.spool")


class Appended(msgspec.Struct, frozen=True):
    """The result of one `append`.

    last_seq: the newest assigned number.
    refused_sets, refused_facts: numbers of sets and facts that were lost because the outbox is full."""

    last_seq: int
    refused_sets: int = 0
    refused_facts: int = 0


class LostRecords(msgspec.Struct, frozen=True):
    """Numbers of sets and facts that could not be stored. The rows of the sets are within [first_ms, last_ms)."""

    first_ms: int
    last_ms: int
    sets: int
    facts: int


class Pending(msgspec.Struct, frozen=True):
    """The next records to send: every number from `first_seq` to `last_seq`, in whole units.

    oldest_seq: the oldest stored number.
    units: the number of units."""

    first_seq: int
    last_seq: int
    oldest_seq: int
    units: int
    intervals: tuple[UsageInterval, ...]
    facts: tuple[PodFacts, ...]
    skipped: tuple[Skipped, ...]


class Stats(msgspec.Struct, frozen=True):
    """Figures about the outbox. Unless the name gives another unit, they are numbers of records.

    rows, bytes: stored records and their size.
    unsent_rows: records that the accountant has not stored durably.
    oldest_age_ms: age of the oldest of these; 0 if there is none.
    parked: stored records whose numbers are declared as skipped.
    lost_sets: sets that the outbox has refused for lack of space since it was created.
    unspooled_sets: sets that were lost because the spool could not be written, since the outbox was created.
    released_early: records that were deleted before they were archived, for lack of space, since the outbox was
        created."""

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


def encode(record: UsageInterval | PodFacts) -> bytes:
    """Encode a record for storage: its wire form with the number 0, because its number is the key in the file."""
    return msgspec.json.encode(record if record.seq == 0 else msgspec.structs.replace(record, seq=0))


def shifted_row(row: UsageInterval, by_ms: int) -> UsageInterval:
    """Return the row with its times shifted by `by_ms`."""
    gaps = tuple(
        msgspec.structs.replace(gap, start_ms=gap.start_ms + by_ms, end_ms=gap.end_ms + by_ms) for gap in row.gaps
    )
    return msgspec.structs.replace(row, start_ms=row.start_ms + by_ms, end_ms=row.end_ms + by_ms, gaps=gaps)


def shifted_facts(facts: PodFacts, by_ms: int) -> PodFacts:
    """Return a pod's facts with the time of observation shifted by `by_ms`. Their other times do not come from the
    node's clock."""
    return msgspec.structs.replace(facts, observed_ms=facts.observed_ms + by_ms)


def within(groups: list[list[SpoolRecord]], max_bytes: int, max_units: int | None) -> list[list[SpoolRecord]]:
    """Return the first groups that fit into `max_bytes`: at least one, and at most `max_units` (None: no limit)."""
    fitting: list[list[SpoolRecord]] = []
    size = 0
    for group in groups[:max_units]:
        size += sum([len(record.payload) for record in group])
        if fitting and size > max_bytes:
            break
        fitting.append(group)
    return fitting


def assemble(groups: list[list[SpoolRecord]], oldest_seq: int) -> Pending:
    """Return the records of these units as they are sent: with their numbers, and parked ones as skipped numbers. A
    unit that cannot be decoded is skipped too."""
    intervals: list[UsageInterval] = []
    facts: list[PodFacts] = []
    skipped: list[Skipped] = []
    for group in groups:
        try:
            sent = [(r.kind, _decoded(r)) for r in group if r.parked is None]
        except UNDECODABLE as error:
            extra = {"seq": group[0].seq, "reason": str(error)}
            log.critical("records cannot be decoded and are skipped", extra=extra)
            skipped += [Skipped(record.seq, SPOOL_DAMAGED) for record in group]
            continue
        intervals += [record for _, record in sent if isinstance(record, UsageInterval)]
        facts += [record for _, record in sent if isinstance(record, PodFacts)]
        skipped += [Skipped(record.seq, record.parked) for record in group if record.parked is not None]
    first, last = groups[0][0].seq, groups[-1][-1].seq
    return Pending(first, last, oldest_seq, len(groups), tuple(intervals), tuple(facts), tuple(skipped))


def _decoded(record: SpoolRecord) -> UsageInterval | PodFacts:
    """Return the record with its number. Raises ValueError, RecursionError."""
    decoder = _facts if record.kind == FACTS else _interval
    return msgspec.structs.replace(decoder.decode(record.payload), seq=record.seq)


DEFAULT_MAX_BYTES = 512 * 1024 * 1024
DEFAULT_MAX_AGE_MS = 7 * MS_PER_DAY
REMOVED_AT_ONCE = 100
"""Number of records that one transaction removes when the volume is nearly full."""
OUTBOX_FULL = "outbox-full"
"""Reason of the skipped number for records refused while the outbox was full."""
SPOOL_UNWRITABLE = "spool-unwritable"
"""Reason of the skipped number for records lost in memory because the disk could not be written."""
LOSSES = frozenset({OUTBOX_FULL, SPOOL_UNWRITABLE})


class Outbox:
    """The queue of unsent records. The constructor raises OutboxLocked, OutboxUnavailable; every other method that uses
    the file raises OutboxUnavailable.

    path: the sqlite file; its folder is created.
    max_bytes: limit of payloads and record overhead.
    max_age_ms: age of the oldest unconfirmed record above which the outbox refuses new records.
    fsync: False trades durability for speed, in simulations.
    patient: True to open the file later if the disk cannot be written now. Until then all calls raise
        OutboxUnavailable.
    randbits: returns random bits for the id of the epoch.
    free_bytes: returns the free bytes of the volume; None asks the operating system."""

    def __init__(
        self,
        path: Path,
        clock: Clock,
        max_bytes: int = DEFAULT_MAX_BYTES,
        max_age_ms: int = DEFAULT_MAX_AGE_MS,
        *,
        fsync: bool = True,
        patient: bool = False,
        randbits: Callable[[int], int] = SYSTEM_RANDOM.getrandbits,
        free_bytes: Callable[[], int] | None = None,
    ) -> None:
        self.path = path
        self._free_bytes = free_bytes or self._volume_bytes
        self._clock = clock
        self._max_bytes = max_bytes
        self._max_age_ms = max_age_ms
        self._spool = Spool(path, clock, fsync=fsync, patient=patient, randbits=randbits, free_bytes=self._free_bytes)
        self.forgotten = 0
        """How often the accountant had lost records that the outbox does not contain any more either."""

    @property
    def epoch(self) -> str:
        return self._spool.marks.epoch

    @property
    def last_seq(self) -> int:
        """The newest number that was assigned."""
        return self._spool.marks.last_seq

    @property
    def durable_seq(self) -> int:
        """The newest number that the accountant has stored durably."""
        return self._spool.marks.durable_seq

    # --- writing ---------------------------------------------------------------------------------

    def append(
        self, sets: Sequence[ClosedSet], facts: Sequence[PodFacts], meter_state: bytes | None, origin: int = 0
    ) -> Appended:
        """Number and store records in one transaction: first the facts, which name the owners of the rows, then the
        sets. A full outbox stores only their loss.

        meter_state: the meter's state to store; None leaves the stored state unchanged.
        origin: the id of the clock origin that dated the records; 0 if none is known.

        Raises OutboxUnavailable; then nothing was stored and no number was used."""
        units = [(FACTS, [encode(fact)]) for fact in facts]
        units += [(INTERVAL, [encode(row) for row in closed.rows]) for closed in sets if closed.rows]
        size = sum([len(payload) + ROW_OVERHEAD for _, payloads in units for payload in payloads])
        refused = (0, 0)
        now = self._clock.wall_ms()
        has_room = self._make_room(now, size)
        with self._spool.transaction():
            if units and not has_room:
                refused = (len(units) - len(facts), len(facts))
                self._spool.mark(lost_sets=self._spool.marks.lost_sets + refused[0])
                lost = lost_records(sets, len(facts), now)
                log.error(
                    "the outbox is full: records are lost, and their time stays unmetered",
                    extra=msgspec.structs.asdict(lost),
                )
                self._record_loss(OUTBOX_FULL, now)
            elif units:
                self._insert(units, size, now, origin)
            if meter_state is not None:
                self._spool.put(METER_STATE, meter_state)
            return Appended(self.last_seq, *refused)

    def declare(self, sets: int) -> None:
        """Store that sets or facts were lost before they were appended, after all earlier records. Raises
        OutboxUnavailable.

        sets: the number of the lost sets."""
        with self._spool.transaction():
            self._spool.mark(unspooled_sets=self._spool.marks.unspooled_sets + sets)
            self._record_loss(SPOOL_UNWRITABLE, self._clock.wall_ms())

    def acknowledge(self, ack: Ack) -> None:
        """Apply the accountant's marks: send from `durable_seq` on, and delete the records that the accountant has
        stored safely.

        If the marks decreased, because the accountant's ledger was restored, the stored records are sent again. Marks
        beyond the newest assigned number mean that this file is an old copy of the outbox. Then a new epoch begins, the
        stored records get new numbers, and the accountant resolves the overlap. An answer for another epoch is
        ignored."""
        with self._spool.transaction():
            if ack.epoch != self.epoch:
                log.warning("answer for another epoch ignored", extra={"answered": ack.epoch, "epoch": self.epoch})
                return
            if ack.durable_seq > self.last_seq:
                log.error("the accountant has records of this epoch that the outbox never numbered: a new epoch begins")
                self._renumber()
                return
            if ack.durable_seq < self.durable_seq:
                log.warning("the accountant lost records: they are sent again", extra={"from_seq": ack.durable_seq + 1})
                self.forgotten += self._spool.marks.oldest_seq > ack.durable_seq + 1
            self._spool.mark(durable_seq=ack.durable_seq, checkpointed_seq=min(ack.checkpointed_seq, ack.durable_seq))
            safe = ack.checkpointed_seq if ack.archived_seq is None else ack.archived_seq
            upto = min(safe, ack.durable_seq)
            if not self._is_volume_nearly_full():
                self._spool.remove(upto)
        self._remove_in_steps(upto)

    def park(self, seq: int, reason: str) -> None:
        """Declare the numbers of the unit that contains `seq` as skipped from now on, instead of sending its
        records."""
        self._set_parked(seq, reason)

    def unpark(self, seq: int) -> None:
        """Send the records of the unit that contains `seq` again, because the fault was not in them."""
        self._set_parked(seq, None)

    # --- reading ---------------------------------------------------------------------------------

    def pending(
        self, max_rows: int, max_bytes: int, max_units: int | None = None, upto: int | None = None
    ) -> Pending | None:
        """Return the next records to send, at least one unit; None if the accountant has all records.

        max_rows, max_bytes, max_units: limits; a single unit may exceed `max_rows` and `max_bytes`.
        upto: the newest number to send; None for all."""
        with self._spool.reading():
            oldest = self._spool.marks.oldest_seq
            first = max(self.durable_seq + 1, oldest)
            last = self.last_seq if upto is None else upto
            records = self._spool.records("seq BETWEEN ? AND ? ORDER BY seq LIMIT ?", first, last, max_rows + 1)
            if not records:
                return None
            groups = [list(group) for _, group in groupby(records, key=attrgetter("unit"))]
            if len(records) > max_rows:
                groups.pop()  # the limit may have cut this group off
            if not groups:
                unit = records[0].unit
                groups = [self._spool.records("seq BETWEEN ? AND ? ORDER BY seq", unit, unit + records[0].size - 1)]
        return assemble(within(groups, max_bytes, max_units), oldest)

    def inquiry(self) -> Pending | None:
        """Return a batch without records, whose answer contains the accountant's newest marks; None if the outbox
        contains no record that the accountant has.

        Without it, sent records would stay until there are new ones, and a full outbox would never accept new ones."""
        with self._spool.reading():
            oldest, following = self._spool.marks.oldest_seq, self.durable_seq + 1
            return Pending(following, following - 1, oldest, 0, (), (), ()) if oldest < following else None

    def meter_state(self) -> bytes | None:
        """Return the meter's state that `append` stored last; None if there is none."""
        return self.stored_value(METER_STATE)

    def stored_value(self, key: str) -> bytes | None:
        """Return a value stored beside the records; None if there is none."""
        with self._spool.reading():
            return self._spool.get(key)

    def store_value(self, key: str, value: bytes) -> None:
        """Store a value beside the records."""
        with self._spool.transaction():
            self._spool.put(key, value)

    def shift_times(self, by_ms: Mapping[int, int], key: str, value: bytes) -> int:
        """Shift the times of the unconfirmed records, by the id of the clock origin that dated them, and store a value
        in the same transaction. Return the number of shifted records."""

        def shifted(record: SpoolRecord) -> SpoolRecord | None:
            error_ms = by_ms.get(record.origin)
            if error_ms is None or record.kind == LOSS:
                return None
            try:
                decoded = _decoded(record)
            except UNDECODABLE:
                return None  # `assemble` declares it
            if isinstance(decoded, PodFacts):
                return record._replace(payload=encode(shifted_facts(decoded, error_ms)))
            return record._replace(payload=encode(shifted_row(decoded, error_ms)))

        with self._spool.transaction():
            count = self._spool.update("seq > ?", (self.durable_seq,), shifted)
            self._spool.put(key, value)
        return count

    def stats(self) -> Stats:
        """Return the figures for the metrics."""
        with self._spool.reading():
            oldest = self._oldest_unsent_ms()
            marks = self._spool.marks
            return Stats(
                rows=marks.rows,
                unsent_rows=self.last_seq - max(self.durable_seq, marks.oldest_seq - 1),
                bytes=marks.bytes,
                oldest_age_ms=0 if oldest is None else max(0, self._clock.wall_ms() - oldest),
                parked=marks.parked,
                lost_sets=marks.lost_sets,
                unspooled_sets=marks.unspooled_sets,
                released_early=marks.released_early,
            )

    def close(self) -> None:
        """Close the file and release the lock. Idempotent."""
        self._spool.close()

    # --- internal --------------------------------------------------------------------------------

    def _insert(self, units: Sequence[tuple[int, Sequence[bytes]]], size: int, now: int, origin: int) -> None:
        """Store units at the end of the outbox.

        units: (kind, payloads) of each.
        size: the size of all units in bytes."""
        records = []
        seq = self.last_seq
        for kind, payloads in units:
            unit = seq + 1
            for payload in payloads:
                seq += 1
                records.append(SpoolRecord(seq, unit, len(payloads), kind, origin, now, None, payload).sealed())
        self._spool.insert(records)
        marks = self._spool.marks
        self._spool.mark(last_seq=seq, rows=marks.rows + len(records), bytes=marks.bytes + size)

    def _volume_bytes(self) -> int:
        """Return the free bytes for this process on the outbox's volume."""
        try:
            volume = os.statvfs(self.path.parent)
        except OSError:
            return 2**62  # for example if the folder is missing: writing creates it or reports the fault
        return volume.f_bavail * volume.f_frsize

    def _is_volume_nearly_full(self) -> bool:
        """Return True if the volume may lack space for the journal of a transaction that removes all records."""
        return self._free_bytes() < RESERVE_BYTES + 2 * self._spool.marks.bytes

    def _make_room(self, now: int, size: int) -> bool:
        """Make room for `size` bytes, if necessary by deleting records that the accountant has checkpointed. Return
        False if the outbox has no room, or if the oldest unsent record is too old.

        Raises OutboxUnavailable if storing `size` bytes would leave too little space on the volume for removing sent
        records."""
        needed = RESERVE_BYTES + 2 * size
        if self._room_bytes(needed) < needed or self._spool.marks.bytes + size > self._max_bytes:
            # Checkpointed records are needed only if the accountant's volume is lost. New records have no other copy.
            self._remove_in_steps(self._spool.marks.checkpointed_seq, early=True)
            if (room := self._room_bytes(needed)) < needed:
                raise OutboxUnavailable(
                    f"outbox {self.path} cannot be written: {room // 1024} KiB of its volume are free, and "
                    f"{needed // 1024} KiB are needed, including {RESERVE_BYTES // 1024} KiB for removing sent "
                    "records; free some space on the volume"
                )
        with self._spool.reading():
            oldest = self._oldest_unsent_ms()
        too_old = oldest is not None and now - oldest > self._max_age_ms
        return not too_old and self._spool.marks.bytes + size <= self._max_bytes

    def _room_bytes(self, needed: int) -> int:
        """Return the bytes that records can use: those of the volume, and, if these are not enough, those that removed
        records left in the file."""
        free = self._free_bytes()
        return free if free >= needed else free + self._spool.unused_bytes()

    def _remove_in_steps(self, upto: int, *, early: bool = False) -> None:
        """Delete the records up to a number, a few at a time if the volume is nearly full. early: before the accountant
        has archived them."""
        removed, count = 0, 1
        while count and (oldest := self._spool.marks.oldest_seq) <= upto:
            last = min(upto, oldest + REMOVED_AT_ONCE - 1) if self._is_volume_nearly_full() else upto
            with self._spool.transaction():
                count = self._spool.remove(last)
                if early:
                    self._spool.mark(released_early=self._spool.marks.released_early + count)
            removed += count
        if early and removed:
            log.warning("the outbox is full: records are deleted before they are archived", extra={"rows": removed})

    def _record_loss(self, reason: str, now: int) -> None:
        """Record a loss. One skipped number stands for an uninterrupted period of losses."""
        newest = self._spool.records("seq = ?", self.last_seq)
        if [(record.kind, record.parked) for record in newest] != [(LOSS, reason)]:
            marks = self._spool.marks
            self._spool.insert([loss(self.last_seq + 1, now, reason)])
            self._spool.mark(
                last_seq=self.last_seq + 1,
                rows=marks.rows + 1,
                bytes=marks.bytes + ROW_OVERHEAD,
                parked=marks.parked + 1,
            )

    def _renumber(self) -> None:
        if shift := self._spool.marks.oldest_seq - 1:
            self._spool.update("seq > ?", (0,), lambda record: renumbered(record, -shift))
        # The new epoch is later than the old one, even if the clock is wrong: of records sent under both epochs, those
        # of the earlier one count.
        at_ms = max(self._clock.wall_ms(), uuid7_ms(self.epoch) + 1)
        self._spool.mark(
            epoch=self._spool.new_epoch(at_ms),
            last_seq=self.last_seq - shift,
            durable_seq=0,
            checkpointed_seq=0,
        )

    def _set_parked(self, seq: int, reason: str | None) -> None:
        with self._spool.transaction():
            for record in self._spool.records("seq = ? AND kind <> ?", seq, LOSS):
                members = (record.unit, record.unit + record.size - 1)
                self._spool.update("seq BETWEEN ? AND ?", members, lambda one: one._replace(parked=reason))

    def _oldest_unsent_ms(self) -> int | None:
        query = "SELECT appended_ms FROM record WHERE seq > ? ORDER BY seq LIMIT 1"
        oldest = self._spool.db.execute(query, (self.durable_seq,)).fetchone()
        return None if oldest is None else int(oldest[0])


def lost_records(sets: Sequence[ClosedSet], facts: int, now_ms: int) -> LostRecords:
    """Return the loss of these sets and of `facts` facts. Without sets, the loss is dated `now_ms`."""
    rows = [row for closed in sets for row in closed.rows]
    first_ms = min((row.start_ms for row in rows), default=now_ms)
    last_ms = max((row.end_ms for row in rows), default=now_ms)
    return LostRecords(first_ms, last_ms, sum(1 for closed in sets if closed.rows), facts)
