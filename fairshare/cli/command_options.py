"""Defines the options that several commands share, opens the accountant and the cluster that the options name, and runs
one cycle as a dry run for these commands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gputally.base.clock import SystemClock
from gputally.base.command_output import Output
from gputally.base.errors import ClusterError, FairshareError

if TYPE_CHECKING:
    from accountant.wire.policy_models import Policy
    from fairshare.controller.cycle_report import CycleReport
    from fairshare.core.queues_and_weights import Pod
    from fairshare.laws.feedback_law import Memory
    from fairshare.targets.status_config_map import StatusObject
    from fairshare.usage.accountant_client import AccountantApi
    from fairshare.usage.multi_cluster_windows import OtherClusters
    from gputally.kubernetes.objects import Cluster, Objects


PolicyPath = Annotated[Path, typer.Option("--policy", help="Policy file (YAML).")]
PolicyOrInForce = Annotated[
    Path | None, typer.Option("--policy", help="Policy file (YAML; default: the accountant's policy in force).")
]
TokenPath = Annotated[
    Path | None,
    typer.Option("--token-file", envvar="GPUTALLY_TOKEN_FILE", help="File with the bearer token for the accountant."),
]
CaPath = Annotated[
    Path | None,
    typer.Option(
        "--ca-file",
        envvar="GPUTALLY_CA_FILE",
        help="PEM file of the CAs to trust for the accountant (default: the system's).",
    ),
]
Kubeconfig = Annotated[
    Path | None,
    typer.Option(help="Kubeconfig file (default: $KUBECONFIG or ~/.kube/config; in a pod its service account)."),
]
Printed = Annotated[Output, typer.Option("--output", help="Format of the output.")]


@dataclass(frozen=True, kw_only=True)
class AccountantOptions:
    """The options that name a running accountant, and this cluster as the accountant's ledger names it."""

    url: Annotated[str, typer.Option(envvar="GPUTALLY_URL", help="URL of a running accountant.")] = (
        "http://127.0.0.1:8080"
    )
    token_file: TokenPath = None
    ca_file: CaPath = None
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster",
            envvar="GPUTALLY_FAIRSHARE_CLUSTER",
            help="Name of this cluster in the ledger (default: the usage of all clusters in the ledger counts).",
        ),
    ] = ""

    def client(self, timeout_s: float = 30.0) -> AccountantApi:
        """Return a client of the accountant. Raises AccountantUnavailable if the address in the options is invalid."""
        from fairshare.usage.accountant_client import AccountantApi

        return AccountantApi(
            self.url,
            token_file=self.token_file,
            ca_file=self.ca_file,
            cluster=self.cluster,
            timeout_s=timeout_s,
        )


@dataclass(frozen=True, kw_only=True)
class FleetOptions(AccountantOptions):
    """The options for an accountant and the accountants of other clusters."""

    accountants: Annotated[
        Path | None,
        typer.Option(
            "--accountants",
            envvar="GPUTALLY_FAIRSHARE_ACCOUNTANTS",
            help="File that lists the accountants of other clusters whose usage the policy counts.",
        ),
    ] = None

    def others(self) -> OtherClusters:
        """Return the accountants of the other clusters, none without the option. Raises FileFault for an invalid
        file."""
        from fairshare.usage.accountant_client import other_clusters

        return other_clusters(self.accountants, self.cluster)


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """The options that name a cluster, and the controller's ConfigMap in the cluster."""

    objects: Annotated[
        str,
        typer.Option("--objects", help="Objects of the cluster: kubernetes (the API server), or a YAML file."),
    ] = "kubernetes"
    kubeconfig: Kubeconfig = None
    status: Annotated[
        str, typer.Option("--status", help="NAMESPACE/NAME of the ConfigMap in which the controller keeps its state.")
    ] = "gputally/gputally-fairshare"

    @property
    def status_object(self) -> StatusObject:
        from fairshare.targets.status_config_map import StatusObject

        return StatusObject.named(self.status)

    def open(self) -> Cluster:
        """Return the cluster's API. Raises Unavailable or FileFault."""
        from fairshare import composition

        return composition.open_cluster(self.objects, self.kubeconfig)


@dataclass(frozen=True, kw_only=True)
class TargetOptions(ClusterOptions):
    """The options for a cluster, and for schedulers whose API is outside the cluster: a field for each of their `files`
    (`SchedulerPlugin`). They are written here, because a command's help does not load the schedulers."""

    runai_credentials: Annotated[
        Path | None,
        typer.Option(
            envvar="GPUTALLY_FAIRSHARE_RUNAI_CREDENTIALS",
            help="Folder with the files client-id and client-secret for Run:ai.",
        ),
    ] = None
    runai_ca_file: Annotated[
        Path | None,
        typer.Option(
            envvar="GPUTALLY_FAIRSHARE_RUNAI_CA_FILE",
            help="PEM file of the CAs to trust for Run:ai (default: the system's).",
        ),
    ] = None

    @contextmanager
    def targets(self, policy: Policy) -> Iterator[tuple[Cluster, Mapping[str, Objects]]]:
        """Yield the cluster, and the objects of targets outside the cluster by the target's name."""
        from fairshare.targets.installed import opened

        cluster = self.open()
        with opened(policy, cluster, partial(getattr, self), self.status_object, SystemClock()) as outside:
            yield cluster, outside


def edge_ms(text: str, option: str, until_ms: int) -> int:
    """Parse the edge of a span in an option: 7d before `until_ms`, a date in UTC, or RFC 3339. Raises FairshareError
    that names the option."""
    from zoneinfo import ZoneInfo

    from gputally.base.instants import parse_edge

    try:
        return parse_edge(text, ZoneInfo("UTC"), until_ms)
    except ValueError as error:
        raise FairshareError(f"{option}: {error}") from error


def dry_run_cycle(
    policy: Policy, client: AccountantApi, others: OtherClusters, on: TargetOptions
) -> tuple[CycleReport, Sequence[Pod]]:
    """Run one cycle as the controller would now, and return its report and the pods.

    The cycle sends nothing to the accountant, and writes to the API server with its dry-run, which reports conflicts
    and refusals."""
    from fairshare.controller import policy_file as policies
    from fairshare.controller.control_loop import Controller
    from fairshare.core.gpu_demand import sized

    with on.targets(policy) as (cluster, outside):
        pods = pods_of(cluster)
        report = Controller(
            policies.in_dry_run(policy),
            client,
            cluster,
            SystemClock(),
            clusters=outside,
            silent=True,
            pods=lambda: pods,
            memory=_remembered(cluster, on.status_object),
            others=others,
        ).cycle()
    return report, [sized(pod, report.parts) for pod in pods]


def _remembered(cluster: Cluster, where: StatusObject) -> dict[str, Memory]:
    """Return the state of each target's law from the controller's ConfigMap; none if it cannot be read."""
    from fairshare.targets import status_config_map
    from gputally.kubernetes.objects import CONFIG_MAP

    try:
        return status_config_map.memories(cluster.get(CONFIG_MAP, where.name, where.namespace))
    except ClusterError:
        return {}


def pods_of(cluster: Cluster) -> tuple[Pod, ...]:
    """Return the pods that request GPUs or belong to a PodGroup; none if the API server refuses to list pods."""
    from fairshare.core.gpu_demand import read_member
    from gputally.kubernetes.objects import POD

    pods: list[Pod | None] = []
    try:
        cluster.scan(POD, lambda obj: pods.append(read_member(obj)))
    except ClusterError:
        return ()
    return tuple(pod for pod in pods if pod is not None)
