"""Sends batches at least once: follows refusals, retries with back-off, splits batches that are too large.

The uploader follows the protocol's rules for refusals exactly, because each of them affects time that a team pays for:

- 401, 403, 429, 5xx, no answer, and every answer that is not the accountant's (its problem `type` is another, as from a
  proxy or a captive portal): tried again after back-off, nothing dropped.
- 413, from the accountant or a proxy: smaller batches. 409 of the accountant with an Ack: continue from the
  accountant's number.
- 400 and 422 of the accountant (and 413 at a single set): halve the batch until one set is left, declare that set as
  skipped ("parked") and continue. If the declaration is refused as well, the fault is in the batch's own fields: unpark
  the set and wait.

The uploader has no thread and does not sleep: the caller calls again after `retry_in_ms`. Clock and randomness are
arguments. It never logs a token and never follows a redirect.

A record's clock line is the difference between the agent's time and the monotonic clock. Setting the clock moves this
line. Within one boot of the node the monotonic clock shows exactly by how much. Unsent records that were dated by a
wrong line can therefore be corrected."""

from __future__ import annotations

import gzip
import logging
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Final, Literal, cast

import msgspec

from agent.core.errors import TokenUnavailable
from agent.core.lean_http_client import Answer, HttpSender, Identity, TokenFile, Unreachable
from agent.upload.spool import LOSSES, Outbox, Pending
from agent.wire import PROBLEM, Ack, Batch, PodFacts, UsageInterval
from gputally.base.clock import Clock
from gputally.base.units import MS_PER_MINUTE

WRONG_MS: Final = 5 * MS_PER_MINUTE
"""Difference above which two clock lines come from different clock settings. The accountant refuses records that are
this far ahead of its clock."""
_MOST: Final = 100
_KEY: Final = "clock_lines"


class Line(msgspec.Struct, frozen=True):
    """The clock line of records from `after` + 1 on, in this boot of the node."""

    after: int
    boot_id: str
    line_ms: int


class _StoredClockLines(msgspec.Struct, frozen=True):
    lines: tuple[Line, ...] = ()
    accountant: Line | None = None


_decoder = msgspec.json.Decoder(_StoredClockLines)


class ClockLines:
    """The clock lines, stored in the outbox. Raises OutboxUnavailable."""

    def __init__(self, outbox: Outbox, boot_id: str) -> None:
        self._outbox = outbox
        self._boot_id = boot_id
        stored = outbox.kept(_KEY)
        try:
            self._kept = _StoredClockLines() if stored is None else _decoder.decode(stored)
        except msgspec.MsgspecError:
            self._kept = _StoredClockLines()

    @property
    def accountant_ms(self) -> int | None:
        """Return the accountant's clock line, from its last answer in this boot."""
        told = self._kept.accountant
        return told.line_ms if told is not None and told.boot_id == self._boot_id else None

    @property
    def last(self) -> Line | None:
        """Return the newest line of this boot."""
        return next((one for one in reversed(self._kept.lines) if one.boot_id == self._boot_id), None)

    def opinion(self, line_ms: int) -> bool | None:
        """Return whether a line agrees with the accountant's answers; None if there was none in this boot."""
        known = self.accountant_ms
        return None if known is None else abs(known - line_ms) <= WRONG_MS

    def told(self, line_ms: int) -> None:
        """Record the accountant's line."""
        known = self.accountant_ms
        if known is None or abs(known - line_ms) > MS_PER_MINUTE:
            self._keep(msgspec.structs.replace(self._kept, accountant=Line(0, self._boot_id, line_ms)))

    def begin(self, line_ms: int) -> None:
        """Record that following records are dated by this line."""
        last = self.last
        if last is not None and last is self._kept.lines[-1] and abs(last.line_ms - line_ms) <= WRONG_MS:
            return
        lines = (*self._kept.lines, Line(self._outbox.last_seq, self._boot_id, line_ms))[-_MOST:]
        self._keep(msgspec.structs.replace(self._kept, lines=lines))

    def wrong(self, line_ms: int) -> bool:
        """Return whether unsent records were dated by another clock line of this boot."""
        return any(self._is_wrong(line, upto, line_ms) for line, upto in self._spans())

    def date_again(self, line_ms: int) -> int:
        """Correct the times of unsent records of this boot to this line; returns their number."""
        count = 0
        lines = []
        for line, upto in self._spans():
            if self._is_wrong(line, upto, line_ms):
                count += self._outbox.move(line.after + 1, upto, line_ms - line.line_ms)
                lines.append(msgspec.structs.replace(line, line_ms=line_ms))
            else:
                lines.append(line)
        if count:
            self._keep(msgspec.structs.replace(self._kept, lines=tuple(lines)))
        return count

    def _spans(self) -> list[tuple[Line, int]]:
        """Return each line with the last record that it dated."""
        lines = self._kept.lines
        ends = [*(line.after for line in lines[1:]), self._outbox.last_seq]
        return list(zip(lines, ends, strict=True))

    def _is_wrong(self, line: Line, upto: int, line_ms: int) -> bool:
        here = line.boot_id == self._boot_id and upto > max(line.after, self._outbox.durable_seq)
        return here and abs(line.line_ms - line_ms) > WRONG_MS

    def _keep(self, kept: _StoredClockLines) -> None:
        if kept != self._kept:
            self._outbox.keep(_KEY, msgspec.json.encode(kept))
            self._kept = kept


