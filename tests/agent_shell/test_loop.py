"""The agent put together on a virtual clock: order, restarts, failures of every part."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from agent.core.errors import DriverReplaced
from agent.core.readings import Snapshot
from agent.core.settings import Settings
from agent.main_loop import Agent
from agent.metrics.exporter import AgentMetrics
from agent.simulation.simulated_node import H100, SimulatedNode, SimulatedSource, make_gpu
from agent.upload.spool import Outbox
from agent.upload.uploader import ShipResult, Uploader
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import SystemClock, VirtualClock
from tests.agent_shell.loops import MINUTE, place, rows, turn

T0 = 1_790_812_800_000


def test_facts_come_before_the_rows_they_explain_and_only_when_they_change(
    agent_of: Any, node: SimulatedNode, clock: VirtualClock, accountant: Any
) -> None:
    agent, _, _ = agent_of()
    place(node, "u1", T0)
    turn(agent, clock, 3)
    node.remove(clock.wall_ms(), "u1")
    turn(agent, clock, 2)
    agent.shutdown()
    facts = [fact for batch in accountant.batches for fact in batch.facts]
    assert [(f.uid, f.ended_ms) for f in facts] == [("u1", None), ("u1", T0 + 3 * MINUTE)]
    assert facts[0].seq < min(row.seq for row in rows(accountant))


def test_a_stopping_agent_delivers_the_open_rest(
    agent_of: Any, node: SimulatedNode, clock: VirtualClock, accountant: Any
) -> None:
    agent, source, outbox = agent_of()
    place(node, "u1", T0)
    agent.sample()
    clock.advance(30_000)
    agent.sample()
    agent.shutdown()
    assert [(r.start_ms, r.end_ms, r.capacity_us, r.busy_us) for r in rows(accountant)] == [
        (T0, T0 + 30_000, 30_000_000, 15_000_000)
    ]
    assert source.closed
    assert outbox.durable_seq == 2


def test_a_stopping_agent_gives_up_after_its_grace(
    agent_of: Any, clock: VirtualClock, accountant: Any, refuse: Any
) -> None:
    accountant.script = lambda batch: refuse(503, "ledger-unavailable")
    agent, source, _ = agent_of()
    turn(agent, clock, 1)
    before = clock.monotonic_ms()
    agent.shutdown()
    assert 0 < clock.monotonic_ms() - before <= 20_000
    assert source.closed


@pytest.mark.parametrize(("boot_id", "carried"), [("boot-1", 2), ("boot-2", 0)])
def test_a_killed_agent_carries_on_within_the_same_boot(
    agent_of: Any, node: SimulatedNode, clock: VirtualClock, accountant: Any, boot_id: str, carried: int
) -> None:
    agent, _, outbox = agent_of()
    place(node, "u1", T0)
    turn(agent, clock, 2)
    agent.sample()
    outbox.close()  # killed: nothing flushed
    clock.advance(2 * MINUTE)
    again, _, _ = agent_of(boot_id=boot_id)
    turn(again, clock, 1)
    again.shutdown()
    found = [(r.start_ms - T0, r.end_ms - T0) for r in rows(accountant) if r.method == "carried"]
    assert found == [(2 * MINUTE, 3 * MINUTE), (3 * MINUTE, 4 * MINUTE)][:carried]
    spans = sorted((r.start_ms, r.end_ms) for r in rows(accountant))
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    assert sum(r.capacity_us for r in rows(accountant)) == (3 + carried) * MINUTE * 1_000


def test_even_an_agent_killed_in_its_first_interval_is_carried_on(
    agent_of: Any, node: SimulatedNode, clock: VirtualClock, accountant: Any
) -> None:
    agent, _, outbox = agent_of()
    place(node, "u1", T0)
    agent.sample()
    outbox.close()
    clock.advance(MINUTE)
    again, _, _ = agent_of()
    turn(again, clock, 1)
    again.shutdown()
    assert sum(r.capacity_us for r in rows(accountant)) == 2 * MINUTE * 1_000


@pytest.mark.parametrize("set_ms", [90_000, 3 * 3_600_000])
@pytest.mark.parametrize("goes_on", [True, False])
def test_time_that_a_clock_was_set_ahead_by_did_not_pass_for_anybody(
    agent_of: Any, node: SimulatedNode, clock: VirtualClock, accountant: Any, set_ms: int, goes_on: bool
) -> None:
    agent, _, _ = agent_of()
    place(node, "u1", T0)
    turn(agent, clock, 2)
    clock.step_wall(set_ms)
    if goes_on:
        turn(agent, clock, 2)
    agent.shutdown()
    while agent.ship().progress:
        pass
    held = [row for row in rows(accountant) if row.holder]
    assert sum(row.allocated_us for row in held) == (clock.monotonic_ms() if goes_on else 100_000) * 1_000
    assert not any(row.start_ms < T0 + 100_000 + set_ms and row.end_ms > T0 + 100_000 for row in held)


def test_a_source_that_crashes_costs_nothing_but_the_moment(
    agent_of: Any, node: SimulatedNode, clock: VirtualClock, accountant: Any
) -> None:
    agent, source, _ = agent_of()
    place(node, "u1", T0)
    turn(agent, clock, 1)
    source.error = RuntimeError("the cable was pulled")
    assert agent.sample() is None
    clock.advance(20_000)
    assert agent.sample() is None
    assert agent.health.samples_failed == 2
    clock.advance(20_000)
    source.error = None
    turn(agent, clock, 1)
    agent.shutdown()
    total = clock.wall_ms() - T0
    assert sum(r.capacity_us for r in rows(accountant)) == total * 1_000
    assert sum(r.busy_us or 0 for r in rows(accountant)) == (total - 20_000) * 500


def test_a_replaced_driver_ends_the_agent(agent_of: Any) -> None:
    agent, source, _ = agent_of()
    source.error = DriverReplaced("the driver was replaced")
    with pytest.raises(DriverReplaced):
        agent.sample()


def test_whose_a_pod_is_is_told_again_once_the_accountant_lost_it(
    agent_of: Any, node: SimulatedNode, clock: VirtualClock, accountant: Any, refuse: Any, accept: Any
) -> None:
    def told() -> list[str]:
        return [fact.uid for batch in accountant.batches for fact in batch.facts]

    agent, _, outbox = agent_of()
    place(node, "u1", T0)
    turn(agent, clock, 2)
    accountant.script = lambda batch: accept(batch, checkpointed=outbox.last_seq)
    agent.ship()
    turn(agent, clock, 3)
    agent.ship()
    assert told() == ["u1"]
    turn(agent, clock, 1)
    marks = {"epoch": outbox.epoch, "durable_seq": 0, "checkpointed_seq": 0}
    accountant.script = lambda batch: refuse(409, "sequence-gap", ack=marks)
    agent.ship()  # its ledger is of before all that
    accountant.script = accept
    for _ in range(2):
        turn(agent, clock, 3)
        agent.ship()
        assert told() == ["u1", "u1"]


def test_what_is_sent_again_is_not_told_again(
    agent_of: Any, node: SimulatedNode, clock: VirtualClock, accountant: Any, accept: Any
) -> None:
    agent, _, _ = agent_of()
    place(node, "u1", T0)
    turn(agent, clock, 2)
    agent.ship()
    accountant.script = lambda batch: accept(batch, durable=0)
    turn(agent, clock, 3)
    agent.ship()
    accountant.script = accept
    turn(agent, clock, 1)
    agent.ship()
    assert [fact.seq for batch in accountant.batches for fact in batch.facts] == [1, 1]


def test_liveness_follows_the_sampling(agent_of: Any, clock: VirtualClock) -> None:
    tasks = BackgroundTasks(clock)
    agent, _, _ = agent_of(tasks=tasks)
    clock.advance(44_000)
    assert agent.alive(), "the first sample may take its time"
    agent.sample()
    assert agent.alive()
    clock.advance(59_000)
    assert not agent.alive()
    assert tasks.faults() == {"sample": "has not ended for 59 s"}


def test_the_metrics_show_the_agent_and_its_node(agent_of: Any, node: SimulatedNode, clock: VirtualClock) -> None:
    metrics = AgentMetrics("n1", "0.0.0")
    seen: list[int] = []
    agent, _, _ = agent_of(metrics=metrics, on_sample=lambda snapshot: seen.append(snapshot.at_ms))
    place(node, "u1", T0)
    turn(agent, clock, 2)
    agent.ship()
    agent.sample()
    text = metrics.exposition().decode()
    assert 'gputally_gpu_busy_seconds_total{gpu_uuid="GPU-a"} 60.0' in text
    assert "gputally_agent_intervals_closed_total 2.0" in text
    assert 'gputally_agent_uploads_total{result="accepted"} 1.0' in text
    assert 'gputally_collector_success{collector="outbox"} 1.0' in text
    assert 'gputally_collector_success{collector="simulated"} 1.0' in text
    assert len(seen) == 7


def test_run_samples_and_ships_until_it_is_stopped(open_outbox: Callable[..., Outbox], accountant: Any) -> None:
    clock = SystemClock()
    node = SimulatedNode("n1", [make_gpu("GPU-a", 0, H100)], start_ms=clock.wall_ms())
    outbox = open_outbox()
    uploader = Uploader(outbox, accountant.url, "c1", "n1", "boot", None, clock)
    stop = threading.Event()
    samples: list[Snapshot] = []

    def enough(snapshot: Snapshot) -> None:
        samples.append(snapshot)
        if len(samples) == 4:
            stop.set()

    settings = Settings(node="n1", interval_s=1, sample_s=0.02, ship_s=0.01)
    agent = Agent(settings, SimulatedSource(node), outbox, uploader, clock, on_sample=enough)
    agent.run(stop)
    total = samples[-1].at_ms - samples[0].at_ms
    assert total * 1_000 <= sum(r.capacity_us for r in rows(accountant)) <= (total + 1_000) * 1_000


def test_a_defect_in_shipping_is_reported_and_tried_again(
    open_outbox: Callable[..., Outbox], caplog: pytest.LogCaptureFixture
) -> None:
    clock = VirtualClock(T0)
    node = SimulatedNode("n1", [make_gpu("GPU-a", 0, H100)], start_ms=clock.wall_ms())
    stop = threading.Event()
    outbox = open_outbox()

    class Broken(Uploader):
        attempts = 0

        def ship(self, upto: int | None = None) -> ShipResult:
            self.attempts += 1
            if self.attempts < 3:
                raise ZeroDivisionError
            stop.set()
            return ShipResult("idle")

    uploader = Broken(outbox, "", "c1", "n1", "boot", None, clock)
    settings = Settings(node="n1", sample_s=0.02, ship_s=0.01)
    Agent(settings, SimulatedSource(node), outbox, uploader, clock).run(stop)
    assert uploader.attempts >= 3
    assert caplog.text.count("shipping failed") == 2


def test_an_upload_that_hangs_does_not_keep_the_rest_from_being_spooled(open_outbox: Callable[..., Outbox]) -> None:
    clock = SystemClock()
    node = SimulatedNode("n1", [make_gpu("GPU-a", 0, H100)], start_ms=clock.wall_ms())
    stop, hanging, released = threading.Event(), threading.Event(), threading.Event()
    outbox = open_outbox()
    calls: list[str] = []
    samples: list[int] = []

    class Hanging(Uploader):
        def ship(self, upto: int | None = None) -> ShipResult:
            calls.append(threading.current_thread().name)
            hanging.set()
            released.wait(30)
            return ShipResult("idle")

    def seen(snapshot: Snapshot) -> None:
        samples.append(snapshot.at_ms)
        if hanging.is_set() and samples[-1] > samples[0]:
            stop.set()

    settings = Settings(node="n1", sample_s=0.02, grace_s=0.05)
    uploader = Hanging(outbox, "", "c1", "n1", "boot", None, clock)
    Agent(settings, SimulatedSource(node), outbox, uploader, clock, on_sample=seen).run(stop)
    released.set()
    assert calls == ["ship"]
    assert outbox.last_seq >= 1
