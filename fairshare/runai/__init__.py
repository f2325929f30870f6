"""Run:ai's own API as a cluster whose objects are the resources of its projects and departments."""

from fairshare.runai.api import RunaiApi
from fairshare.runai.cluster import RunaiCluster

__all__ = ["RunaiApi", "RunaiCluster"]