log = logging.getLogger("agent.upload")

BACKOFF_BASE_MS = 1_000
BACKOFF_CAP_MS = 300_000
RETRY_AFTER_CAP_MS = 3_600_000
AHEAD_RETRY_MS = 5_000
AHEAD_KEPT_MS = 3_600_000
"""How long records with a time after the accountant's are kept back."""
_SYSTEM_RANDOM = random.SystemRandom()

Outcome = Literal["idle", "waiting", "accepted", "rewound", "narrowed", "parked", "retry"]


@dataclass(frozen=True, slots=True)
class ShipResult:
    """The result of one step.

    rows: records that the accountant accepted.
    retry_in_ms: 0 = continue at once.

    idle: nothing to send. waiting: still backing off. accepted: stored by the accountant. rewound: the accountant is at
    another number, continue from there. narrowed: continue with fewer sets. parked: one set declared as skipped. retry:
    try later, nothing lost; `detail` says why."""

    outcome: Outcome
    rows: int = 0
    retry_in_ms: int = 0
    detail: str = ""

    @property
    def progress(self) -> bool:
        """Return whether another step should follow at once."""
        return self.outcome in ("accepted", "rewound", "narrowed", "parked")


class _Problem(msgspec.Struct):
    """The relevant fields of an RFC 9457 answer; a 409 of the accountant carries the marks in `ack`."""

    type: str = ""
    detail: str = ""
    ack: Ack | None = None

    @property
    def ours(self) -> bool:
        return self.type.startswith(PROBLEM)

    @property
    def slug(self) -> str:
        return self.type.removeprefix(PROBLEM)[:64]


_said = msgspec.json.Decoder(_Problem)
_ack = msgspec.json.Decoder(Ack)


