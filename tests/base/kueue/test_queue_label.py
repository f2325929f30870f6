"""Kueue's label names a pod's queue whichever scheduler places the pod."""

from __future__ import annotations

import pytest

from gputally.kubernetes.pod_queue_labels import queue_ref

LABEL = {"kueue.x-k8s.io/queue-name": "a"}


@pytest.mark.parametrize(
    ("scheduler", "labels"), [("default-scheduler", LABEL), ("kai-scheduler", {**LABEL, "kai.scheduler/queue": "b"})]
)
def test_the_label_counts_before_those_of_the_scheduler(scheduler: str, labels: dict[str, str]) -> None:
    assert queue_ref("ns", scheduler, labels, {}) == "kueue:ns/a"
