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
def agents(tmp_path: Path) -> Iterator[AgentPool]:
    config = SiteConfig(
        nodes=NODES,
        queues=frozenset({"llm"}),
        folder=tmp_path,
        url="",
        interval_s=900,
        start_ms=START_MS,
        faults=build(Options(days=1)).faults,
        seed=1,
    )
    agents = AgentPool(tmp_path / "log")
    agents.create_sites(config)
    yield agents
    agents.close()


def test_an_idle_hour_is_metered_by_all_of_them(agents: AgentPool) -> None:
    agents.begin([])
    agents.start_hour([], LATER)
    agents.finish_hour()
    agents.start_delivery()
    agents.start_hour([], LATER)
    agents.finish_delivery()
    agents.finish_hour()
    assert agents.deliver_alone(NODES[0].name) == 8 * 4
    result = agents.finish(LATER)
    assert result.totals.accounts["unallocated"] == sum(result.totals.accounts.values()) == 16 * MS_PER_HOUR * US_PER_MS
    assert result.closed == 16 * 4


def test_what_fails_there_is_said_here_and_logged_there(agents: AgentPool, tmp_path: Path) -> None:
    never_started = Stopped(LATER, Job("j", "llm", 0, 1, 1), slots_of(NODES[0])[:1], 1, "finished")
    agents.begin([])
    agents.start_hour([never_started], LATER)
    with pytest.raises(WorkerLost, match=r"^a process with agents failed: ValueError: .* holds no device of this node"):
        agents.finish_hour()
    assert "Traceback" in (tmp_path / "log").read_text()


def test_a_process_that_is_gone_is_noticed(agents: AgentPool) -> None:
    agents.begin([])
    agents.close()
    with pytest.raises(WorkerLost, match="has ended"):
        agents.start_delivery()
