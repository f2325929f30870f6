"""`gputally fairshare explain QUEUE|POD`: why it has what it has, why it waits, what would change that.

One cycle as the controller would do it now, on a cluster that is only read: nothing is written, nobody told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Group, RenderableType

from accountant.wire import BudgetState, Decision, Policy, parse_duration
from agent.clock import SystemClock
from agent.output import Output, show
from fairshare import policy as policies
from fairshare import service, status
from fairshare.client import AccountantClient
from fairshare.commands import explained
from fairshare.commands.options import (
    DEFAULT_STATUS,
    DEFAULT_URL,
    CaPath,
    ClusterName,
    Kubeconfig,
    LedgerName,
    PolicyOrInForce,
    Printed,
    RunaiCa,
    RunaiCredentials,
    StatusName,
    TokenPath,
    Url,
    pods_of,
)
from fairshare.errors import AccountantUnavailable, ClusterError, FairshareError
from fairshare.explain.explaining import PodAccount, QueueAccount, explain_pod, explain_queue, find_pods, speaks_of
from fairshare.kube.kinds import CONFIG_MAP
from fairshare.kube.ports import Cluster, Objects
from fairshare.loop import Controller
from fairshare.model import Pod
from fairshare.report import CycleReport
from fairshare.runai.opening import opened
from fairshare.status import StatusObject
from fairshare.targets import ADAPTERS
from fairshare.weighing.laws import Memory


class ExplainError(FairshareError):
    """What was asked about cannot be found, or not just one of it."""


@dataclass(frozen=True, slots=True)
class _Scene:
    """Everything that answers are made of."""

    policy: Policy
    report: CycleReport
    pods: Sequence[Pod]
    budgets: Sequence[BudgetState]
    past: Sequence[Decision]
    modes: Mapping[str, str]


def explain(
    subject: Annotated[str, typer.Argument(help="A queue of the policy, or a pod: NAME or NAMESPACE/NAME.")],
    policy: PolicyOrInForce = None,
    accountant: Url = DEFAULT_URL,
    token_file: TokenPath = None,
    ca_file: CaPath = None,
    cluster_name: LedgerName = "",
    cluster: ClusterName = "kubernetes",
    kubeconfig: Kubeconfig = None,
    status_object: StatusName = DEFAULT_STATUS,
    runai_credentials: RunaiCredentials = None,
    runai_ca_file: RunaiCa = None,
    since: Annotated[str, typer.Option(help="How far back to look for decisions about it.")] = "1d",
    output: Printed = "table",
) -> None:
    """The arithmetic in words and numbers: why does it wait, why was it preempted, what share is left."""
    back_s = duration(since, "--since")
    there = service.open_cluster(cluster, kubeconfig)
    with AccountantClient(accountant, token_file=token_file, ca_file=ca_file, cluster=cluster_name) as client:
        given = policies.load(policy)[0] if policy is not None else client.policy()
        where = StatusObject.named(status_object)
        with opened(given, there, runai_credentials, runai_ca_file, where, SystemClock()) as elsewhere:
            scene = _scene(client, there, elsewhere, given, status_object, back_s)
    if subject in {queue.name for queue in scene.policy.queues}:
        queues = explain_queue(
            scene.policy, scene.report, subject, modes=scene.modes, budgets=scene.budgets, past=scene.past
        )
        if not queues:
            raise ExplainError(f"{subject}: {_why_nothing(scene.report)}")
        _print([explained.queue_json(each) for each in queues], [explained.queue_view(each) for each in queues], output)
        return
    pod = _pod(scene, subject)
    _print([explained.pod_json(pod)], [explained.pod_view(pod)], output)


def remembered(cluster: Cluster, status_object: str) -> dict[str, Memory]:
    """What the controller's law remembers of each target, as far as its ConfigMap says it."""
    namespace, _, name = status_object.rpartition("/")
    try:
        standing = cluster.get(CONFIG_MAP, name, namespace)
    except ClusterError:
        return {}
    return status.memories(standing)


def duration(text: str, option: str) -> int:
    """Seconds. Raises ExplainError naming the option."""
    try:
        return int(str(parse_duration(text)))
    except ValueError as error:
        raise ExplainError(f"{option}: {error}") from error


def _scene(
    client: AccountantClient,
    cluster: Cluster,
    elsewhere: Mapping[str, Objects],
    policy: Policy,
    status_object: str,
    back_s: int,
) -> _Scene:
    clock = SystemClock()
    pods = pods_of(cluster)
    report = Controller(
        policies.only_try(policy), client, cluster, clock, clusters=elsewhere, silent=True, pods=lambda: pods,
        memory=remembered(cluster, status_object),
    ).cycle()  # fmt: skip
    now_ms = clock.wall_ms()
    try:
        past = [d for d in client.decisions(now_ms - back_s * 1000, now_ms + 1) if d.subject != "*"]
        budgets = client.budgets() if policy.budgets else []
    except AccountantUnavailable:
        if report.hold is None:
            raise
        past, budgets = [], []  # the report says already that nobody answers
    modes = {adapter.name: adapter.mode(policy) for adapter in ADAPTERS}
    return _Scene(policy, report, pods, budgets, past, modes)


def _pod(scene: _Scene, subject: str) -> PodAccount:
    found = find_pods(scene.pods, subject)
    if len(found) > 1:
        names = ", ".join(f"{pod.namespace}/{pod.name}" for pod in found)
        raise ExplainError(f"{subject}: several pods have that name ({names}): write NAMESPACE/NAME")
    if found:
        return explain_pod(
            scene.policy, scene.report, found[0], scene.pods,
            modes=scene.modes, budgets=scene.budgets, past=scene.past,
        )  # fmt: skip
    told = tuple(d for d in scene.past if d.kind == "preemption" and speaks_of(d, frozenset({subject})))
    if not told:
        raise ExplainError(
            f"{subject}: no queue of the policy, no pod that asks for GPUs, and no preemption lately has that name"
        )
    return PodAccount(subject, None, None, None, ("it is gone; what was decided about it:",), (), told)


def _why_nothing(report: CycleReport) -> str:
    if report.hold is not None:
        return f"nothing can be computed, {report.hold.reason}: {report.hold.message}"
    words = [text for target in report.targets for text in target.degraded.values()]
    return "; ".join(words) or "no target of the policy has a queue for it"


def _print(plain: list[dict[str, object]], views: Sequence[RenderableType], output: Output) -> None:
    show(output, lambda: Group(*views), plain if len(plain) > 1 else plain[0], plain)


__all__ = ["ExplainError", "QueueAccount", "duration", "explain", "remembered"]
