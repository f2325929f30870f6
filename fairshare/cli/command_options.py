"""Defines the options that several commands share, and opens the accountant and the cluster that they name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from accountant.wire.policy_models import Policy
from fairshare import composition
from fairshare.controller import policy_file as policies
from fairshare.controller.control_loop import Controller
from fairshare.controller.cycle_report import CycleReport
from fairshare.core.pods import read_pod
from fairshare.core.queues_and_weights import Pod
from fairshare.laws.feedback_laws import Memory
from fairshare.targets import status_config_map
from fairshare.targets.runai import opened
from fairshare.targets.status_config_map import StatusObject
from fairshare.usage.accountant_client import AccountantApi, other_clusters
from fairshare.usage.usage_windows import OtherClusters
from gputally.base.clock import SystemClock
from gputally.base.command_line import Output
from gputally.base.errors import ClusterError
from gputally.kubernetes.objects import CONFIG_MAP, POD, Cluster, Object, Objects

PolicyPath = Annotated[Path, typer.Option("--policy", help="Policy file (YAML).")]
PolicyOrInForce = Annotated[
    Path | None, typer.Option("--policy", help="Policy file (YAML); the one in force at the accountant without it.")
]
TokenPath = Annotated[Path | None, typer.Option("--token-file", help="File with the bearer token.")]
CaPath = Annotated[
    Path | None,
    typer.Option(
        "--ca-file",
        envvar="GPUTALLY_CA_FILE",
        help="Authorities the accountant's certificate may come from, PEM (default: the system's).",
    ),
]
Kubeconfig = Annotated[Path | None, typer.Option(help="Instead of the default one.")]
Printed = Annotated[Output, typer.Option("--output", "--format", help="How to print what was found.")]


@dataclass(frozen=True, kw_only=True)
class AccountantOptions:
    """Options for a running accountant, and the cluster to query."""

    accountant: Annotated[str, typer.Option(envvar="GPUTALLY_URL", help="A running accountant.")] = (
        "http://127.0.0.1:8080"
    )
    token_file: TokenPath = None
    ca_file: CaPath = None
    cluster_name: Annotated[
        str,
        typer.Option(
            "--cluster-name",
            envvar="GPUTALLY_FAIRSHARE_CLUSTER_NAME",
            help="Name of this cluster in the ledger (default: everything in the ledger).",
        ),
    ] = ""

    def client(self, timeout_s: float = 30.0) -> AccountantApi:
        """Return a client of the accountant. Raises AccountantUnavailable if the address in the options is invalid."""
        return AccountantApi(
            self.accountant,
            token_file=self.token_file,
            ca_file=self.ca_file,
            cluster=self.cluster_name,
            timeout_s=timeout_s,
        )


@dataclass(frozen=True, kw_only=True)
class FleetOptions(AccountantOptions):
    """Options for an accountant and the accountants of other clusters."""

    accountants: Annotated[
        Path | None,
        typer.Option(
            "--accountants",
            envvar="GPUTALLY_FAIRSHARE_ACCOUNTANTS",
            help="File with the accountants of other clusters that the policy counts.",
        ),
    ] = None

    def others(self) -> OtherClusters:
        """The accountants of other clusters. Raises FileFault."""
        return other_clusters(self.accountants, self.cluster_name)


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Options for a cluster, and the controller's ConfigMap in it."""

    cluster: Annotated[
        str, typer.Option("--cluster", help="kubernetes, or a YAML file of objects to try the plan on.")
    ] = "kubernetes"
    kubeconfig: Kubeconfig = None
    status: Annotated[
        str, typer.Option("--status", help="namespace/name of the controller's ConfigMap: what its law remembers.")
    ] = "gputally/gputally-fairshare"

    @property
    def status_object(self) -> StatusObject:
        return StatusObject.named(self.status)

    def open(self) -> Cluster:
        """The cluster's API. Raises Unavailable or FileFault."""
        return composition.open_cluster(self.cluster, self.kubeconfig)


@dataclass(frozen=True, kw_only=True)
class TargetOptions(ClusterOptions):
    """Options for a cluster and for Run:ai, which is outside the cluster."""

    runai_credentials: Annotated[
        Path | None,
        typer.Option(
            envvar="GPUTALLY_FAIRSHARE_RUNAI_CREDENTIALS", help="Folder with client-id and client-secret for Run:ai."
        ),
    ] = None
    runai_ca_file: Annotated[
        Path | None,
        typer.Option(envvar="GPUTALLY_FAIRSHARE_RUNAI_CA_FILE", help="Authorities (PEM) trusted for Run:ai."),
    ] = None

    @contextmanager
    def targets(self, policy: Policy) -> Iterator[tuple[Cluster, Mapping[str, Objects]]]:
        """Yield the cluster, and the objects of the targets outside it."""
        cluster = self.open()
        with opened(
            policy, cluster, self.runai_credentials, self.runai_ca_file, self.status_object, SystemClock()
        ) as elsewhere:
            yield cluster, elsewhere


def tried_cycle(
    policy: Policy, client: AccountantApi, others: OtherClusters, on: TargetOptions
) -> tuple[CycleReport, Sequence[Pod]]:
    """Run one cycle as the controller would do it now, without writing and without sending anything to the accountant;
    returns its report and the pods. It uses the API server's dry-run, so it shows conflicts and refusals."""
    with on.targets(policy) as (cluster, elsewhere):
        pods = pods_of(cluster)
        report = Controller(
            policies.in_dry_run(policy),
            client,
            cluster,
            SystemClock(),
            clusters=elsewhere,
            silent=True,
            pods=lambda: pods,
            memory=_remembered(cluster, on.status_object),
            others=others,
        ).cycle()
    return report, pods


def _remembered(cluster: Cluster, where: StatusObject) -> dict[str, Memory]:
    """Return the state of the controller's law for each target, as its ConfigMap has it."""
    try:
        return status_config_map.memories(cluster.get(CONFIG_MAP, where.name, where.namespace))
    except ClusterError:
        return {}


def pods_of(cluster: Cluster) -> tuple[Pod, ...]:
    """Read the pods that request GPUs once; empty if they may not be read."""
    found: list[Pod] = []

    def take(obj: Object) -> None:
        pod = read_pod(obj)
        if pod is not None:
            found.append(pod)

    try:
        cluster.scan(POD, take)
    except ClusterError:
        return ()
    return tuple(found)
