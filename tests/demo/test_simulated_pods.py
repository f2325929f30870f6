"""The demo's pods are as those of a cluster: a pod that takes the place of a stopped one is created at that stop."""

from __future__ import annotations

from fairshare.simulator.scheduler_engine import ClusterSimulation
from fairshare.simulator.simulation_model import Started, Stopped
from gputally.base.units import MS_PER_HOUR
from gputally.demo.simulated_machines import pods_of
from tests.simulator.conftest import fleet, job, queue


def test_a_pod_that_replaces_a_reclaimed_one_has_not_waited_while_that_one_ran() -> None:
    hogs = [job(f"hog{number}", minutes=600) for number in range(8)]
    late = job("late", "b", gpus=4, minutes=30, at=60)
    engine = ClusterSimulation(fleet(1), [queue("a"), queue("b")], [*hogs, late])
    events = engine.events_until(4 * MS_PER_HOUR)
    stops = {(event.job.id, event.attempt): event.at_ms for event in events if isinstance(event, Stopped)}
    again = [event for event in events if isinstance(event, Started) and event.attempt > 1]
    assert again
    for start in again:
        (pod,) = pods_of(start, {}, frozenset(), {"n0"})
        assert pod.facts.created_ms == stops[start.job.id, start.attempt - 1]
