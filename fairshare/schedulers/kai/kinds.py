"""KAI-Scheduler's kinds."""

from __future__ import annotations

from gputally.kubernetes.objects import Kind

QUEUE = Kind("scheduling.run.ai/v2", "Queue", "queues")
SHARD = Kind("kai.scheduler/v1", "SchedulingShard", "schedulingshards")
POD_GROUP = Kind("scheduling.run.ai/v2alpha2", "PodGroup", "podgroups", namespaced=True)
CONFIG = Kind("kai.scheduler/v1", "Config", "configs")
