"""KAI's queues on a real API server, with the fields that KAI's controller writes."""

from __future__ import annotations

from fairshare.schedulers.kai.kinds import QUEUE
from gputally.kubernetes.api_client import KubernetesCluster
from gputally.kubernetes.objects import Cluster
from tests.fairshare.kai.objects import queue_object


def add_queues(real: Cluster, *names: str, weight: float | None = None) -> None:
    """Create KAI queues; a weight of None is left unset."""
    for name in names:
        wanted = queue_object(name, weight=weight)
        real.apply({k: v for k, v in wanted.items() if k != "status"}, field_manager="gitops")
        real.apply({**wanted, "spec": {"resources": {"gpu": {}}}}, field_manager="kai", subresource="status")


def weights_of(real: KubernetesCluster, *names: str) -> list[float]:
    return [real.get(QUEUE, name)["spec"]["resources"]["gpu"].get("overQuotaWeight", 0) for name in names]
