"""A queue label counts where its scheduler enforces it: nobody else's queue pays on a user's word."""

from __future__ import annotations

import pytest

from gputally.base.pod_queue_labels import queue_ref

KAI, RUNAI, VOLCANO, SLURM = "kai-scheduler", "runai-scheduler", "volcano", "slurm-bridge-scheduler"


@pytest.mark.parametrize(("scheduler", "labels", "annotations", "ref"), [
    (KAI, {"kai.scheduler/queue": "vision"}, {}, "kai:vision"),
    (KAI, {"runai/queue": "vision"}, {}, "kai:vision"),
    (RUNAI, {"runai/queue": "vision"}, {}, "kai:vision"),
    (KAI, {"kai.scheduler/queue": "new", "runai/queue": "old"}, {}, "kai:new"),
    (KAI, {"kai.scheduler/queue": ""}, {}, ""),
    (KAI, {"volcano.sh/queue-name": "q"}, {}, ""),
    (VOLCANO, {"volcano.sh/queue-name": "q"}, {}, "volcano:q"),
    (VOLCANO, {}, {"scheduling.volcano.sh/queue-name": "q"}, "volcano:q"),
    (SLURM, {}, {"slinky.slurm.net/slurm-account": "physics"}, "slurm:physics"),
    (SLURM, {}, {"slurmjob.slinky.slurm.net/account": "physics"}, "slurm:physics"),
    *((other, {key: "q"}, {}, "") for other in ("default-scheduler", "") for key in (
        "kai.scheduler/queue", "runai/queue", "volcano.sh/queue-name", "slinky.slurm.net/slurm-account")),
    *((other, {}, {key: "q"}, "") for other in ("default-scheduler", KAI) for key in (
        "scheduling.volcano.sh/queue-name", "slinky.slurm.net/slurm-account", "slurmjob.slinky.slurm.net/account")),
    ("default-scheduler", {"kueue.x-k8s.io/queue-name": "a"}, {}, "kueue:ns/a"),
    (KAI, {"kueue.x-k8s.io/queue-name": "a", "kai.scheduler/queue": "b"}, {}, "kueue:ns/a"),
    ("default-scheduler", {}, {"kueue.x-k8s.io/queue-name": "a"}, ""),
    ("default-scheduler", {}, {}, ""),
])  # fmt: skip
def test_a_queue_counts_where_its_scheduler_enforces_it(
    scheduler: str, labels: dict[str, str], annotations: dict[str, str], ref: str
) -> None:
    assert queue_ref("ns", scheduler, labels, annotations) == ref
