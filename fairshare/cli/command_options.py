"""Defines the options that several commands share."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fairshare.core.model import Pod
from fairshare.core.pods import read_pod
from gputally.base.command_output import Output
from gputally.base.errors import ClusterError
from gputally.base.terminal import Terminal
from gputally.kubernetes.objects import POD, Cluster, Object

PolicyPath = Annotated[Path, typer.Option("--policy", help="Policy file (YAML).")]
PolicyOrInForce = Annotated[
    Path | None, typer.Option("--policy", help="Policy file (YAML); the one in force at the accountant without it.")
]
Url = Annotated[str, typer.Option(envvar="GPUTALLY_URL", help="A running accountant.")]
TokenPath = Annotated[Path | None, typer.Option("--token-file", help="File with the bearer token.")]
CaPath = Annotated[
    Path | None,
    typer.Option(
        "--ca-file",
        envvar="GPUTALLY_CA_FILE",
        help="Authorities the accountant's certificate may come from, PEM (default: the system's).",
    ),
]
ClusterName = Annotated[
    str, typer.Option("--cluster", help="kubernetes, or a YAML file of objects to try the plan on.")
]
LedgerName = Annotated[
    str,
    typer.Option(
        "--cluster-name",
        envvar="GPUTALLY_FAIRSHARE_CLUSTER_NAME",
        help="Name of this cluster in the ledger (default: everything in the ledger).",
    ),
]
AccountantsPath = Annotated[
    Path | None,
    typer.Option(
        "--accountants",
        envvar="GPUTALLY_FAIRSHARE_ACCOUNTANTS",
        help="File with the accountants of other clusters that the policy counts.",
    ),
]
Kubeconfig = Annotated[Path | None, typer.Option(help="Instead of the default one.")]
RunaiCredentials = Annotated[
    Path | None,
    typer.Option(
        envvar="GPUTALLY_FAIRSHARE_RUNAI_CREDENTIALS", help="Folder with client-id and client-secret for Run:ai."
    ),
]
RunaiCa = Annotated[
    Path | None, typer.Option(envvar="GPUTALLY_FAIRSHARE_RUNAI_CA_FILE", help="Authorities (PEM) trusted for Run:ai.")
]
Printed = Annotated[Output, typer.Option("--output", "--format", help="How to print what was found.")]
StatusName = Annotated[
    str, typer.Option("--status", help="namespace/name of the controller's ConfigMap: what its law remembers.")
]
DEFAULT_STATUS = "gputally/gputally-fairshare"
DEFAULT_URL = "http://127.0.0.1:8080"


def console() -> Console:
    """Wide without a terminal, so that a table in a file keeps its columns."""
    return Terminal(width=None if sys.stdout.isatty() else 160)


def pods_of(cluster: Cluster) -> tuple[Pod, ...]:
    """Pods that ask for GPUs, read once; none where they are not for us to read."""
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
