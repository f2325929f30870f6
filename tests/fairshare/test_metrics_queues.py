"""Queue metrics of a report: waiting gangs, guaranteed GPUs and stranded free GPUs."""

from __future__ import annotations

from fairshare.controller.controller_metrics import families
from fairshare.controller.cycle_report import CycleReport, TargetReport
from fairshare.core.queues_and_weights import UNLIMITED, Entitlement, Gang
from fairshare.preemption.claims_and_placement import unplaceable_gpus
from tests.fairshare.preemption_cases import HOUR_MS, NOW_MS, gang


def shown(report: CycleReport) -> dict[tuple[str, ...], float]:
    return {
        (sample.name.removeprefix("gputally_"), *sample.labels.values()): sample.value
        for family in families(report, NOW_MS)
        for sample in family.samples
    }


def report(*gangs: Gang, entitlements: tuple[Entitlement, ...] = (), **free: float) -> CycleReport:
    target = TargetReport("kueue", "weight", gangs=gangs, entitlements=entitlements)
    return CycleReport(NOW_MS, 0, "v", None, None, (), (target,), free_by_node=free)


def test_waiting_is_summed_by_queue_and_the_oldest_wait_counts() -> None:
    seen = shown(
        report(
            gang("old", "nlp", waiting=(4, 4), hours=3),
            gang("new", "nlp", waiting=(1,), hours=1),
            gang("runs", "vision", on=(("n1", 8),), hours=9),
        )
    )
    assert seen["queue_waiting_gpus", "nlp"] == 9
    assert seen["queue_waiting_workloads", "nlp"] == 2
    assert seen["queue_oldest_wait_seconds", "nlp"] == 3 * HOUR_MS / 1000
    assert seen["queue_waiting_gpus", "vision"] == seen["queue_oldest_wait_seconds", "vision"] == 0


def test_an_unlimited_guarantee_is_no_number() -> None:
    due = (Entitlement("a", None, 4, 4, 0.5, 8, 2, 3.0), Entitlement("b", None, 4, 4, 0.5, 8, 2, UNLIMITED))
    seen = shown(report(entitlements=due))
    assert seen["queue_guaranteed_gpus", "a", "kueue"] == 3
    assert ("queue_guaranteed_gpus", "b", "kueue") not in seen


def test_free_gpus_are_stranded_only_while_a_pod_waits() -> None:
    free = {"n1": 3.0, "n2": 5.0}
    assert unplaceable_gpus(free, []) == 0
    assert unplaceable_gpus(free, [gang("fits", "a", waiting=(5,))]) == 0
    assert unplaceable_gpus(free, [gang("whole-node", "a", waiting=(8,))]) == 8
    assert unplaceable_gpus(free, [gang("whole-node", "a", waiting=(8,)), gang("small", "b", waiting=(4,))]) == 4
    assert unplaceable_gpus(free, [gang("runs", "a", on=(("n3", 8),))]) == 0
    assert unplaceable_gpus({"n1": -1.0}, [gang("any", "a", waiting=(1,))]) == 0


def test_the_families_show_it() -> None:
    assert shown(report(gang("whole-node", "a", waiting=(8,)), n1=3.0, n2=5.0))["fairshare_stranded_gpus",] == 8
