"""The manifest of the default kube-scheduler."""

from __future__ import annotations

from gputally.kubernetes.scheduler_plugins import SchedulerPlugin

SCHEDULER = SchedulerPlugin(
    name="kube-scheduler",
    prefixes=("policy",),
    adapter="fairshare.schedulers.kube_scheduler.adapter:KubeSchedulerAdapter",
    settings="fairshare.schedulers.kube_scheduler.section:KubeSchedulerTarget",
    kinds=(),
    reaches="reads labels of pods; writes no object; the scheduler asks the extender",
    page="docs/schedulers.md",
)
