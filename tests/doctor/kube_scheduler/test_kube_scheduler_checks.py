"""What the doctor finds of the kube-scheduler's extender."""

from __future__ import annotations

from fairshare.core.queues_and_weights import Condition
from fairshare.targets.status_config_map import StatusObject, render
from gputally.doctor.rbac_checks import extends
from gputally.doctor.scheduler_checks import recorded_conditions, weights
from gputally.kubernetes.objects import CONFIG_MAP
from tests.doctor.conftest import NOW_MS, MemoryInspector
from tests.doctor.policies import policy


def test_a_scheduler_that_asks_nothing_is_found_by_what_the_controller_notes() -> None:
    given = policy({"name": "a", "refs": ("policy:a",)})
    where = StatusObject("gputally")
    silent = Condition("Effective", "Unknown", "NoRequests", "no scheduler has asked")
    cluster = MemoryInspector([render(where, [("kube-scheduler", silent)], None, NOW_MS)])
    assert cluster.get(CONFIG_MAP, where.name, where.namespace)
    (found,) = weights(given, (), recorded_conditions(cluster, "gputally")).findings
    assert found.what == "it is unknown whether weights published to kube-scheduler have an effect (NoRequests)"
    assert "tlsConfig: {caFile: " in found.remedy
    assert weights(given, (), recorded_conditions(cluster, "elsewhere")).findings == ()
    asks = Condition("Effective", "True", "Asked", "the scheduler asks the extender")
    assert weights(given, (), (("kube-scheduler", asks),)).findings == ()


def test_rights_for_the_extender_are_those_of_a_policy_that_refers_to_it() -> None:
    assert extends(policy({"name": "a", "refs": ("policy:a",)}))
