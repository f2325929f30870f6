"""Machines in processes of their own: they answer, they say what failed, and they are missed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fairshare.simulator.simulation_model import Job, Stopped, slots_of
from gputally.base.units import MS_PER_HOUR, US_PER_MS
from gputally.demo import cluster_and_workload
from gputally.demo.scenario import START_MS, Options, build
from gputally.demo.worker_processes import AgentPool, SiteConfig, WorkerLost

NODES = cluster_and_workload.nodes()[:2]
LATER = START_MS + MS_PER_HOUR


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[AgentPool]:
    plot = SiteConfig(
        nodes=NODES,
        queues=frozenset({"llm"}),
        folder=tmp_path,
        url="",
        interval_s=900,
        start_ms=START_MS,
        faults=build(Options(days=1)).faults,
        seed=1,
    )
    crew = AgentPool(tmp_path / "log")
    crew.settle(plot)
    yield crew
    crew.close()


def test_an_idle_hour_is_metered_by_all_of_them(crew: AgentPool) -> None:
    crew.begin([])
    crew.set_out([], LATER)
    crew.arrive()
    crew.deliver()
    crew.set_out([], LATER)
    crew.delivered()
    crew.arrive()
    assert crew.deliver_alone(NODES[0].name) == 8 * 4
    taken = crew.finish(LATER)
    assert taken.books.totals["unallocated"] == sum(taken.books.totals.values()) == 16 * MS_PER_HOUR * US_PER_MS
    assert taken.closed == 16 * 4


def test_what_fails_there_is_said_here_and_logged_there(crew: AgentPool, tmp_path: Path) -> None:
    never_started = Stopped(LATER, Job("j", "llm", 0, 1, 1), slots_of(NODES[0])[:1], 1, "finished")
    crew.begin([])
    crew.set_out([never_started], LATER)
    with pytest.raises(WorkerLost, match=r"^a process with agents failed: ValueError: .* holds nothing here"):
        crew.arrive()
    assert "Traceback" in (tmp_path / "log").read_text()


def test_a_process_that_is_gone_is_noticed(crew: AgentPool) -> None:
    crew.begin([])
    crew.close()
    with pytest.raises(WorkerLost, match="has ended"):
        crew.deliver()
