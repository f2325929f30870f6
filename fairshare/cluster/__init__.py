"""A real Kubernetes API server: the only importer of `kubernetes` here.

`api` is `fairshare.kube.ports.Cluster` over it, `answers` what its refusals mean, `election` one leader of many.
"""

from __future__ import annotations

from fairshare.cluster.api import PAGE, KubernetesCluster

__all__ = ["PAGE", "KubernetesCluster"]
