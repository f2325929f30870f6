"""The demo's API server says of pods what a real one says, and the accountant's inventory reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from accountant.inventory.kubernetes_inventory import ClusterInventory
from agent.wire import PodFacts
from fairshare.simulator.simulation_model import (
    WHOLE,
    Event,
    Flavour,
    GpuSpec,
    Outage,
    OutageBegan,
    QueueAtReclaim,
    SimulatedJob,
    SimulatedNodeSpec,
    Slot,
    Started,
    Stopped,
)
from gputally.base.clock import VirtualClock
from gputally.base.pod_stop import PodStop
from gputally.demo.cluster_and_workload import failure
from gputally.demo.played_scheduler import pod_marks, queue_ref
from gputally.demo.simulated_api_server import RULES, SimulatedApiServer
from gputally.demo.simulated_machines import pods_of

NODES = [SimulatedNodeSpec(name, tuple(GpuSpec(f"{name}-{i}", "A100") for i in range(4)), "p") for name in ("n1", "n2")]
JOB = SimulatedJob("vision-train-1", "vision", 1_000, 6, 60_000)
SLOTS = tuple(Slot(node, f"{node}-{i}", 0, Flavour(WHOLE, "A100", "p")) for node in ("n1", "n2") for i in range(3))
STARTED = Started(2_000, JOB, SLOTS, 1, JOB.submit_ms)


class Site:
    def __init__(self) -> None:
        self.clock = VirtualClock(0)
        self.epochs: list[tuple[int, int]] = []
        self.server = SimulatedApiServer(NODES, ["vision", "llm"])
        self.inventory = ClusterInventory(self.server.api(), self.clock, "demo")
        self.inventory.sync()

    def told(self, until_ms: int, submitted: Sequence[SimulatedJob], *events: Event) -> dict[str, PodFacts]:
        """What the inventory has newly read of each pod, by uid."""
        self.clock.advance_to(until_ms)
        self.server.apply(until_ms, submitted, events, self.inventory.follow)
        read = self.inventory.read(until_ms)
        self.epochs += [(one.epoch, one.at_ms) for one in read.epochs]
        self.inventory.taken()
        return {fact.uid: fact for _, fact in read.pods}


def stopped(reason: str, **why: object) -> Stopped:
    return Stopped(9_000, JOB, SLOTS, 1, reason, **why)  # type: ignore[arg-type]


def test_a_job_that_was_submitted_waits_for_all_its_gpus() -> None:
    found = Site().told(1_500, [JOB]).values()
    assert sum(int(pod.requests["nvidia.com/gpu"]) for pod in found) == 6
    assert {(pod.namespace, pod.workload, pod.queue_ref) for pod in found} == {
        ("vision", "PyTorchJob/vision-train-1", queue_ref("vision"))
    }
    assert {(pod.created_ms, pod.scheduled_ms, pod.node) for pod in found} == {(1_000, None, "")}


def test_the_pods_that_start_are_those_that_waited_and_those_that_the_agents_see() -> None:
    site = Site()
    waited = site.told(1_500, [JOB])
    found = site.told(3_000, [], STARTED)
    assert waited.keys() <= found.keys()
    of_agents = {pod.facts.uid: pod for pod in pods_of(STARTED, {}, frozenset({"vision"}), {"n1", "n2"})}
    assert found.keys() == of_agents.keys()
    for uid, pod in found.items():
        seen = of_agents[uid].facts
        for name in ("namespace", "name", "node", "workload", "queue_ref", "requests", "created_ms", "scheduled_ms"):
            assert getattr(pod, name) == getattr(seen, name), name


def test_a_large_training_job_reports_its_checkpoints_and_goes_on_counting_after_a_stop() -> None:
    site, half_h = Site(), RULES.checkpoint_ms
    site.told(3_000, [JOB], STARTED)
    site.told(3_000 + half_h, [])
    assert site.epochs == [(1, STARTED.at_ms + half_h)]
    stop = replace(stopped("reclaimed", for_queue="llm", for_job="llm-sft-2"), at_ms=STARTED.at_ms + 2 * half_h)
    site.told(stop.at_ms + 1_000, [], stop)
    again = replace(STARTED, at_ms=stop.at_ms + 60_000, attempt=2, queued_ms=stop.at_ms)
    site.told(again.at_ms + RULES.restart_ms + half_h, [], again)
    assert site.epochs[1:] == [(2, STARTED.at_ms + 2 * half_h), (3, again.at_ms + RULES.restart_ms + half_h)]


def test_a_small_job_reports_no_checkpoint() -> None:
    site, small = Site(), replace(JOB, gpus=3)
    site.told(3_000, [small], replace(STARTED, job=small, slots=SLOTS[:3]))
    site.told(RULES.checkpoint_ms * 3, [])
    assert site.epochs == []


def test_who_reclaimed_its_gpus_is_said_and_the_job_waits_again() -> None:
    site = Site()
    site.told(3_000, [JOB], STARTED)
    compared = QueueAtReclaim("vision", 6, 2, 4.0, 100), QueueAtReclaim("llm", 0, 2, 4.0, 100)
    found = site.told(9_500, [], stopped("reclaimed", for_queue="llm", for_job="llm-sft-2", compared=compared))
    old, new = ([pod for pod in found.values() if (pod.ended_ms is not None) is ended] for ended in (True, False))
    for pod in old:
        assert pod.stop is not None
        assert (pod.stop.how, pod.stop.by, pod.stop.at_ms) == ("preempted", pod_marks()[1], 9_000)
        assert f"Pod vision/{pod.name} was preempted by workload llm/llm-sft-2." in pod.stop.message
    assert [pod.ended_ms for pod in old] == [9_000, 9_000]
    assert {(pod.created_ms, pod.scheduled_ms, pod.stop) for pod in new} == {(9_000, None, None)}
    assert site.told(10_000, []) == {}


def test_a_job_that_finished_has_not_been_stopped() -> None:
    site = Site()
    site.told(3_000, [JOB], STARTED)
    found = site.told(9_500, [], stopped("finished"))
    assert {(pod.ended_ms, pod.stop) for pod in found.values()} == {(9_000, None)}


def test_a_job_that_fails_has_one_pod_that_failed_and_is_not_started_again() -> None:
    name = next(name for name in (f"vision-train-{n}" for n in range(100)) if failure(replace(JOB, id=name)))
    job = replace(JOB, id=name)
    site = Site()
    site.told(3_000, [job], replace(STARTED, job=job))
    found = site.told(9_500, [], replace(stopped("finished"), job=job))
    assert [pod.ended_ms for pod in found.values()] == [9_000, 9_000]
    failed, other = sorted(found.values(), key=lambda pod: pod.node)
    code, reason = failure(job) or (0, "")
    assert failed.stop == PodStop("failed", "", reason, f"container main ended with exit code {code}", 9_000)
    assert other.stop == PodStop("deleted", at_ms=9_000)
    assert site.told(10_000, []) == {}


def test_a_node_that_fails_says_so_of_its_own_pods_alone() -> None:
    site = Site()
    site.told(3_000, [JOB], STARTED)
    struck = OutageBegan(9_000, Outage("node", "n2", 9_000, None, "power supply failed"))
    found = site.told(9_500, [], stopped("outage"), struck)
    how = {pod.node: pod.stop and (pod.stop.how, pod.stop.by) for pod in found.values() if pod.ended_ms}
    assert how == {"n1": ("deleted", ""), "n2": ("evicted", "taint manager")}


def test_a_gpu_that_fails_ends_the_pod_that_holds_it() -> None:
    site = Site()
    site.told(3_000, [JOB], STARTED)
    struck = OutageBegan(9_000, Outage("gpu", "n1-1", 9_000, None, "Xid 79"))
    found = site.told(9_500, [], stopped("outage"), struck)
    by_node = {pod.node: pod.stop for pod in found.values() if pod.ended_ms}
    failed = PodStop("failed", "", "Error", "container main ended with exit code 134", 9_000)
    assert by_node == {"n1": failed, "n2": PodStop("deleted", at_ms=9_000)}


def test_all_pods_that_wait_and_run_are_known_however_many_change_in_an_hour() -> None:
    jobs = [SimulatedJob(f"vision-train-{number}", "vision", 1_000, 1, 60_000) for number in range(1_500)]
    assert len(Site().told(1_500, jobs)) == 1_500
