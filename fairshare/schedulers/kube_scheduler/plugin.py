"""The manifest of the default kube-scheduler."""

from __future__ import annotations

from fairshare.schedulers.kube_scheduler.adapter import KubeSchedulerAdapter
from fairshare.targets.protocol import SchedulerPlugin

SCHEDULER = SchedulerPlugin(
    name="kube-scheduler",
    adapter=KubeSchedulerAdapter,
    kinds=(),
    reaches="reads labels of pods; writes no object; the scheduler asks the extender",
    page="docs/schedulers.md",
)
