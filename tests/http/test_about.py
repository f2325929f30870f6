"""Which decisions are about a job, where the names of jobs begin alike."""

from __future__ import annotations

import pytest

from accountant.ledger.protocols import JobKey
from accountant.web.job_and_node_pages import decisions_about_job, gangs_of
from accountant.wire.policy_models import Decision

KEY = JobKey("prod", "vision", "Job/train")
SIBLINGS = ("Job/train", "Job/train-2", "Job/training", "Job/other")


def decided(subject: str, *pods: str) -> Decision:
    return Decision(
        id=subject, at_ms=1, kind="preemption", target="kai", subject=subject, mode="enforce", reason="r",
        policy_version="p", inputs={"pods": list(pods)} if pods else {"verdict": {}},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("subject", "pods", "mine"),
    [
        ("Job/vision/train", (), True),
        ("Workload/vision/train-5c2f1", (), True),
        ("PodGroup/vision/train-9d-1", ("vision/train-abcde",), True),
        ("PodGroup/vision/pg-train-7d0c", (), True),
        ("Workload/vision/job-train-5c2f1", (), True),
        ("Workload/vision/job-train-2-5c2f1", (), False),
        ("Job/vision/train-2", (), False),
        ("Workload/vision/train-2-77aa1", (), False),
        ("PodGroup/vision/train-x", ("vision/train-2-abcde",), False),
        ("Job/vision/training", (), False),
        ("Job/other/train", (), False),
    ],
)
def test_a_name_that_begins_alike_is_another_jobs(subject: str, pods: tuple[str, ...], mine: bool) -> None:
    found = decisions_about_job([decided(subject, *pods)], KEY, {"train-abcde"}, SIBLINGS)
    assert bool(found) is mine


def test_the_longer_name_has_its_own() -> None:
    key = JobKey("prod", "vision", "Job/train-2")
    everything = [decided("Job/vision/train"), decided("Workload/vision/train-2-77aa1"), decided("Job/vision/train-2")]
    found = decisions_about_job(everything, key, (), SIBLINGS)
    assert [one.subject for one in found] == ["Workload/vision/train-2-77aa1", "Job/vision/train-2"]
    assert gangs_of(key) == ("vision/train-2", "vision/pg-train-2", "vision/job-train-2")
