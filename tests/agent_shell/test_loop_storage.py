"""An agent whose spool cannot be written: memory takes its place, bounded, and it is said."""

from __future__ import annotations

from typing import Any

import pytest

from agent.main_loop import MAX_BACKLOG_ROWS
from agent.metrics.exporter import AgentMetrics
from agent.upload.spool import Outbox, OutboxUnavailable
from tests.agent_shell.loops import MINUTE, Site
from tests.agent_shell.outboxes import T0


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
    agent = site.start(wrap=FullDisk)
    site.place("u1")
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
    """query_only makes sqlite answer every write as a file system that was remounted read-only does."""
    metrics = AgentMetrics("n1", "0")
    agent = site.start(metrics=metrics)
    site.place("p1")
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
