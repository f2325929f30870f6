"""The engine's laws, on cases small enough to be worked out by hand."""

from __future__ import annotations

from collections import Counter

import pytest

from fairshare.simulator.scheduler_engine import ClusterSimulation
from fairshare.simulator.simulation_model import GpuSpec, Job, NodeSpec, Outage, Rules, Started, Stopped
from gputally.base.errors import DivisionError
from tests.simulator.conftest import MINUTE, Watcher, fleet, job, queue

HOUR = 60 * MINUTE


def starts(engine: ClusterSimulation, until_ms: int) -> dict[str, int]:
    return {e.job.id: e.at_ms for e in engine.events_until(until_ms) if isinstance(e, Started)}


def test_a_gang_waits_until_it_fits_whole() -> None:
    engine = ClusterSimulation(fleet(1), [queue("a")], [job("first", gpus=5), job("second", gpus=4, at=1)])
    assert starts(engine, 59 * MINUTE) == {"first": 0}
    assert starts(engine, 60 * MINUTE) == {"second": 60 * MINUTE}


def test_smaller_jobs_pass_a_gang_that_does_not_fit_within_the_scan_depth() -> None:
    jobs = [job("running", gpus=6), job("big", gpus=4, at=1), *(job(f"small-{i}", at=2) for i in range(3))]
    engine = ClusterSimulation(fleet(1), [queue("a")], jobs, rules=Rules(scan_depth=2))
    assert starts(engine, 3 * MINUTE) == {"running": 0, "small-0": 2 * MINUTE, "small-1": 2 * MINUTE}


def test_small_jobs_share_a_node_so_that_a_whole_node_stays_free() -> None:
    engine = ClusterSimulation(fleet(2), [queue("a")], [job("x"), job("y", gpus=2), job("z", gpus=8)])
    started = [e for e in engine.events_until(0) if isinstance(e, Started)]
    assert {e.job.id: {slot.node for slot in e.slots} for e in started} == {"x": {"n0"}, "y": {"n0"}, "z": {"n1"}}


def test_a_gang_larger_than_a_node_takes_as_few_nodes_as_it_can() -> None:
    engine = ClusterSimulation(fleet(3), [queue("a")], [job("a-one"), job("big", gpus=12)])
    big = next(e for e in engine.events_until(0) if isinstance(e, Started) and e.job.id == "big")
    assert Counter(slot.node for slot in big.slots) == {"n1": 8, "n0": 4}


def test_a_gang_never_mixes_gpu_models() -> None:
    nodes = [*fleet(1, 4, "H100"), NodeSpec("m0", tuple(GpuSpec(f"GPU-m-{i}", "A100") for i in range(4)))]
    engine = ClusterSimulation(nodes, [queue("a")], [job("six", gpus=6), job("four", gpus=4, models=("A100",))])
    assert starts(engine, HOUR) == {"four": 0}
    assert engine.outcomes["six"].rejected


def test_what_can_never_run_is_rejected_and_not_in_anybodys_way() -> None:
    jobs = [
        job("huge", gpus=9),
        job("over-limit", queue="b", gpus=3),
        job("not-preemptible", gpus=2, preemptible=False),
    ]
    engine = ClusterSimulation(fleet(1), [queue("a", deserved=1), queue("b", limit=2)], [*jobs, job("fits")])
    assert starts(engine, 0) == {"fits": 0}
    assert [name for name, outcome in engine.outcomes.items() if outcome.rejected] == [
        "huge", "not-preemptible", "over-limit",
    ]  # fmt: skip
    assert engine.queue_states()["a"].requested == 1


def test_a_limit_holds_even_on_an_empty_cluster_and_along_the_tree() -> None:
    queues = [queue("root", limit=5), queue("a", limit=4, parent="root"), queue("b", parent="root")]
    engine = ClusterSimulation(fleet(1), queues, [job(f"{q}{i}", queue=q) for q in "ab" for i in range(6)])
    engine.events_until(0)
    states = engine.queue_states()
    assert states["root"].allocated == 5
    assert states["a"].allocated <= 4
    assert states["root"].requested == 12


def test_non_preemptible_jobs_stay_inside_the_deserved_quota() -> None:
    jobs = [job(f"j{i}", preemptible=False) for i in range(4)]
    engine = ClusterSimulation(fleet(1), [queue("a", deserved=2)], jobs)
    assert len(starts(engine, 0)) == 2


