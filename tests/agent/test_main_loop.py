"""The agent's main loop on a virtual clock: order, restarts, and failures of every part."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from agent.core.readings import DriverReplaced, NodeSnapshot
from agent.core.settings import AgentSettings
from agent.main_loop import MAX_BACKLOG_ROWS, Agent
from agent.metrics.exporter import AgentMetrics
from agent.simulation.simulated_node import H100, SimulatedNode, SimulatedSource, make_gpu
from agent.upload.spool import Outbox
from agent.upload.spool_file import OutboxUnavailable
from agent.upload.uploader import ShipResult, Uploader
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import Clock, SystemClock, VirtualClock
from tests.agent.records import T0
from tests.agent.scripted_accountant import MINUTE, ScriptedAccountant, Site, accept, refuse


def test_facts_come_before_the_rows_they_explain_and_only_when_they_change(site: Site) -> None:
    agent = site.start(pod="u1")
    site.turn(3)
    site.node.remove(site.clock.wall_ms(), "u1")
    site.turn(2)
    agent.shutdown()
    facts = site.facts
    assert [(f.uid, f.ended_ms) for f in facts] == [("u1", None), ("u1", T0 + 3 * MINUTE)]
    assert facts[0].seq < min(row.seq for row in site.rows)


def test_a_stopping_agent_delivers_the_open_rest(site: Site) -> None:
    agent = site.start(pod="u1")
    agent.sample()
    site.clock.advance(30_000)
    agent.sample()
    agent.shutdown()
    assert [(r.start_ms, r.end_ms, r.capacity_us, r.busy_us) for r in site.rows] == [
        (T0, T0 + 30_000, 30_000_000, 15_000_000)
    ]
    assert site.source.closed
    assert site.outbox.durable_seq == 2


def test_a_stopping_agent_gives_up_after_its_grace(site: Site) -> None:
    site.accountant.script = lambda batch: refuse(503, "ledger-unavailable")
    agent = site.start()
    site.turn(1)
    before = site.clock.monotonic_ms()
    agent.shutdown()
    assert 0 < site.clock.monotonic_ms() - before <= 20_000
    assert site.source.closed


@pytest.mark.parametrize(
    ("minutes", "away_minutes", "boot_id", "carried"),
    [(2, 2, "boot-1", 2), (2, 2, "boot-2", 0), (0, 1, "boot-1", 1)],
    ids=["same boot", "another boot", "in its first interval"],
)
def test_a_killed_agent_carries_on_within_the_same_boot(
    site: Site, minutes: int, away_minutes: int, boot_id: str, carried: int
) -> None:
    agent = site.start(pod="u1")
    site.turn(minutes)
    agent.sample()
    site.outbox.close()  # killed: nothing flushed
    site.clock.advance(away_minutes * MINUTE)
    again = site.start(boot_id=boot_id)
    site.turn(1)
    again.shutdown()
    found = [((r.start_ms - T0) // MINUTE, (r.end_ms - T0) // MINUTE) for r in site.rows if r.method == "carried"]
    assert found == [(minutes + n, minutes + n + 1) for n in range(carried)]
    spans = sorted((r.start_ms, r.end_ms) for r in site.rows)
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    assert sum(r.capacity_us for r in site.rows) == (minutes + 1 + carried) * MINUTE * 1_000


@pytest.mark.parametrize("set_ms", [90_000, 3 * 3_600_000])
@pytest.mark.parametrize("goes_on", [True, False])
def test_time_that_a_clock_was_set_ahead_by_did_not_pass_for_anybody(site: Site, set_ms: int, goes_on: bool) -> None:
    agent = site.start(pod="u1")
    site.turn(2)
    site.clock.step_wall(set_ms)
    if goes_on:
        site.turn(2)
    agent.shutdown()
    while agent.ship().progress:
        pass
    held = [row for row in site.rows if row.holder]
    assert sum(row.allocated_us for row in held) == (site.clock.monotonic_ms() if goes_on else 100_000) * 1_000
    assert not any(row.start_ms < T0 + 100_000 + set_ms and row.end_ms > T0 + 100_000 for row in held)


def test_the_metrics_count_the_rows_that_close_when_the_clock_is_set_ahead(site: Site) -> None:
    metrics = AgentMetrics("n1", "0.0.0")
    agent = site.start(pod="u1", metrics=metrics)
    site.turn(2)
    site.clock.step_wall(3 * 3_600_000)
    site.turn(2)
    while agent.ship().progress:
        pass
    seconds = sum(row.allocated_us for row in site.rows) / 1e6
    assert f'gputally_gpu_allocated_seconds_total{{gpu_uuid="GPU-a"}} {seconds}\n' in metrics.exposition().decode()


def test_a_source_that_crashes_costs_nothing_but_the_moment(site: Site) -> None:
    tasks = BackgroundTasks(site.clock)
    agent = site.start(pod="u1", tasks=tasks)
    site.turn(1)
    site.source.error = RuntimeError("the cable was pulled")
    assert agent.sample() is None
    site.clock.advance(20_000)
    assert agent.sample() is None
    assert tasks.states()["sample"].failures == 2
    site.clock.advance(20_000)
    site.source.error = None
    site.turn(1)
    agent.shutdown()
    total = site.clock.wall_ms() - T0
    assert sum(r.capacity_us for r in site.rows) == total * 1_000
    assert sum(r.busy_us or 0 for r in site.rows) == (total - 20_000) * 500


def test_a_replaced_driver_ends_the_agent(site: Site) -> None:
    agent = site.start()
    site.source.error = DriverReplaced("the driver was replaced")
    with pytest.raises(DriverReplaced):
        agent.sample()


def test_whose_a_pod_is_is_told_again_once_the_accountant_lost_it(site: Site) -> None:
    def told() -> list[str]:
        return [fact.uid for fact in site.facts]

    agent = site.start(pod="u1")
    site.turn(2)
    site.accountant.script = lambda batch: accept(batch, checkpointed=site.outbox.last_seq)
    agent.ship()
    site.turn(3)
    agent.ship()
    assert told() == ["u1"]
    site.turn(1)
    marks = {"epoch": site.outbox.epoch, "durable_seq": 0, "checkpointed_seq": 0}
    site.accountant.script = lambda batch: refuse(409, "sequence-gap", ack=marks)
    agent.ship()  # its ledger is of before all that
    site.accountant.script = accept
    for _ in range(2):
        site.turn(3)
        agent.ship()
        assert told() == ["u1", "u1"]


def test_what_is_sent_again_is_not_told_again(site: Site) -> None:
    agent = site.start(pod="u1")
    site.turn(2)
    agent.ship()
    site.accountant.script = lambda batch: accept(batch, durable=0)
    site.turn(3)
    agent.ship()
    site.accountant.script = accept
    site.turn(1)
    agent.ship()
    assert [fact.seq for fact in site.facts] == [1, 1]


def test_liveness_follows_the_sampling(site: Site) -> None:
    tasks = BackgroundTasks(site.clock)
    agent = site.start(tasks=tasks)
    site.clock.advance(44_000)
    assert agent.alive(), "the first sample may take its time"
    agent.sample()
    assert agent.alive()
    site.clock.advance(59_000)
    assert not agent.alive()
    assert tasks.faults() == {"sample": "has not ended for 59 s"}


def test_the_metrics_show_the_agent_and_its_node(site: Site) -> None:
    metrics = AgentMetrics("n1", "0.0.0")
    seen: list[int] = []
    agent = site.start(pod="u1", metrics=metrics, on_sample=lambda snapshot: seen.append(snapshot.at_ms))
    site.turn(2)
    agent.ship()
    agent.sample()
    text = metrics.exposition().decode()
    assert 'gputally_gpu_busy_seconds_total{gpu_uuid="GPU-a"} 60.0' in text
    assert "gputally_agent_intervals_closed_total 2.0" in text
    assert 'gputally_agent_uploads_total{result="accepted"} 1.0' in text
    assert 'gputally_collector_success{collector="outbox"} 1.0' in text
    assert 'gputally_collector_success{collector="simulated"} 1.0' in text
    assert len(seen) == 7


def agent_of(
    outbox: Outbox, clock: Clock, kind: type[Uploader] = Uploader, url: str = "", on_sample: Any = None, **chosen: float
) -> Agent:
    """Build an agent on a node with one GPU that samples every 20 ms. kind: of its uploader."""
    node = SimulatedNode("n1", [make_gpu("GPU-a", 0, H100)], start_ms=clock.wall_ms())
    uploader = kind(outbox, url, "c1", "n1", "boot", None, clock)
    settings = AgentSettings(node="n1", sample_s=0.02, **chosen)  # type: ignore[arg-type]
    return Agent(settings, SimulatedSource(node), outbox, uploader, clock, on_sample=on_sample)


def test_run_samples_and_ships_until_it_is_stopped(
    open_outbox: Callable[..., Outbox], accountant: ScriptedAccountant
) -> None:
    stop, samples = threading.Event(), list[NodeSnapshot]()

    def enough(snapshot: NodeSnapshot) -> None:
        samples.append(snapshot)
        if len(samples) == 4:
            stop.set()

    agent_of(open_outbox(), SystemClock(), url=accountant.url, on_sample=enough, interval_s=1, ship_s=0.01).run(stop)
    total_us = (samples[-1].at_ms - samples[0].at_ms) * 1_000
    metered_us = sum(row.capacity_us for batch in accountant.batches for row in batch.intervals)
    assert total_us <= metered_us <= total_us + 1_000_000


def test_a_defect_in_shipping_is_reported_and_tried_again(
    open_outbox: Callable[..., Outbox], clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    stop, attempts = threading.Event(), list[int]()

    class Broken(Uploader):
        def ship(self, upto: int | None = None) -> ShipResult:
            attempts.append(len(attempts))
            if len(attempts) < 3:
                raise ZeroDivisionError
            stop.set()
            return ShipResult("idle")

    agent_of(open_outbox(), clock, Broken, ship_s=0.01).run(stop)
    assert len(attempts) >= 3
    assert caplog.text.count("shipping failed") == 2


def test_an_upload_that_hangs_does_not_keep_the_rest_from_being_spooled(open_outbox: Callable[..., Outbox]) -> None:
    stop, hanging, released = threading.Event(), threading.Event(), threading.Event()
    outbox, calls, samples = open_outbox(), list[str](), list[int]()

    class Hanging(Uploader):
        def ship(self, upto: int | None = None) -> ShipResult:
            calls.append(threading.current_thread().name)
            hanging.set()
            released.wait(30)
            return ShipResult("idle")

    def seen(snapshot: NodeSnapshot) -> None:
        samples.append(snapshot.at_ms)
        if hanging.is_set() and samples[-1] > samples[0]:
            stop.set()

    agent_of(outbox, SystemClock(), Hanging, on_sample=seen, grace_s=0.05).run(stop)
    released.set()
    assert calls == ["ship"]
    assert outbox.last_seq >= 1


class FullDisk:
    """An outbox in front of the real one whose disk can be full."""

    def __init__(self, inner: Outbox) -> None:
        self.inner = inner
        self.full = False

    def append(self, *arguments: Any) -> Any:
        if self.full:
            raise OutboxUnavailable("outbox cannot be written: database or disk is full")
        return self.inner.append(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_a_spool_that_cannot_be_written_is_replaced_by_memory(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    agent = site.start(pod="u1", wrap=FullDisk)
    site.turn(1)
    site.outbox.full = True
    site.turn(5)
    assert agent.health.backlog_rows == 5
    assert agent.health.spool_failure
    assert caplog.text.count("records wait in memory") == 1
    site.outbox.full = False
    site.turn(1)
    assert (agent.health.backlog_rows, agent.health.spool_failure) == (0, "")
    agent.shutdown()
    assert sum(r.capacity_us for r in site.rows) == (site.clock.wall_ms() - T0) * 1_000
    starts = [r.start_ms for r in sorted(site.rows, key=lambda r: r.seq)]
    assert starts == sorted(starts)


def test_a_spool_on_a_disk_that_turned_read_only_is_replaced_by_memory_and_it_is_said(site: Site) -> None:
    """With query_only SQLite answers every write as on a file system that was remounted read-only."""
    metrics = AgentMetrics("n1", "0")
    agent = site.start(pod="p1", metrics=metrics)
    site.turn(2)
    site.outbox._spool.db.execute("PRAGMA query_only=ON")
    site.turn(3)
    assert "readonly" in agent.health.spool_failure
    shown = metrics.exposition().decode()
    assert f"gputally_agent_unspooled_rows {float(agent.health.backlog_rows)}" in shown
    assert 'gputally_collector_success{collector="outbox"} 0.0' in shown
    assert agent.health.backlog_rows > 0
    site.outbox._spool.db.execute("PRAGMA query_only=OFF")
    site.turn(1)
    assert (agent.health.backlog_rows, agent.health.spool_failure) == (0, "")
    while agent.ship().progress:
        pass
    held = [row for row in site.rows if row.holder is not None]
    assert sum(row.allocated_us for row in held) == (max(row.end_ms for row in held) - T0) * 1_000


def test_memory_is_bounded_too_oldest_kept(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    import agent.main_loop

    monkeypatch.setattr(agent.main_loop, "MAX_BACKLOG_ROWS", 3)
    built = site.start(wrap=FullDisk)
    site.outbox.full = True
    site.turn(10)
    assert built.health.backlog_rows == 3
    assert built.health.backlog_lost_rows == 6
    assert MAX_BACKLOG_ROWS > 3
    site.outbox.full = False
    site.turn(2)
    pending = site.outbox.pending(100, 100_000)
    assert [(skip.seq, skip.reason) for skip in pending.skipped] == [(4, "spool-unwritable")]
    assert [row.seq for row in pending.intervals] == [1, 2, 3, 5]
    metered = {row.start_ms for row in pending.intervals}
    assert min(metered) == T0
    assert site.outbox.stats().unspooled_sets == 7


def test_a_spool_that_was_full_is_offered_the_facts_again(site: Site) -> None:
    agent = site.start(max_age_ms=MINUTE)
    site.turn(1)
    agent.sample()  # the first interval is spooled, and grows too old
    site.clock.advance(MINUTE + 1)
    site.place("u1")
    agent.sample()
    agent.ship()
    site.clock.advance(1_000)
    agent.sample()
    agent.ship()
    refused, accepted = site.accountant.batches
    assert (len(refused.intervals), [s.reason for s in refused.skipped], refused.facts) == (1, ["outbox-full"], ())
    assert [f.uid for f in accepted.facts] == ["u1"]
