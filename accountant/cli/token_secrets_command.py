"""Creates the Secrets with bearer tokens that the chart mounts: `gputally install`.

The tokens are for people and programs outside the cluster, and for the chart's programs if the accountant cannot have
their service account tokens reviewed (its chart value `kubernetesApi` is false). Repeating the command changes nothing:
existing tokens and token file entries are kept. To replace a token, delete its Secret and run the command again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from accountant.cli.connection_options import Printed
from gputally.base.command_options import refuse_ignored, with_option_groups
from gputally.base.command_output import show
from gputally.base.errors import AccountantError, ClusterError, ClusterRefused, ClusterUnavailable

if TYPE_CHECKING:
    from accountant.cli.token_secrets import Plan


app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command("install")
@with_option_groups
def command(
    namespace: Annotated[str, Option(help="Namespace of the release.")] = "gputally",
    name: Annotated[str, Option(help="Name of the release, with which the chart's names begin.")] = "gputally",
    programs: Annotated[
        bool,
        Option(
            "--programs", help="Make tokens for controller and jobs too; needed if accountant.kubernetesApi is false."
        ),
    ] = False,
    agent_node: Annotated[
        str | None,
        Option(help="Make a token for the agent of this node too; only one agent can use a Secret's token."),
    ] = None,
    cluster: Annotated[str, Option(help="Cluster of that agent, as in the chart value clusterName.")] = "default",
    dry_run: Annotated[bool, Option("--dry-run", help="Print the manifests and change nothing.")] = False,
    kubeconfig: Annotated[Path | None, Option(help="Kubeconfig file (default: the usual one).")] = None,
    output: Printed = "table",
) -> None:
    """Create the Secrets with bearer tokens that the chart mounts. Repeating it changes nothing."""
    import yaml

    from accountant.cli.token_secrets import SECRET, Plan, install, manifests
    from gputally.base.terminal import table
    from gputally.kubernetes.api_client import KubernetesCluster

    if agent_node is None:
        refuse_ignored("without --agent-node", "cluster")
    plan = Plan(name, namespace, programs, agent_node, cluster)
    if dry_run:
        typer.echo(yaml.safe_dump_all(manifests(plan, _standing(plan, kubeconfig)), sort_keys=False), nl=False)
        return
    try:
        connection = KubernetesCluster.connect([SECRET], kubeconfig)
    except (ClusterUnavailable, ClusterRefused) as error:
        raise AccountantError(f"{error}; --dry-run prints the manifests without a cluster") from error
    results = install(plan, connection)
    rows = [(secret, namespace, what) for secret, what in results.items()]
    records = [dict(zip(("secret", "namespace", "done"), row, strict=True)) for row in rows]
    show(output, lambda: table("", ["secret", "namespace", ""], rows), records)


def _standing(plan: Plan, kubeconfig: Path | None) -> dict[str, dict[str, str]]:
    """The existing Secrets, for a dry run. If no cluster answers: none, and a note on standard error."""
    from accountant.cli.token_secrets import SECRET, read
    from gputally.kubernetes.api_client import KubernetesCluster

    try:
        return read(plan, KubernetesCluster.connect([SECRET], kubeconfig))
    except (ClusterError, AccountantError) as error:
        typer.echo(f"the existing Secrets are unknown, so this is printed as if none existed: {error}", err=True)
        return {}
