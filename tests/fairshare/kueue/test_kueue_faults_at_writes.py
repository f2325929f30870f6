"""Faults while a Workload of Kueue is switched on again."""

from __future__ import annotations

import pytest

from fairshare.preemption.unfinished_preemptions import finish_all
from fairshare.schedulers.kueue.kinds import WORKLOADS
from fairshare.targets.whole_stop import PREEMPTION, PreemptionIntent
from tests.fairshare.builders import (
    object_of,
)
from tests.fairshare.case_types import BEFORE
from tests.fairshare.conftest import NOW_MS
from tests.fairshare.failing_writes import FAULTS, FaultAt
from tests.fairshare.scheduler_kinds import KINDS


@pytest.mark.parametrize(("error", "carried_out"), FAULTS)
def test_a_fault_while_a_workload_is_switched_on_again_is_made_good(error: Exception, carried_out: bool) -> None:
    reserved = [{"type": "QuotaReserved", "status": "False", "lastTransitionTime": BEFORE}]
    off = object_of(
        WORKLOADS[0], "x", {"active": False, "queueName": "a"}, {"conditions": reserved},
        annotations={PREEMPTION: PreemptionIntent("d1", NOW_MS - 1).text()},
    )  # fmt: skip
    cluster = FaultAt(KINDS, [off])
    cluster.at, cluster.error, cluster.carried_out = 0, error, carried_out
    finish_all(cluster, NOW_MS)
    cluster.at = None
    finish_all(cluster, NOW_MS)
    found = cluster.get(WORKLOADS[0], "x", "ns")
    assert (found["spec"]["active"], PREEMPTION in found["metadata"]["annotations"]) == (True, False)
