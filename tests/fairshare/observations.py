"""Reads weights, conditions, results and pods from clusters and reports of cycles."""

from __future__ import annotations

from typing import Any, cast

from fairshare.controller.cycle_report import CycleReport
from fairshare.core.gpu_demand import read_member
from fairshare.core.queues_and_weights import Condition, Pod
from gputally.kubernetes.objects import POD, Cluster
from gputally.testing.fake_scheduler import QUEUE


def weights_in(cluster: Cluster) -> dict[str, Any]:
    """Return the weights of the fake scheduler's queues; None: it is unset."""
    return {obj["metadata"]["name"]: (obj.get("spec") or {}).get("weight") for obj in cluster.list(QUEUE)}


def conditions_of(report: CycleReport) -> dict[str, tuple[str, str]]:
    return {f"{scope}.{c.type}".lstrip("."): (c.status, c.reason) for scope, c in report.scoped_conditions()}


def results_of(report: CycleReport) -> dict[str, str]:
    return {o.apply.queue: o.result for target in report.targets for o in target.outcomes}


def hold_of(report: CycleReport) -> tuple[str, str]:
    """Return reason and message of the condition that held the weights; both empty if no condition did."""
    return ("", "") if report.hold is None else (report.hold.reason, report.hold.message)


def condition(found: Any, kind: str) -> Condition:
    """Return the only condition of this type in an observation or a target's report."""
    (one,) = [each for each in found.conditions if each.type == kind]
    return cast(Condition, one)


def reasons_of(found: Any) -> dict[str, tuple[str, str]]:
    """Return status and reason by condition type of an observation or a target's report."""
    return {each.type: (each.status, each.reason) for each in found.conditions}


def pods_of(cluster: Cluster) -> tuple[Pod, ...]:
    """Return the cluster's pods with GPUs, as the controller's watch holds them."""
    return tuple(pod for obj in cluster.list(POD) if (pod := read_member(obj)) is not None)
