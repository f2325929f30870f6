"""Plays KAI in the demo: what its queue controller and its scheduler write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accountant.wire.policy_models import QueuePolicy
from fairshare.schedulers.kai.kinds import CONFIG, POD_GROUP, QUEUE, SHARD
from fairshare.targets.scheduler_player import QueueInReclaim, SchedulerPlayer, amount
from gputally.kubernetes.objects import Object


class KaiPlayer(SchedulerPlayer):
    """KAI with `--update-pod-eviction-condition`, with which its scheduler says why it evicts a pod."""

    kinds = (QUEUE, SHARD, POD_GROUP, CONFIG)

    def settings(self) -> Object:
        metadata = {"name": "default"}
        return {"apiVersion": SHARD.api_version, "kind": SHARD.kind, "metadata": metadata, "spec": {"kValue": 0}}

    def queue_spec(self, queue: QueuePolicy, weight: float) -> Mapping[str, Any]:
        gpu = {"quota": queue.deserved, "overQuotaWeight": weight, "limit": queue.limit}
        return {"priority": queue.priority, "resources": {"gpu": gpu}}

    def weight(self, queue: Object) -> float:
        return float(queue["spec"]["resources"]["gpu"]["overQuotaWeight"])

    def queue_status(self, requested: float, allocated: float, not_preemptible: float) -> Mapping[str, Any]:
        return {
            "requested": amount(requested),
            "allocated": amount(allocated),
            "allocatedNonPreemptible": amount(not_preemptible),
        }

    def reclaim_message(self, pod: str, claimant: str, compared: Sequence[QueueInReclaim], /) -> str:
        """Source: KAI-Scheduler pkg/scheduler/api/unschedule_info.go and actions/utils/action.go."""
        return "\n".join([super().reclaim_message(pod, claimant, compared), *map(_compared, compared)])


def _compared(queue: QueueInReclaim) -> str:
    held, quota, share = (
        f"<GPU: {gpus:g}, CPU: 0 (cores), memory: 0 (GB)>" for gpus in (queue.held, queue.quota, queue.share)
    )
    return (
        f"{queue.name} uses {held} with a quota of {quota}, fair-share of {share} and queue priority of"
        f" <{queue.priority}>."
    )