def test_a_queue_takes_back_its_share_from_one_above_its_own_newest_first() -> None:
    hog = [job(f"hog{i}", minutes=600, at=i) for i in range(8)]
    engine = ClusterSimulation(fleet(1), [queue("a"), queue("b")], [*hog, job("late", queue="b", gpus=3, at=60)])
    stops = [e for e in engine.events_until(61 * MINUTE) if isinstance(e, Stopped)]
    assert [(e.job.id, e.reason, e.for_queue) for e in stops] == [
        ("hog7", "reclaimed", "b"), ("hog6", "reclaimed", "b"), ("hog5", "reclaimed", "b"),
    ]  # fmt: skip
    assert engine.queue_states()["b"].allocated == 3


def test_without_reclaim_the_late_queue_waits() -> None:
    hog = [job(f"hog{i}", minutes=600) for i in range(8)]
    late = job("late", queue="b", at=60)
    engine = ClusterSimulation(fleet(1), [queue("a"), queue("b")], [*hog, late], rules=Rules(reclaim=False))
    assert "late" not in starts(engine, 9 * HOUR)


def test_deserved_quota_is_never_reclaimed() -> None:
    """b is owed most of the cluster by weight, but a's quota is seven of eight."""
    hog = [job(f"hog{i}", minutes=600) for i in range(8)]
    late = [job(f"late{i}", queue="b", at=60) for i in range(4)]
    engine = ClusterSimulation(fleet(1), [queue("a", deserved=7), queue("b", weight=3)], [*hog, *late])
    engine.events_until(3 * HOUR)
    assert (engine.queue_states()["a"].allocated, engine.queue_states()["b"].allocated) == (7, 1)


def test_a_gang_that_would_carry_its_queue_below_its_quota_stays() -> None:
    engine = ClusterSimulation(
        fleet(1), [queue("a", deserved=6), queue("b")], [job("gang", gpus=8, minutes=600), job("late", "b", at=60)]
    )
    assert "late" not in starts(engine, 3 * HOUR)


def test_jobs_that_may_not_be_preempted_are_not() -> None:
    hog = [job(f"hog{i}", minutes=600, preemptible=False) for i in range(8)]
    engine = ClusterSimulation(fleet(1), [queue("a", deserved=8), queue("b")], [*hog, job("late", "b", at=60)])
    assert "late" not in starts(engine, 3 * HOUR)


def test_a_job_is_left_alone_for_its_minimum_run_time() -> None:
    hog = [job(f"hog{i}", minutes=600) for i in range(8)]
    engine = ClusterSimulation(fleet(1), [queue("a"), queue("b")], [*hog, job("late", queue="b", at=1)])
    assert starts(engine, 20 * MINUTE)["late"] == 10 * MINUTE


def test_work_since_the_last_checkpoint_is_lost_and_a_restart_costs_two_minutes() -> None:
    hog = job("hog", gpus=8, minutes=120)
    late = job("late", queue="b", gpus=4, minutes=10, at=70)
    engine = ClusterSimulation(fleet(1), [queue("a"), queue("b")], [hog, late])
    engine.events_until(10 * HOUR)
    outcome = engine.outcomes["hog"]
    # 70 min run, 60 saved; it comes back at minute 80, and has 60 min of work and 2 of restart to do.
    assert outcome.evictions == 1
    assert outcome.finish_ms == (80 + 62) * MINUTE
    assert outcome.lost_gpu_ms == 8 * (10 + 2) * MINUTE


def test_no_more_is_stopped_than_the_gang_needs() -> None:
    """Newest first would stop the single job and then the gang of four; the gang alone is enough."""
    hog = [job("old", gpus=3, minutes=600), job("gang", gpus=4, minutes=600, at=1), job("one", minutes=600, at=2)]
    engine = ClusterSimulation(fleet(1), [queue("a"), queue("b")], [*hog, job("late", queue="b", gpus=4, at=60)])
    assert [e.job.id for e in engine.events_until(HOUR) if isinstance(e, Stopped)] == ["gang"]


def test_heavier_weights_move_the_division_of_a_contended_cluster() -> None:
    jobs = [job(f"{q}{i:02}", queue=q, minutes=20, at=i) for q in "ab" for i in range(120)]

    def hours(weight: float) -> Counter[str]:
        engine = ClusterSimulation(fleet(1), [queue("a", weight=1), queue("b", weight=1)], jobs)
        engine.set_weights({"a": weight})
        watcher = Watcher(fleet(1)).see_all(engine.events_until(90 * MINUTE))
        return Counter(watcher.gpu_ms)

    shares = [hours(weight)["a"] / hours(weight).total() for weight in (0.25, 1.0, 4.0)]
    assert shares[0] < 0.35 < shares[1] < 0.65 < shares[2]


