"""Without a source of its own, whoever has a process on a GPU holds it."""

from __future__ import annotations

from agent.core.settings import AgentSettings
from agent.holders.chosen import open_holders
from agent.holders.protocol import NodeSurroundings
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import VirtualClock


def test_it_opens_no_source_whichever_ways_to_share_a_gpu_are_known() -> None:
    clock = VirtualClock(0)
    node = NodeSurroundings("n", clock, BackgroundTasks(clock), AgentSettings(gpu_sharing="schedulers"))
    assert open_holders("processes", node) == ("processes", None)
