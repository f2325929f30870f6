"""Run:ai as a target of the controller and its commands: opened where the policy speaks of it, closed with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from accountant.wire import Policy
from agent.clock import Clock
from fairshare.adapters import runai
from fairshare.errors import FairshareError
from fairshare.kube.mapping import referred
from fairshare.kube.ports import Cluster, Objects
from fairshare.runai.api import RunaiApi
from fairshare.runai.cluster import RunaiCluster
from fairshare.status import StatusObject


class RunaiFault(FairshareError):
    """The policy speaks of Run:ai and nobody has said how to get there."""


@contextmanager
def opened(
    policy: Policy, cluster: Cluster, credentials: Path | None, ca_file: Path | None, where: StatusObject, clock: Clock
) -> Iterator[Mapping[str, Objects]]:
    """By adapter: Run:ai, or nothing where the policy leaves it out. where: our ConfigMap; what is noted on Run:ai's
    units stands beside it. Raises RunaiFault."""
    target = policy.targets.runai
    if target.mode == "off" or target.url is None or not referred(policy, *runai.RunaiAdapter.prefixes):
        yield {}
        return
    if credentials is None:
        raise RunaiFault(
            "the policy has queues of Run:ai: give --runai-credentials (or the setting runai_credentials),"
            " a folder with the files client-id and client-secret"
        )
    with RunaiApi(target.url, credentials, clock, cluster=target.cluster, ca_file=ca_file) as api:
        yield {runai.NAME: RunaiCluster(api, cluster, where.namespace, f"{where.name}-runai")}