def test_weights_changed_while_it_runs_take_effect() -> None:
    jobs = [job(f"{q}{i}", queue=q, minutes=6000) for q in "ab" for i in range(8)]
    engine = ClusterSimulation(fleet(1), [queue("a"), queue("b")], jobs)
    engine.events_until(HOUR)
    assert engine.queue_states()["a"].allocated == 4
    engine.set_weights({"a": 3.0})
    engine.events_until(2 * HOUR)
    assert engine.queue_states()["a"].allocated == 6


def test_priority_comes_before_weight_over_the_quota() -> None:
    jobs = [job(f"{q}{i}", queue=q) for q in "ab" for i in range(8)]
    engine = ClusterSimulation(fleet(1), [queue("a", priority=200), queue("b", deserved=1, weight=100)], jobs)
    engine.events_until(0)
    assert engine.queue_states()["a"].allocated == 7


@pytest.mark.parametrize("target", ["node", "gpu"])
def test_an_outage_stops_its_jobs_and_takes_the_capacity_away(target: str) -> None:
    nodes = fleet(2)
    outage = Outage(target, "n0" if target == "node" else "GPU-0-3", 45 * MINUTE, 90 * MINUTE, "broken")  # type: ignore[arg-type]
    engine = ClusterSimulation(nodes, [queue("a")], [job("gang", gpus=16, minutes=60)], outages=[outage])
    watcher = Watcher(nodes)
    watcher.see_all(engine.events_until(80 * MINUTE))
    assert not watcher.holders
    watcher.see_all(engine.events_until(3 * HOUR))
    outcome = engine.outcomes["gang"]
    assert (outcome.crashes, outcome.finish_ms) == (1, (90 + 30 + 2) * MINUTE)


def test_overlapping_outages_count_both() -> None:
    outages = [Outage("node", "n0", 0, 60 * MINUTE, "power"), Outage("gpu", "GPU-0-0", 30 * MINUTE, 90 * MINUTE, "Xid")]
    engine = ClusterSimulation(
        fleet(1), [queue("a")], [job("all", gpus=8, at=1), job("seven", gpus=7, at=1)], outages=outages
    )
    assert starts(engine, 80 * MINUTE) == {"seven": 60 * MINUTE}


def test_parts_of_a_gpu_are_pools_of_their_own() -> None:
    parts = GpuSpec("GPU-mig", "A100", ("3g.40gb", "2g.20gb", "1g.10gb", "1g.10gb"))
    nodes = [NodeSpec("n0", (parts, GpuSpec("GPU-ts", "A100", ("shared",) * 2), GpuSpec("GPU-1", "A100")))]
    jobs = [
        *(job(f"mig{i}", shape="1g.10gb") for i in range(3)),
        *(job(f"ts{i}", shape="shared", queue="b") for i in range(3)),
        job("whole"),
        job("two", gpus=2),
    ]
    engine = ClusterSimulation(nodes, [queue("a"), queue("b")], jobs)
    assert set(starts(engine, 0)) == {"mig0", "mig1", "ts0", "ts1", "whole"}
    assert engine.queue_states()["a"].allocated == 1
    assert engine.outcomes["two"].rejected


def test_jobs_of_another_scheduler_shrink_what_is_divided() -> None:
    jobs = [job("foreign", queue="elsewhere", gpus=2), *(job(f"{q}{i}", queue=q) for q in "ab" for i in range(8))]
    engine = ClusterSimulation(fleet(1), [queue("a"), queue("b")], jobs)
    engine.events_until(0)
    assert [engine.queue_states()[q].share for q in "ab"] == [3, 3]


def test_scheduling_happens_on_the_cycle() -> None:
    engine = ClusterSimulation(fleet(1), [queue("a")], [Job("j", "a", 1_001, 1, 5_000)], rules=Rules(cycle_ms=60_000))
    assert starts(engine, HOUR) == {"j": 60_000}


def test_impossible_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="job ids"):
        ClusterSimulation(fleet(1), [queue("a")], [job("same"), job("same")])
    with pytest.raises(ValueError, match="unique"):
        ClusterSimulation([*fleet(1), *fleet(1)], [queue("a")], [])
    with pytest.raises(ValueError, match="unknown node"):
        ClusterSimulation(fleet(1), [queue("a")], [], outages=[Outage("node", "n9", 0, None, "")])
    with pytest.raises(DivisionError):
        ClusterSimulation(fleet(1), [queue("a", parent="nobody")], [])
    with pytest.raises(ValueError, match="gpus >= 1"):
        job("none", gpus=0)
    engine = ClusterSimulation(fleet(1), [queue("a")], [])
    with pytest.raises(ValueError, match="weight"):
        engine.set_weights({"a": -1.0})
    with pytest.raises(KeyError):
        engine.set_weights({"b": 1.0})
