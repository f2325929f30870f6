"""Weights in a cluster, conditions and results of a report as plain dicts."""

from __future__ import annotations

from typing import Any

from fairshare.controller.cycle_report import CycleReport
from fairshare.targets.kai import QUEUE
from gputally.kubernetes.objects import Cluster


def weights_in(cluster: Cluster) -> dict[str, Any]:
    return {
        obj["metadata"]["name"]: obj["spec"]["resources"]["gpu"].get("overQuotaWeight") for obj in cluster.list(QUEUE)
    }


def conditions_of(report: CycleReport) -> dict[str, tuple[str, str]]:
    return {f"{scope}.{c.type}".lstrip("."): (c.status, c.reason) for scope, c in report.scoped_conditions()}


def results_of(report: CycleReport) -> dict[str, str]:
    return {o.apply.queue: o.result for target in report.targets for o in target.outcomes}
