"""Sends the records of the outbox to the accountant at least once, acts on refusals, and corrects dates of unsent
records.

The uploader follows the protocol's rules for refusals exactly, because each of them affects time that a team pays for:

- 401, 403, 429, 5xx, no answer, and every answer without the accountant's problem `type` (such as that of a proxy or a
  captive portal): the uploader retries after back-off and drops nothing.
- 413, from the accountant or a proxy: it sends smaller batches. 409 of the accountant with an Ack: it continues from
  the accountant's number.
- 400 and 422 of the accountant (and 413 for a single set): it halves the batch until one set is left, declares that set
  as skipped ("parked") and continues. If the accountant refuses the declaration as well, the fault is in the batch's
  own fields: the uploader unparks the set and waits.

The uploader has no thread and does not sleep: the main loop calls it again after `retry_in_ms`. Clock and randomness
are arguments. It never logs a token and never follows a redirect.

The agent dates records by the monotonic clock plus an origin, the wall time at which the monotonic clock was 0. If the
node's clock is set, the origin changes. Within one boot of the node, the difference between the wrong and the right
origin is the error of all times dated by the wrong one, and `ClockOrigins` shifts the unsent records by it. Records
that are dated ahead of the accountant's clock are kept back for up to an hour, so that they can still be corrected."""

from __future__ import annotations

import gzip
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Final, Literal

import msgspec

from agent.core.lean_http_client import (
    BearerToken,
    ClientCertificate,
    HttpSender,
    Response,
    TokenUnavailable,
    Unreachable,
)
from agent.upload.spool import LOSSES, Outbox, Pending
from agent.upload.spool_file import CLOCK_ORIGINS, SYSTEM_RANDOM, OutboxUnavailable
from agent.wire import PROBLEM, Ack, AgentReport, Batch, GpuReport
from gputally.base.clock import Clock
from gputally.base.units import MS_PER_MINUTE
from gputally.base.untrusted_text import UNDECODABLE
from gputally.base.version import __version__

WRONG_MS: Final = 5 * MS_PER_MINUTE
"""Difference above which two origins come from different clock settings. The accountant refuses records that are this
far ahead of its clock."""
_MAX_ORIGINS: Final = 100


class ClockOrigin(msgspec.Struct, frozen=True):
    """The origin of a clock that dated records.

    id: the number with which the spool stores these records; 0 for the accountant's clock.
    boot_id: the boot of the node in which the origin is valid."""

    id: int
    boot_id: str
    origin_ms: int


class _StoredOrigins(msgspec.Struct, frozen=True):
    records: tuple[ClockOrigin, ...] = ()
    accountant: ClockOrigin | None = None


_stored_origins = msgspec.json.Decoder(_StoredOrigins)


