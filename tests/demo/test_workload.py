"""The generated workload is repeatable and has the figures it was calibrated on."""

from __future__ import annotations

from collections import Counter
from statistics import mean, pvariance

import pytest

from accountant.ledger.team_assignment import USER_KEY
from fairshare.simulator.simulation_model import WHOLE, SimulatedJob
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR
from gputally.demo import cluster_and_workload
from gputally.demo.cluster_and_workload import REPLICAS, SHARED, failure, labels_of
from gputally.demo.options import DAYS, DemoOptions
from gputally.demo.scenario import START_MS, build, whole_gpus

GPUS = whole_gpus(cluster_and_workload.nodes())


@pytest.fixture(scope="module")
def jobs() -> list[SimulatedJob]:
    return cluster_and_workload.generate(3, START_MS, DAYS, GPUS)


@pytest.fixture(scope="module")
def training(jobs: list[SimulatedJob]) -> list[SimulatedJob]:
    return [job for job in jobs if job.kind == "training"]


def test_the_cluster_has_64_gpus_of_two_models_some_of_them_in_parts() -> None:
    gpus = [gpu for node in cluster_and_workload.nodes() for gpu in node.gpus]
    assert len(gpus) == 64
    assert Counter(len(gpu.shapes) for gpu in gpus) == {1: 61, 4: 3}
    assert sum(SHARED in gpu.shapes for gpu in gpus) == 1
    assert len({gpu.model for gpu in gpus}) == 2
    for node in cluster_and_workload.nodes():
        for spec, gpu in zip(node.gpus, cluster_and_workload.devices(node), strict=True):
            assert (spec.uuid, spec.model) == (gpu.uuid, gpu.model)
            assert [m.profile for m in gpu.mig] == [shape for shape in spec.shapes if shape not in (WHOLE, SHARED)]


def test_a_few_programs_fail_and_no_notebook_or_service(jobs: list[SimulatedJob]) -> None:
    failed = [(job.kind, of) for job in jobs if (of := failure(job)) is not None]
    assert {kind for kind, _ in failed} == {"training", "short"}
    assert {reason for _, (_, reason) in failed} == {"OOMKilled", "Error"}
    assert 0.03 < len(failed) / len(jobs) < 0.12


def test_the_same_seed_gives_the_same_jobs(jobs: list[SimulatedJob]) -> None:
    assert cluster_and_workload.generate(3, START_MS, DAYS, GPUS) == jobs
    assert cluster_and_workload.generate(4, START_MS, DAYS, GPUS) != jobs


def test_more_is_asked_for_than_there_is_but_not_many_times_the_cluster() -> None:
    scenario = build(DemoOptions())
    engine = scenario.engine()
    engine.events_until(scenario.start_ms)
    asked = []
    for hour in range(1, DAYS * 24 + 1):
        engine.events_until(scenario.start_ms + hour * MS_PER_HOUR)
        states = engine.queue_states().values()
        asked.append(sum(state.requested for state in states) / GPUS)
    assert sum(gpus > 1 for gpus in asked) >= len(asked) / 3
    assert max(asked) <= 6
    assert sum(asked) / len(asked) <= 3
    assert any(state.requested > state.allocated for state in states), "a job waits at the end"


def test_pods_name_their_user_their_project_and_who_pays(jobs: list[SimulatedJob]) -> None:
    labels = {job.id: labels_of(job) for job in jobs}
    named = [each for job, each in labels.items() if job != "debug-shell"]
    assert all(each.keys() == {"app.kubernetes.io/name", USER_KEY, "project", "cost-centre"} for each in named)
    assert {each["project"] for each in named} >= {"pretrain", "long-context", "exploration", "serving", "ci"}
    assert {each["cost-centre"] for each in named} == {team.cost_centre for team in cluster_and_workload.TEAMS}
    assert len({each[USER_KEY] for each in named}) == sum(len(team.people) for team in cluster_and_workload.TEAMS)
    of_trace = SimulatedJob("job-1-2", "somebody", START_MS, 1, 60_000)
    assert labels_of(of_trace) == {"app.kubernetes.io/name": "job-1-2"}, "a trace's team has no people"


def test_a_notebook_has_been_idle_for_a_day_at_the_end_of_every_run() -> None:
    for days in (2, DAYS):
        end_ms = START_MS + days * MS_PER_DAY
        jobs = cluster_and_workload.generate(1, START_MS, days, GPUS)
        assert any(
            job.kind == "notebook" and job.submit_ms <= end_ms - MS_PER_DAY and job.submit_ms + job.duration_ms > end_ms
            and job.utilisation_permille == 0
            for job in jobs
        )  # fmt: skip


def test_run_times_and_gang_sizes_are_like_those_of_a_real_cluster(training: list[SimulatedJob]) -> None:
    hours = sorted(job.duration_ms / MS_PER_HOUR for job in training)
    assert 0.25 <= hours[len(hours) // 2] <= 0.8
    assert 5 <= hours[len(hours) * 9 // 10] <= 25
    assert hours[-1] <= 48
    total = sum(job.gpus * job.duration_ms for job in training)
    assert sum(job.gpus == 1 for job in training) / len(training) >= 0.5
    assert sum(job.gpus * job.duration_ms for job in training if job.gpus == 1) / total <= 0.35
    assert 0.35 <= sum(job.gpus * job.duration_ms for job in training if job.gpus >= 5) / total <= 0.7


def test_arrivals_come_in_bursts(training: list[SimulatedJob]) -> None:
    per_hour = Counter((job.submit_ms - START_MS) // MS_PER_HOUR for job in training)
    counts = [per_hour[hour] for hour in range(DAYS * 24)]
    assert pvariance(counts) / mean(counts) >= 5


def test_short_pods_live_inside_one_interval_and_notebooks_idle(jobs: list[SimulatedJob]) -> None:
    short = [job for job in jobs if job.kind == "short"]
    assert len(short) > 1_000
    assert all(job.duration_ms <= 11 * 60_000 for job in short)
    notebooks = [job for job in jobs if job.kind == "notebook"]
    assert mean(job.utilisation_permille for job in notebooks) < 80


def test_utilisation_of_parts_makes_whole_microseconds(jobs: list[SimulatedJob]) -> None:
    for job in jobs:
        if job.shape == SHARED:
            assert job.utilisation_permille % REPLICAS == 0
        elif job.shape != WHOLE:
            assert job.utilisation_permille % 7 == 0


def test_one_pod_has_no_team() -> None:
    scenario = build(DemoOptions(days=2))
    queues = {queue.name for queue in scenario.policy.queues}
    assert {job.queue for job in scenario.jobs} - queues == {cluster_and_workload.SANDBOX}


@pytest.mark.parametrize("days", [1, 2, 7, DAYS])
def test_faults_stay_apart_and_inside_the_run(days: int) -> None:
    scenario = build(DemoOptions(days=days))
    faults = scenario.faults
    for outage in scenario.outages:
        assert outage.end_ms is not None
        assert scenario.start_ms < outage.start_ms < outage.end_ms < scenario.end_ms
        assert outage.name != faults.killed_node
    assert scenario.start_ms < faults.killed_ms < faults.back_ms < scenario.end_ms
    assert all(0 < hour < days * 24 for hour in faults.away)
    assert faults.lost_acks
