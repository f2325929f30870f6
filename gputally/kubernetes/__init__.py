"""Talks to a real Kubernetes API server. The only importer of `kubernetes`.

`api_client` implements the `Cluster` protocol of `objects`.
"""

from __future__ import annotations

from gputally.kubernetes.api_client import PAGE, KubernetesCluster

__all__ = ["PAGE", "KubernetesCluster"]