class ClockOrigins:
    """The origins of the clocks that dated the records, which are stored in the outbox. While the outbox cannot be
    used, they are kept in memory and stored later."""

    def __init__(self, outbox: Outbox, boot_id: str) -> None:
        self._outbox = outbox
        self._boot_id = boot_id
        self._origins = _StoredOrigins()
        self._read = self._stored = False

    @property
    def accountant_ms(self) -> int | None:
        """The origin of the accountant's clock, from its answers in this boot; None if there was none."""
        accountant = self._known().accountant
        return accountant.origin_ms if accountant is not None and accountant.boot_id == self._boot_id else None

    @property
    def newest(self) -> ClockOrigin | None:
        """The newest origin of this boot; None if there is none."""
        return next((one for one in reversed(self._known().records) if one.boot_id == self._boot_id), None)

    def agrees(self, origin_ms: int) -> bool | None:
        """Return True if an origin agrees with the accountant's clock; None if the accountant has not answered in this
        boot."""
        known_ms = self.accountant_ms
        return None if known_ms is None else abs(known_ms - origin_ms) <= WRONG_MS

    def set_accountant(self, origin_ms: int) -> None:
        """Keep the origin of the accountant's clock if it changed by more than a minute."""
        known_ms = self.accountant_ms
        if known_ms is None or abs(known_ms - origin_ms) > MS_PER_MINUTE:
            self._keep(msgspec.structs.replace(self._origins, accountant=ClockOrigin(0, self._boot_id, origin_ms)))

    def date_following(self, origin_ms: int) -> None:
        """Let `newest` be the origin of the records that follow."""
        records = self._known().records
        newest = records[-1] if records else None
        if newest is not None and newest == self.newest and abs(newest.origin_ms - origin_ms) <= WRONG_MS:
            return
        following = ClockOrigin(SYSTEM_RANDOM.getrandbits(53), self._boot_id, origin_ms)
        self._keep(msgspec.structs.replace(self._origins, records=(*records, following)[-_MAX_ORIGINS:]))

    def redate(self, origin_ms: int) -> tuple[dict[int, int], int]:
        """Correct the times of the unsent records of this boot that another origin dated. Return the errors in
        milliseconds by the id of the origin, and the number of corrected records. Raises OutboxUnavailable."""
        wrong = {
            one.id: origin_ms - one.origin_ms
            for one in self._known().records
            if one.boot_id == self._boot_id and abs(origin_ms - one.origin_ms) > WRONG_MS
        }
        if not wrong:
            return {}, 0
        records = tuple(
            msgspec.structs.replace(one, origin_ms=origin_ms) if one.id in wrong else one
            for one in self._origins.records
        )
        corrected = msgspec.structs.replace(self._origins, records=records)
        count = self._outbox.shift_times(wrong, CLOCK_ORIGINS, msgspec.json.encode(corrected))
        self._origins, self._stored = corrected, True
        return wrong, count

    def store(self) -> None:
        """Store origins that could not be stored earlier. Raises OutboxUnavailable."""
        if not self._stored:
            self._outbox.store_value(CLOCK_ORIGINS, msgspec.json.encode(self._known()))
            self._stored = True

    def _known(self) -> _StoredOrigins:
        """Return all origins: the stored ones, once the outbox can be read, and those since."""
        if not self._read:
            try:
                encoded = self._outbox.stored_value(CLOCK_ORIGINS)
            except OutboxUnavailable:
                return self._origins
            try:
                earlier = _StoredOrigins() if encoded is None else _stored_origins.decode(encoded)
            except UNDECODABLE as error:
                log.critical("the origins of earlier clocks cannot be decoded", extra={"reason": str(error)})
                earlier = _StoredOrigins()
            since = self._origins
            self._read, self._stored = True, since == _StoredOrigins()
            self._origins = _StoredOrigins(
                (*earlier.records, *since.records)[-_MAX_ORIGINS:], since.accountant or earlier.accountant
            )
        return self._origins

    def _keep(self, origins: _StoredOrigins) -> None:
        self._origins, self._stored = origins, False
        with suppress(OutboxUnavailable):
            self.store()


log = logging.getLogger("agent.upload.uploader")

BACKOFF_BASE_MS = 1_000
BACKOFF_CAP_MS = 300_000
RETRY_AFTER_CAP_MS = 3_600_000
AHEAD_RETRY_MS = 5_000
ASK_MS = 2 * MS_PER_MINUTE
"""How long after the last answer the uploader asks for the accountant's newest marks, if it has nothing to send and
waits for the accountant to store sent records safely."""
AHEAD_KEPT_MS = 3_600_000
"""How long the uploader keeps back records whose time is after the accountant's."""


Outcome = Literal["idle", "waiting", "accepted", "rewound", "narrowed", "parked", "retry"]


class ShipResult(msgspec.Struct, frozen=True):
    """The result of one attempt to send.

    outcome: `idle` (nothing to send), `waiting` (still backing off), `accepted` (stored by the accountant), `rewound`
        (the next attempt continues from the accountant's number), `narrowed` (the next attempt sends fewer sets),
        `parked` (one set is declared as skipped) or `retry` (nothing was lost; `detail` gives the reason).
    rows: number of records that the accountant accepted; 0 for an answer to a batch without records.
    retry_in_ms: time to wait before the next attempt; 0 if none is needed."""

    outcome: Outcome
    rows: int = 0
    retry_in_ms: int = 0
    detail: str = ""

    @property
    def progress(self) -> bool:
        """True if another attempt should follow at once."""
        return self.outcome in ("accepted", "rewound", "narrowed", "parked")


class _Problem(msgspec.Struct):
    """The fields of a problem document (RFC 9457) that the uploader needs.

    ack: the accountant's marks in a 409; None otherwise."""

    type: str = ""
    detail: str = ""
    ack: Ack | None = None

    @property
    def from_accountant(self) -> bool:
        return self.type.startswith(PROBLEM)

    @property
    def slug(self) -> str:
        return self.type.removeprefix(PROBLEM)[:64]


_problem_decoder = msgspec.json.Decoder(_Problem)
_ack_decoder = msgspec.json.Decoder(Ack)


