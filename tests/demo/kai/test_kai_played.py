"""The demo plays KAI: what its scheduler says of a pod whose GPUs it takes."""

from __future__ import annotations

from fairshare.schedulers.kai.plugin import SCHEDULER
from fairshare.simulator.simulation_model import QueueAtReclaim
from gputally.demo.played_scheduler import played, player, pod_marks, queue_ref


def test_the_demo_plays_kai_if_it_is_installed() -> None:
    assert played() is SCHEDULER
    assert (pod_marks(), queue_ref("vision")) == (("kai.scheduler/queue", "kai-scheduler"), "kai:vision")


def test_a_pod_that_is_reclaimed_is_told_which_queues_were_compared() -> None:
    compared = QueueAtReclaim("vision", 6, 2, 4.0, 100), QueueAtReclaim("llm", 0, 2, 4.0, 100)
    first, *queues = player().reclaim_message("vision/p", "llm/llm-sft-2", compared).splitlines()
    assert first == "Pod vision/p was preempted by workload llm/llm-sft-2."
    assert ["fair-share of <GPU: 4," in line for line in queues] == [True, True]