class Uploader:
    """Sends the outbox to `{url}/v1/usage`; without a url it only answers `idle`.

    token_file (None: no Authorization header), ca_file: PEM of the authorities to trust (None: the system's), identity:
    the client certificate, beside or instead of a token: all are read again when they are renewed.

    max_rows, max_bytes: limits of one batch before compression; a single set may exceed them.
    compares_clocks: tell the accountant the time, and keep back records that are ahead of its clock. A simulation,
        which moves the clocks of nodes and accountant one after the other, does neither.

    Raises SettingsError for an invalid url."""

    def __init__(
        self,
        outbox: Outbox,
        url: str,
        cluster: str,
        node: str,
        boot_id: str,
        token_file: Path | None,
        clock: Clock,
        *,
        ca_file: Path | None = None,
        identity: Identity | None = None,
        max_rows: int = 2_000,
        max_bytes: int = 1_000_000,
        timeout_s: float = 30.0,
        compares_clocks: bool = True,
        jitter: Callable[[], float] = _SYSTEM_RANDOM.random,
    ) -> None:
        self.boot_id = boot_id
        self.parked: Counter[str] = Counter()
        """Records that the accountant accepted as skipped, by reason."""
        self._outbox = outbox
        self._cluster = cluster
        self._node = node
        self._clock = clock
        self._token = TokenFile(token_file) if token_file is not None else None
        self._sender = HttpSender(url, ca_file, timeout_s, identity) if url else None
        if self._sender is not None and self._token is not None and not self._sender.encrypted:
            log.warning("the token travels unencrypted: use https", extra={"url": url})
        self._compares_clocks = compares_clocks
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._jitter = jitter
        self._max_units: int | None = None
        self._failures = 0
        self._not_before_ms = 0
        self._held_since_ms: int | None = None
        self._told_ms: int | None = None
        self.lines = ClockLines(outbox, boot_id)
        """The clock lines of the records, and the accountant's time."""

    def ship(self, upto: int | None = None) -> ShipResult:
        """Try once. upto: send nothing newer than this number, which an `append` of the outbox returned. Raises
        OutboxUnavailable if the spool cannot be read or written."""
        if self._sender is None:
            return ShipResult("idle", detail="no accountant is configured")
        wait_ms = self._not_before_ms - self._clock.monotonic_ms()
        if wait_ms > 0:
            return ShipResult("waiting", retry_in_ms=wait_ms)
        pending = self._outbox.pending(self._max_rows, self._max_bytes, self._max_units, upto)
        if pending is None:
            return ShipResult("idle")
        if self._is_ahead(pending):
            return ShipResult("waiting", retry_in_ms=AHEAD_RETRY_MS, detail="dated after the accountant's time")
        began_ms = self._clock.monotonic_ms()
        try:
            answer = self._sender.post("/v1/usage", self._body(pending), self._headers())
        except (Unreachable, TokenUnavailable) as error:
            return self._retry(str(error))
        result = self._obey(answer, pending)
        self._hear(began_ms)
        return result

    def close(self) -> None:
        """Close the connection; the outbox is the caller's."""
        if self._sender is not None:
            self._sender.close()

    # --- time ------------------------------------------------------------------------------------

    def _is_ahead(self, pending: Pending) -> bool:
        """Return whether the accountant would refuse records as future-dated that a clock correction can still save.
        After an hour they are sent anyway, so that the refusal is visible there."""
        if not self._compares_clocks:
            return False
        told, now_ms = self.lines.accountant_ms, self._clock.monotonic_ms()
        newest = max((row.end_ms for row in pending.intervals), default=0) if told is not None else 0
        if told is None or newest <= told + now_ms + WRONG_MS:
            self._held_since_ms = None
            return False
        if self._held_since_ms is None:
            self._held_since_ms = now_ms
            log.error(
                "records are kept back: they are dated after the accountant's time",
                extra={"by_ms": newest - told - now_ms},
            )
        return now_ms - self._held_since_ms < AHEAD_KEPT_MS

    def _hear(self, began_ms: int) -> None:
        """Record the accountant's time, about half-way between request and answer."""
        if self._told_ms is not None:
            now_ms = self._clock.monotonic_ms()
            self.lines.told(self._told_ms - (began_ms + now_ms) // 2)
            self._told_ms = None

    # --- answers ---------------------------------------------------------------------------------

    def _obey(self, answer: Answer, pending: Pending) -> ShipResult:
        if 200 <= answer.status < 300:
            return self._accepted(answer, pending)
        problem = _problem(answer.body)
        if answer.status == 413 and pending.units > 1:
            return self._narrow(pending)  # a proxy's limit is a limit too
        if not problem.ours or answer.status in (401, 403, 429) or answer.status >= 500:
            return self._retry(f"HTTP {answer.status} {problem.slug or 'from something in between'}", answer)
        if answer.status == 409 and problem.ack is not None:
            return self._rewind(problem.ack, pending)
        if answer.status in (400, 413, 422):
            if pending.units > 1:
                return self._narrow(pending)
            declared_only = not pending.rows and not pending.told
            return self._unpark(pending, answer, problem) if declared_only else self._park(pending, problem)
        return self._retry(f"HTTP {answer.status} {problem.slug}", answer)

    def _accepted(self, answer: Answer, pending: Pending) -> ShipResult:
        try:
            ack = _ack.decode(answer.body)
        except msgspec.MsgspecError:
            return self._retry(f"HTTP {answer.status} without an Ack: not our accountant")
        self._told_ms = ack.clock_ms
        if ack.epoch != self._outbox.epoch:
            return self._retry("the Ack is for another epoch")
        self._outbox.acknowledge(ack)
        if ack.durable_seq < pending.first_seq:
            return self._retry("accepted, but nothing of it is durable yet")
        self._failures = 0
        self.parked.update(skip.reason for skip in pending.skipped if skip.reason not in LOSSES)
        if self._max_units is not None:
            self._max_units *= 2
            if self._max_units >= self._max_rows:
                self._max_units = None
        return ShipResult("accepted", rows=min(ack.durable_seq, pending.last_seq) - pending.first_seq + 1)

    def _rewind(self, ack: Ack, pending: Pending) -> ShipResult:
        if ack.epoch != self._outbox.epoch:
            return self._retry("409 with the marks of another epoch")
        self._outbox.acknowledge(ack)
        following = self._outbox.pending(1, 1, 1)
        if following is not None and following.first_seq == pending.first_seq:
            return self._retry(f"409, yet {pending.first_seq} is where the accountant asks to go on")
        log.warning("accountant asks to go on elsewhere", extra={"durable_seq": ack.durable_seq})
        return ShipResult("rewound", detail=f"durable_seq {ack.durable_seq}")

    def _narrow(self, pending: Pending) -> ShipResult:
        self._max_units = pending.units // 2
        return ShipResult("narrowed", detail=f"{self._max_units} sets at a time")

    def _park(self, pending: Pending, problem: _Problem) -> ShipResult:
        """Declare a set as skipped. Only this declaration is sent next, which tests whether the envelope is valid."""
        self._outbox.park(pending.first_seq, problem.slug)
        self._max_units = 1
        log.error(
            "record refused: parked",
            extra={"seq": pending.first_seq, "reason": problem.slug, "detail": problem.detail[:200]},
        )
        return ShipResult("parked", detail=f"{pending.first_seq}: {problem.slug}")

    def _unpark(self, pending: Pending, answer: Answer, problem: _Problem) -> ShipResult:
        self._outbox.unpark(pending.first_seq)
        return self._retry(f"the accountant refuses the envelope itself: {problem.slug}", answer)

    def _retry(self, detail: str, answer: Answer | None = None) -> ShipResult:
        """Exponential back-off with full jitter; Retry-After is a lower bound. Source: AWS Architecture
        Blog, "Exponential Backoff And Jitter" (2015); RFC 9110, 10.2.3."""
        ceiling = min(BACKOFF_CAP_MS, BACKOFF_BASE_MS << min(self._failures, 16))
        self._failures += 1
        asked = self._retry_after_ms(answer.retry_after) if answer is not None else 0
        delay = max(round(self._jitter() * ceiling), asked)
        self._not_before_ms = self._clock.monotonic_ms() + delay
        log.warning("upload will be retried", extra={"reason": detail, "retry_in_ms": delay})
        return ShipResult("retry", retry_in_ms=delay, detail=detail)

    def _retry_after_ms(self, value: str) -> int:
        if value.isascii() and value.isdigit():
            return min(int(value[:9]) * 1000, RETRY_AFTER_CAP_MS)
        try:
            at_ms = round(parsedate_to_datetime(value).timestamp() * 1000)
        except ValueError:
            return 0
        return min(max(0, at_ms - self._clock.wall_ms()), RETRY_AFTER_CAP_MS)

    # --- requests --------------------------------------------------------------------------------

    def _body(self, pending: Pending) -> bytes:
        batch = Batch(
            cluster=self._cluster,
            node=self._node,
            boot_id=self.boot_id,
            epoch=self._outbox.epoch,
            first_seq=pending.first_seq,
            oldest_seq=pending.oldest_seq,
            # The rows are already encoded intervals and facts.
            intervals=cast(tuple[UsageInterval, ...], pending.rows),
            facts=cast(tuple[PodFacts, ...], pending.told),
            skipped=pending.skipped,
            sent_ms=self._clock.wall_ms() if self._compares_clocks else None,
        )
        return gzip.compress(msgspec.json.encode(batch), compresslevel=5, mtime=0)

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip", "Accept": "application/json"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token.read()}"
        return headers


def _problem(body: bytes) -> _Problem:
    try:
        return _said.decode(body)
    except msgspec.MsgspecError:
        return _Problem()
