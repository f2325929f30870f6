"""A real Kubernetes API server: the only importer of `kubernetes` here.

`api` is `gputally.kubernetes.objects.Cluster` over it, `answers` what its refusals mean, `election` one leader of many.
"""

from __future__ import annotations

from gputally.kubernetes.api_client import PAGE, KubernetesCluster

__all__ = ["PAGE", "KubernetesCluster"]
