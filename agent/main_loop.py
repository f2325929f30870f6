"""Runs the agent's two loops on two threads: one samples the node, the other uploads closed intervals.

Sampling never waits for the network, because drivers keep samples for only ten seconds. `sample` and `ship` are
single bounded steps, so that tests and the demo can run them on a virtual clock. If a source fails, only the readings
of that moment are lost. While the spool cannot be written, new records wait in memory up to a limit; beyond it, the
oldest records stay and new ones are lost."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from zoneinfo import ZoneInfo

import msgspec

from agent.core.readings import DriverReplaced, NodeSnapshot, Source
from agent.core.settings import AgentSettings, unseen
from agent.core.steady_clock import ClockSetBack, SteadyClock, SteadyTimeline
from agent.metering.gpu_errors import GpuErrorLog
from agent.metering.meter import ClosedSet, Meter, shifted_state
from agent.metrics.exporter import AgentMetrics
from agent.metrics.metric_families import Operations
from agent.upload.spool import (
    OUTBOX_FULL,
    SPOOL_UNWRITABLE,
    Outbox,
    Stats,
    lost_records,
    shifted_facts,
    shifted_row,
)
from agent.upload.spool_file import OutboxUnavailable
from agent.upload.uploader import WRONG_MS, ShipResult, Uploader
from agent.wire import PodFacts
from gputally.base.background_tasks import PATIENCE_S, BackgroundTask, BackgroundTasks
from gputally.base.clock import Clock
from gputally.base.units import MS_PER_SECOND

log = logging.getLogger("agent.main_loop")

MAX_BACKLOG_ROWS = 20_000
"""Largest number of rows in memory while the spool cannot be written: some hours of a busy node, about 20 MiB."""
STALE_SAMPLES = 10
"""Number of sampling periods without a finished sample after which sampling hangs; it takes at least `PATIENCE_S`."""


class AgentHealth(msgspec.Struct):
    """The state of the agent itself, for its metrics. Only the main loop writes it.

    backlog_rows: rows in memory while the spool cannot be written.
    backlog_lost_rows: rows that were lost because the memory was full.
    spool_failure: why the spool cannot be written; "" if it can.
    uploads: number of uploads by outcome."""

    intervals_closed: int = 0
    last_sample_took_ms: int = 0
    backlog_rows: int = 0
    backlog_lost_rows: int = 0
    spool_failure: str = ""
    uploads: dict[str, int] = msgspec.field(default_factory=dict)


class _UnspooledRecords(msgspec.Struct, frozen=True):
    sets: tuple[ClosedSet, ...]
    facts: tuple[PodFacts, ...]
    rows: int
    origin: int

    def shifted(self, by_ms: int) -> _UnspooledRecords:
        sets = tuple(ClosedSet(tuple([shifted_row(row, by_ms) for row in closed.rows])) for closed in self.sets)
        return msgspec.structs.replace(
            self, sets=sets, facts=tuple([shifted_facts(facts, by_ms) for facts in self.facts])
        )


class Agent:
    """The agent of one node. It owns its source, uploader and outbox: `shutdown` closes them.

    metrics: gets the snapshot, the closed sets and the agent's state after every sample.
    on_sample: is called with every metered snapshot.
    tasks: the list in which the two loops are entered."""

    def __init__(
        self,
        settings: AgentSettings,
        source: Source,
        outbox: Outbox,
        uploader: Uploader,
        clock: Clock,
        *,
        metrics: AgentMetrics | None = None,
        on_sample: Callable[[NodeSnapshot], None] | None = None,
        tasks: BackgroundTasks | None = None,
    ) -> None:
        self.health = AgentHealth()
        self._tasks = tasks or BackgroundTasks(clock)
        self._sampling = self._tasks.add("sample", max(PATIENCE_S, settings.sample_s * STALE_SAMPLES))
        self._sampling.begin()
        self._settings = settings
        self._source = source
        self._outbox = outbox
        self._uploader = uploader
        self._clock = clock
        self._metrics = metrics
        self._on_sample = on_sample
        self._origins = uploader.origins
        if isinstance(clock, SteadyClock):
            earlier = self._origins.newest
            clock.check_with(self._origins.agrees, None if earlier is None else earlier.origin_ms)
        self._timeline = SteadyTimeline(clock)
        interval_ms = settings.interval_s * MS_PER_SECOND
        self._meter = Meter(interval_ms, ZoneInfo(settings.month_zone), boot_id=uploader.boot_id)
        self._errors = GpuErrorLog()
        self._skipped_ms = self._clock_steps = 0
        self._resumed = False
        self._facts: dict[str, tuple[PodFacts, PodFacts]] = {}
        """The last spooled facts by uid: as they were read, and without the fields that change with every reading."""
        self._forgotten = 0
        """`Outbox.forgotten` at the last comparison of facts."""
        self._backlog: deque[_UnspooledRecords] = deque()
        self._lost_sets: int | None = None
        """Number of sets that were lost in memory and are not declared yet; None if nothing was lost."""

    # --- steps -----------------------------------------------------------------------------------

    def sample(self) -> NodeSnapshot | None:
        """Read, meter and spool once. Return None if the source failed. Raises DriverReplaced and ClockSetBack."""
        at_ms = self._timeline.now_ms()
        self._raise_if_clock_was_set_back()
        began_ms = self._clock.monotonic_ms()
        try:
            snapshot = self._source.snapshot(at_ms)
        except DriverReplaced:
            raise
        except Exception as error:  # noqa: BLE001 - a defect in a source must not end the metering
            self._record_source_failure(error)
            return None
        first = not self._resumed
        before_step = self._skip_clock_steps()
        closed = self._resume(snapshot) if first else self._meter.observe(snapshot)
        self._spool(closed, self._changed_facts(snapshot), always=first)
        self.health.last_sample_took_ms = self._clock.monotonic_ms() - began_ms
        self._errors.observe(at_ms, snapshot.devices)
        self._uploader.gpus = self._errors.gpus
        self._sampling.progress()
        if self._metrics is not None:
            self._metrics.observe(snapshot, (*before_step, *closed))
            self._metrics.operate(self._operations(snapshot))
        if self._on_sample is not None:
            self._on_sample(snapshot)
        return snapshot

    def ship(self, upto: int | None = None) -> ShipResult:
        """Try once to deliver records. If the outbox cannot be used, the outcome is `retry`.

        upto: the newest number to send; None sends all."""
        try:
            result = self._uploader.ship(upto)
        except OutboxUnavailable as error:
            log.warning("the spool cannot be used: the upload is tried again", extra={"reason": str(error)})
            result = ShipResult("retry", retry_in_ms=MS_PER_SECOND, detail=str(error))
        if result.outcome not in ("idle", "waiting"):
            self.health.uploads[result.outcome] = self.health.uploads.get(result.outcome, 0) + 1
        return result

    def alive(self) -> bool:
        """Return False if sampling hangs, for example in a call of the driver."""
        return not self._sampling.hangs

    # --- the loops -------------------------------------------------------------------------------

    def run(self, stop: threading.Event) -> None:
        """Sample on this thread and upload on a second one until `stop` is set, then shut down.

        Raises DriverReplaced and ClockSetBack after a shutdown that leaves all records to the next process."""
        patience_s = max(PATIENCE_S, 1.5 * self._settings.timeout_s)
        shipping = self._tasks.start("ship", self._ship_loop, stop, _shipping_failed, patience_s)
        period_ms = round(self._settings.sample_s * MS_PER_SECOND)
        deliver = True
        try:
            while not stop.is_set():
                self.sample()
                # Sample at multiples of the period, so that snapshots and interval edges coincide.
                self._clock.wait((period_ms - self._timeline.now_ms() % period_ms) / MS_PER_SECOND, stop)
        except (DriverReplaced, ClockSetBack):
            deliver = False
            raise
        finally:
            stop.set()
            self.shutdown(shipping, deliver=deliver)

    def shutdown(self, shipping: threading.Thread | None = None, *, deliver: bool = True) -> None:
        """Close and spool the open intervals, upload records until the grace period ends, and close source, uploader
        and outbox. The next process uploads the records that remain.

        shipping: the upload thread; None if there is none. This method uploads only if that thread has ended.
        deliver: False uploads nothing."""
        deadline_ms = self._clock.monotonic_ms() + round(self._settings.grace_s * MS_PER_SECOND)
        now_ms = self._timeline.now_ms()
        self._skip_clock_steps()
        self._spool(self._meter.flush(now_ms), ())
        if shipping is not None:
            shipping.join(timeout=self._settings.grace_s if deliver else 0)
        if deliver and (shipping is None or not shipping.is_alive()):
            self._deliver(deadline_ms)
        if self._backlog:
            sets = [closed for one in self._backlog for closed in one.sets]
            facts = sum([len(one.facts) for one in self._backlog])
            log.critical(
                "the agent stops, and records that could not be spooled are lost",
                extra=msgspec.structs.asdict(lost_records(sets, facts, now_ms)),
            )
        self._source.close()
        self._uploader.close()
        self._outbox.close()

    def _deliver(self, deadline_ms: int) -> None:
        never = threading.Event()
        while (left_ms := deadline_ms - self._clock.monotonic_ms()) > 0:
            result = self.ship()
            if result.outcome == "idle":
                return
            if not result.progress:
                self._clock.wait(min(max(result.retry_in_ms, 1), left_ms) / MS_PER_SECOND, never)

    def _ship_loop(self, stop: threading.Event, task: BackgroundTask) -> None:
        while not stop.is_set():
            task.begin()
            result = self.ship()
            task.succeed()
            if not result.progress:
                pause_s = result.retry_in_ms / MS_PER_SECOND if result.retry_in_ms else self._settings.ship_s
                self._clock.wait(pause_s, stop)

    # --- internal --------------------------------------------------------------------------------

    def _operations(self, snapshot: NodeSnapshot) -> Operations:
        """Return the agent's own state, for its metrics."""
        failures, took_ms = dict(snapshot.sources), dict(snapshot.took_ms)
        collectors: dict[str, tuple[bool | None, float | None]] = {
            name: (
                not failures[name] if name in failures else None,
                took_ms[name] / MS_PER_SECOND if name in took_ms else None,
            )
            for name in failures.keys() | took_ms.keys()
        }
        collectors["outbox"] = (not self.health.spool_failure, None)
        stats = Stats()
        try:
            stats = self._outbox.stats()
        except OutboxUnavailable:
            collectors["outbox"] = (False, None)
        return Operations(
            nvml_up=not failures["nvml"] if "nvml" in failures else None,
            outbox_rows=stats.unsent_rows,
            outbox_bytes=stats.bytes,
            outbox_oldest_age_s=stats.oldest_age_ms / MS_PER_SECOND,
            uploads=dict(self.health.uploads),
            parked={**self._uploader.parked, OUTBOX_FULL: stats.lost_sets, SPOOL_UNWRITABLE: stats.unspooled_sets},
            collectors=collectors,
            sample_s=self.health.last_sample_took_ms / MS_PER_SECOND,
            intervals_closed=self.health.intervals_closed,
            unspooled_rows=self.health.backlog_rows,
            unspooled_lost_rows=self.health.backlog_lost_rows,
            privilege=self._settings.privilege if self._settings.on_kubernetes else "",
            unseen=unseen(self._settings.privilege, snapshot.devices),
        )

    def _record_source_failure(self, error: Exception) -> None:
        if not self._sampling.failing:
            log.warning("the source failed", extra={"reason": f"{type(error).__name__}: {error}"})
        self._sampling.fail(error)
        self._sampling.begin()

    def _raise_if_clock_was_set_back(self) -> None:
        """Raise ClockSetBack if the wall clock was far ahead, was set back, and now agrees with the accountant's
        clock."""
        ahead_ms = -self._timeline.offset_ms
        if ahead_ms > WRONG_MS and self._origins.agrees(self._clock.wall_ms() - self._clock.monotonic_ms()):
            raise ClockSetBack(
                f"the clock was {ahead_ms // MS_PER_SECOND} s ahead and is right now: the agent restarts"
            )

    def _origin_ms(self) -> int:
        """Return the origin of the timeline: its time when the monotonic clock was 0."""
        return self._timeline.now_ms() - self._clock.monotonic_ms()

    def _skip_clock_steps(self) -> tuple[ClosedSet, ...]:
        """Exclude from metering the time by which the wall clock was set ahead since the last call. Spool and return
        the sets that close before this time."""
        timeline = self._timeline
        if timeline.step_count != self._clock_steps:
            self._clock_steps = timeline.step_count
            log.warning("the wall clock was set", extra={"by_ms": timeline.last_step_ms})
        by_ms, self._skipped_ms = timeline.skipped_ms - self._skipped_ms, timeline.skipped_ms
        if not by_ms:
            return ()
        closed = self._meter.skip(by_ms)
        self._spool(closed, ())
        self._origins.date_following(self._origin_ms())
        with suppress(OutboxUnavailable):
            self._redate()
        return closed

    def _redate(self) -> None:
        """Correct the times of unsent records that a wrong clock dated in this boot, if the present clock agrees with
        the accountant's clock."""
        origin_ms = self._origin_ms()
        if not self._origins.agrees(origin_ms):
            return
        wrong, count = self._origins.redate(origin_ms)
        self._backlog = deque(one.shifted(wrong.get(one.origin, 0)) for one in self._backlog)
        if wrong:
            log.warning("the times of records with a wrong date are corrected", extra={"records": count})

    def _resume(self, snapshot: NodeSnapshot) -> tuple[ClosedSet, ...]:
        """Meter the first snapshot of this process, and continue where an earlier process of the same boot ended."""
        self._resumed = True
        origin_ms = self._origin_ms()
        try:
            state = self._outbox.meter_state()
            earlier = self._origins.newest
            if state is not None and earlier is not None and abs(origin_ms - earlier.origin_ms) > WRONG_MS:
                state = shifted_state(state, self._uploader.boot_id, origin_ms - earlier.origin_ms)
            self._redate()
        except OutboxUnavailable as error:
            log.warning(
                "the state of the earlier process cannot be read: the time since its end is unmetered",
                extra={"reason": str(error)},
            )
            state = None
        self._origins.date_following(origin_ms)
        return self._meter.observe(snapshot) if state is None else self._meter.resume(state, snapshot)

    def _changed_facts(self, snapshot: NodeSnapshot) -> tuple[PodFacts, ...]:
        """Return the facts that are new or have changed since they were spooled. A later time of observation is not a
        change.

        If the accountant lost records that the spool does not contain any more, return all facts, because the lost
        records may have contained them."""
        if (forgotten := self._outbox.forgotten) != self._forgotten:
            self._forgotten = forgotten
            self._facts.clear()
        changed = tuple(facts for facts in snapshot.facts if self._has_changed(facts))
        for uid in self._facts.keys() - {facts.uid for facts in snapshot.facts}:
            del self._facts[uid]
        return changed

    def _has_changed(self, facts: PodFacts) -> bool:
        known = self._facts.get(facts.uid)
        return known is None or (known[0] is not facts and known[1] != _comparable(facts))

    def _spool(self, closed: tuple[ClosedSet, ...], facts: tuple[PodFacts, ...], *, always: bool = False) -> None:
        """Spool new records, after the records that could not be spooled earlier.

        always: True to store the meter's state even if there is no record."""
        self.health.intervals_closed += sum(len(c.rows) for c in closed)
        if closed or facts or always:
            newest, rows = self._origins.newest, sum(len(c.rows) for c in closed) + len(facts)
            self._add_to_backlog(_UnspooledRecords(closed, facts, rows, 0 if newest is None else newest.id))
        while self._backlog and self._append(self._backlog[0]):
            self.health.backlog_rows -= self._backlog.popleft().rows
        if self._lost_sets is not None and not self._backlog:
            with suppress(OutboxUnavailable):  # the loss stays recorded and is declared later
                self._outbox.declare(self._lost_sets)
                self._lost_sets = None

    def _add_to_backlog(self, new: _UnspooledRecords) -> None:
        if self.health.backlog_rows + new.rows > MAX_BACKLOG_ROWS:
            self.health.backlog_lost_rows += new.rows
            lost = lost_records(new.sets, len(new.facts), self._clock.wall_ms())
            log.error("records in memory are lost: their time stays unmetered", extra=msgspec.structs.asdict(lost))
            self._lost_sets = (self._lost_sets or 0) + lost.sets
            return
        self._backlog.append(new)
        self.health.backlog_rows += new.rows
        self._facts.update({fact.uid: (fact, _comparable(fact)) for fact in new.facts})

    def _append(self, oldest: _UnspooledRecords) -> bool:
        """Append records to the outbox. Return False if the outbox cannot be written.

        Only the newest records are stored together with the meter's state. With earlier ones, the state would claim
        that the outbox contains sets that are still in memory."""
        state = self._meter.state() if len(self._backlog) == 1 else None
        try:
            self._origins.store()
            appended = self._outbox.append(oldest.sets, oldest.facts, state, oldest.origin)
        except OutboxUnavailable as error:
            if not self.health.spool_failure:
                log.critical("the spool cannot be written: records wait in memory", extra={"reason": str(error)})
            self.health.spool_failure = str(error)
            return False
        if self.health.spool_failure:
            log.info("the spool can be written again", extra={"backlog_rows": self.health.backlog_rows})
            self.health.spool_failure = ""
        if appended.refused_facts:
            for fact in oldest.facts:
                self._facts.pop(fact.uid, None)  # so that the fact is spooled again
        return True


def _shipping_failed(error: Exception) -> None:
    log.error("shipping failed and restarts", exc_info=error)


def _comparable(facts: PodFacts) -> PodFacts:
    return msgspec.structs.replace(facts, seq=0, observed_ms=0)
