"""The generated workload is repeatable and has the figures it was calibrated on."""

from __future__ import annotations

from collections import Counter
from statistics import mean, pvariance

import pytest

from fairshare.simulator.simulation_model import WHOLE, Job
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR
from gputally.demo import cluster_and_workload
from gputally.demo.cluster_and_workload import REPLICAS, SHARED
from gputally.demo.options import Options
from gputally.demo.scenario import START_MS, build, whole_gpus

DAYS = 31
GPUS = whole_gpus(cluster_and_workload.nodes())


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    return cluster_and_workload.generate(3, START_MS, DAYS, GPUS)


@pytest.fixture(scope="module")
def training(jobs: list[Job]) -> list[Job]:
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


def test_the_same_seed_gives_the_same_jobs(jobs: list[Job]) -> None:
    assert cluster_and_workload.generate(3, START_MS, DAYS, GPUS) == jobs
    assert cluster_and_workload.generate(4, START_MS, DAYS, GPUS) != jobs


def test_more_is_asked_for_than_there_is(training: list[Job]) -> None:
    end_ms = START_MS + DAYS * MS_PER_DAY
    offered = sum(job.gpus * min(job.duration_ms, end_ms - job.submit_ms) for job in training)
    assert 1.1 <= offered / (GPUS * DAYS * MS_PER_DAY) <= 1.35


def test_run_times_and_gang_sizes_are_like_those_of_a_real_cluster(training: list[Job]) -> None:
    hours = sorted(job.duration_ms / MS_PER_HOUR for job in training)
    assert 0.25 <= hours[len(hours) // 2] <= 0.8
    assert 5 <= hours[len(hours) * 9 // 10] <= 25
    assert hours[-1] <= 48
    total = sum(job.gpus * job.duration_ms for job in training)
    assert sum(job.gpus == 1 for job in training) / len(training) >= 0.5
    assert sum(job.gpus * job.duration_ms for job in training if job.gpus == 1) / total <= 0.35
    assert 0.35 <= sum(job.gpus * job.duration_ms for job in training if job.gpus >= 5) / total <= 0.7


def test_arrivals_come_in_bursts(training: list[Job]) -> None:
    per_hour = Counter((job.submit_ms - START_MS) // MS_PER_HOUR for job in training)
    counts = [per_hour[hour] for hour in range(DAYS * 24)]
    assert pvariance(counts) / mean(counts) >= 5


def test_short_pods_live_inside_one_interval_and_notebooks_idle(jobs: list[Job]) -> None:
    short = [job for job in jobs if job.kind == "short"]
    assert len(short) > 1_000
    assert all(job.duration_ms <= 11 * 60_000 for job in short)
    notebooks = [job for job in jobs if job.kind == "notebook"]
    assert mean(job.utilisation_permille for job in notebooks) < 80


def test_utilisation_of_parts_makes_whole_microseconds(jobs: list[Job]) -> None:
    for job in jobs:
        if job.shape == SHARED:
            assert job.utilisation_permille % REPLICAS == 0
        elif job.shape != WHOLE:
            assert job.utilisation_permille % 7 == 0


def test_one_pod_has_no_team() -> None:
    scenario = build(Options(days=2))
    queues = {queue.name for queue in scenario.policy.queues}
    assert {job.queue for job in scenario.jobs} - queues == {cluster_and_workload.SANDBOX}


@pytest.mark.parametrize("days", [1, 2, 7, 31])
def test_faults_stay_apart_and_inside_the_run(days: int) -> None:
    scenario = build(Options(days=days))
    faults = scenario.faults
    for outage in scenario.outages:
        assert outage.end_ms is not None
        assert scenario.start_ms < outage.start_ms < outage.end_ms < scenario.end_ms
        assert outage.name != faults.killed_node
    assert scenario.start_ms < faults.killed_ms < faults.back_ms < scenario.end_ms
    assert all(0 < hour < days * 24 for hour in faults.away)
    assert faults.lost_acks