class Uploader:
    """Sends the outbox to `{url}/v1/usage`. If `url` is "", every attempt is `idle`.

    boot_id: the id of the node's boot; "" if unknown.
    token_file: file with the bearer token; None sends no Authorization header.
    ca_file: PEM file of the CAs to trust; None trusts the system's.
    identity: the client certificate; None if there is none.
    max_rows, max_bytes: limits of one batch before compression; a single set may exceed them.
    compares_clocks: True to send the node's time to the accountant, and to keep back records that are ahead of the
        accountant's clock. False in a simulation that moves the clocks of nodes and accountant one after the other.
    jitter: returns a random number from 0 to 1.

    The uploader reads the token, the CAs and the certificate again when their files change. The constructor raises
    SettingsError for an invalid URL."""

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
        identity: ClientCertificate | None = None,
        max_rows: int = 2_000,
        max_bytes: int = 1_000_000,
        timeout_s: float = 30.0,
        compares_clocks: bool = True,
        jitter: Callable[[], float] = SYSTEM_RANDOM.random,
    ) -> None:
        self.boot_id = boot_id
        self.parked: Counter[str] = Counter()
        """Number of records that the accountant accepted as skipped, by reason."""
        self.gpus: tuple[GpuReport, ...] | None = None
        """What the next batch says of the errors of the GPUs."""
        self._outbox = outbox
        self._cluster = cluster
        self._node = node
        self._clock = clock
        self._token = BearerToken(token_file) if token_file is not None else None
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
        self._answered_ms: int | None = None
        """When the accountant last accepted a batch, on the monotonic clock."""
        self._ahead_since_ms: int | None = None
        self.origins = ClockOrigins(outbox, boot_id)
        """The origins of the clocks that dated the records, and of the accountant's clock."""

    def ship(self, upto: int | None = None) -> ShipResult:
        """Try once to send records.

        upto: the newest number to send; None sends all.

        Raises OutboxUnavailable if the spool cannot be read or written."""
        if self._sender is None:
            return ShipResult("idle", detail="no accountant is configured")
        wait_ms = self._not_before_ms - self._clock.monotonic_ms()
        if wait_ms > 0:
            return ShipResult("waiting", retry_in_ms=wait_ms)
        pending = self._outbox.pending(self._max_rows, self._max_bytes, self._max_units, upto)
        nothing = ShipResult("idle")
        if pending is not None and self._is_ahead(pending):
            nothing = ShipResult("waiting", retry_in_ms=AHEAD_RETRY_MS, detail="dated after the accountant's time")
            pending = None
        if pending is None and self._may_ask():
            pending = self._outbox.inquiry()
        if pending is None:
            return nothing
        began_ms = self._clock.monotonic_ms()
        try:
            answer = self._sender.post("/v1/usage", self._body(pending), self._headers())
        except (Unreachable, TokenUnavailable) as error:
            return self._retry(str(error))
        answered_ms = (began_ms + self._clock.monotonic_ms()) // 2  # the accountant reads its clock about half-way
        return self._obey(answer, pending, answered_ms)

    def close(self) -> None:
        """Close the connection, but not the outbox."""
        if self._sender is not None:
            self._sender.close()

    def _may_ask(self) -> bool:
        return self._answered_ms is None or self._clock.monotonic_ms() - self._answered_ms >= ASK_MS

    def _is_ahead(self, pending: Pending) -> bool:
        """Return True if the records are dated after the accountant's time, so that the accountant would refuse them.
        They are kept back, because a correction of the clock can still correct their times. After an hour the result is
        False, so that the accountant shows the refusal."""
        origin_ms, now_ms = self.origins.accountant_ms, self._clock.monotonic_ms()
        if not self._compares_clocks or origin_ms is None:
            return False
        ahead_ms = max((row.end_ms for row in pending.intervals), default=0) - (origin_ms + now_ms)
        if ahead_ms <= WRONG_MS:
            self._ahead_since_ms = None
            return False
        if self._ahead_since_ms is None:
            self._ahead_since_ms = now_ms
            log.error(
                "records are kept back: their times are after the accountant's time; check the node's clock",
                extra={"by_ms": ahead_ms},
            )
        return now_ms - self._ahead_since_ms < AHEAD_KEPT_MS

    # --- answers ---------------------------------------------------------------------------------

    def _obey(self, answer: Response, pending: Pending, answered_ms: int) -> ShipResult:
        """Do what an answer requires. answered_ms: the monotonic time at which the accountant answered."""
        if 200 <= answer.status < 300:
            return self._accepted(answer, pending, answered_ms)
        try:
            problem = _problem_decoder.decode(answer.body)
        except UNDECODABLE:  # any text may come from a proxy
            problem = _Problem()
        if answer.status == 413 and pending.units > 1:
            return self._narrow(pending)  # a proxy's limit is a limit too
        if not problem.from_accountant or answer.status in (401, 403, 429) or answer.status >= 500:
            return self._retry(f"HTTP {answer.status} {problem.slug or 'from another server'}", answer)
        if answer.status == 409 and problem.ack is not None:
            return self._rewind(problem.ack, pending)
        if answer.status in (400, 413, 422):
            if pending.units > 1:
                return self._narrow(pending)
            declared_only = not pending.intervals and not pending.facts
            return self._unpark(pending, answer, problem) if declared_only else self._park(pending, problem)
        return self._retry(f"HTTP {answer.status} {problem.slug}", answer)

    def _accepted(self, answer: Response, pending: Pending, answered_ms: int) -> ShipResult:
        try:
            ack = _ack_decoder.decode(answer.body)
        except UNDECODABLE:
            return self._retry(
                f"HTTP {answer.status} without an Ack: the answer is not the accountant's; check the url"
            )
        if ack.clock_ms is not None:
            self.origins.set_accountant(ack.clock_ms - answered_ms)
        if ack.epoch != self._outbox.epoch:
            return self._retry("the Ack is for another epoch")
        self._outbox.acknowledge(ack)
        if pending.units and ack.durable_seq < pending.first_seq:
            return self._retry("the accountant accepted the batch, but has not stored any of it yet")
        self._failures = 0
        self._answered_ms = answered_ms
        self.parked.update(skip.reason for skip in pending.skipped if skip.reason not in LOSSES)
        if self._max_units is not None:
            self._max_units *= 2
            if self._max_units >= self._max_rows:
                self._max_units = None
        return ShipResult("accepted", rows=max(min(ack.durable_seq, pending.last_seq) - pending.first_seq + 1, 0))

    def _rewind(self, ack: Ack, pending: Pending) -> ShipResult:
        if ack.epoch != self._outbox.epoch:
            return self._retry("409 with the marks of another epoch")
        self._outbox.acknowledge(ack)
        following = self._outbox.pending(1, 1, 1)
        if following is not None and following.first_seq == pending.first_seq:
            return self._retry(f"409, although the batch began at {pending.first_seq}, where the accountant continues")
        log.warning("upload continues from the accountant's number", extra={"durable_seq": ack.durable_seq})
        return ShipResult("rewound", detail=f"durable_seq {ack.durable_seq}")

    def _narrow(self, pending: Pending) -> ShipResult:
        self._max_units = pending.units // 2
        return ShipResult("narrowed", detail=f"{self._max_units} sets at a time")

    def _park(self, pending: Pending, problem: _Problem) -> ShipResult:
        """Declare a set as skipped. The next batch contains nothing else, so its answer shows whether the batch's own
        fields are valid."""
        self._outbox.park(pending.first_seq, problem.slug)
        self._max_units = 1
        log.error(
            "the accountant refused a record: it is declared as skipped",
            extra={"seq": pending.first_seq, "reason": problem.slug, "detail": problem.detail[:200]},
        )
        return ShipResult("parked", detail=f"{pending.first_seq}: {problem.slug}")

    def _unpark(self, pending: Pending, answer: Response, problem: _Problem) -> ShipResult:
        self._outbox.unpark(pending.first_seq)
        return self._retry(f"the accountant refuses the batch's own fields: {problem.slug}", answer)

    def _retry(self, detail: str, answer: Response | None = None) -> ShipResult:
        """Schedule the next attempt after a failure: exponential back-off with full jitter, and at least Retry-After.

        Source: AWS Architecture Blog, "Exponential Backoff And Jitter" (2015); RFC 9110, 10.2.3."""
        ceiling = min(BACKOFF_CAP_MS, BACKOFF_BASE_MS << min(self._failures, 16))
        self._failures += 1
        retry_after_ms = self._retry_after_ms(answer.retry_after) if answer is not None else 0
        delay_ms = max(round(self._jitter() * ceiling), retry_after_ms)
        self._not_before_ms = self._clock.monotonic_ms() + delay_ms
        log.warning("upload will be retried", extra={"reason": detail, "retry_in_ms": delay_ms})
        return ShipResult("retry", retry_in_ms=delay_ms, detail=detail)

    def _retry_after_ms(self, value: str) -> int:
        if value.isascii() and value.isdigit():
            return min(int(value[:9]) * 1000, RETRY_AFTER_CAP_MS)
        try:
            at_ms = round(parsedate_to_datetime(value).timestamp() * 1000)
        except (ValueError, TypeError, OverflowError):
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
            intervals=pending.intervals,
            facts=pending.facts,
            skipped=pending.skipped,
            sent_ms=self._clock.wall_ms() if self._compares_clocks else None,
            agent=AgentReport(version=__version__, gpus=self.gpus),
        )
        return gzip.compress(msgspec.json.encode(batch), compresslevel=5, mtime=0)

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip", "Accept": "application/json"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token.read()}"
        return headers
