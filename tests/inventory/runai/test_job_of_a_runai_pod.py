"""The job of a pod that Run:ai's controllers label."""

from __future__ import annotations

from accountant.inventory.pod_facts import Owner, job


def test_the_labels_of_its_controllers_name_the_job_whatever_owns_the_pod() -> None:
    owners = (Owner("Job", "x-0-0"), Owner("RunaiJob", "x"))
    assert job(owners, {"workloadKind": "TrainingWorkload", "workloadName": "x"}) == "TrainingWorkload/x"
