"""The job of a pod in one of Kueue's groups of pods."""

from __future__ import annotations

from accountant.inventory.pod_facts import job


def test_a_group_of_pods_is_the_job_of_a_pod_without_an_owner() -> None:
    assert job((), {"kueue.x-k8s.io/pod-group-name": "g"}) == "PodGroup/g"
