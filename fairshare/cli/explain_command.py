"""Runs `explain`: shows the reasons for a queue's share and for a pod's wait or preemption.

The command runs one cycle as the controller would now, in which it writes and sends nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from fairshare.cli.command_options import FleetOptions, PolicyOrInForce, Printed, TargetOptions, dry_run_cycle, edge_ms
from gputally.base.clock import SystemClock
from gputally.base.command_options import with_option_groups
from gputally.base.command_output import Output, show
from gputally.base.errors import AccountantUnavailable, FairshareError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from accountant.wire.policy_models import Decision, Policy
    from accountant.wire.usage_cost_and_job_models import BudgetState
    from fairshare.controller.cycle_report import CycleReport
    from fairshare.explain.queue_and_pod_explanation import PodAccount, QueueAccount
    from fairshare.usage.accountant_client import AccountantApi


@with_option_groups
def explain(
    subject: Annotated[str, typer.Argument(help="A queue of the policy, or a pod: NAME or NAMESPACE/NAME.")],
    policy: PolicyOrInForce = None,
    start: Annotated[
        str, typer.Option("--start", "--since", help="Start of the past decisions to show: 7d ago, a date or RFC 3339.")
    ] = "1d",
    output: Printed = "table",
    *,
    at: FleetOptions,
    on: TargetOptions,
) -> None:
    """Explain in words and numbers why a queue or pod waits or was preempted, and how much of the share is left."""
    from fairshare.cli.explanation_tables import pod_json, pod_view, queue_json, queue_view
    from fairshare.controller import policy_file as policies
    from fairshare.controller.cycle_report import EVERYTHING
    from fairshare.explain.queue_and_pod_explanation import explain_pod, explain_queue, find_pods

    now_ms = SystemClock().wall_ms()
    start_ms = edge_ms(start, "--start", now_ms)
    others = at.others()
    with at.client() as client:
        in_force = policies.load(policy, others)[0] if policy is not None else client.policy()
        report, pods = dry_run_cycle(in_force, client, others, on)
        recorded, budgets = _recorded_and_budgets(client, in_force, report, start_ms, now_ms)
        versions = {each.version: each.policy for each in client.policies()} if recorded else {}
    past = [decision for decision in recorded if decision.subject != EVERYTHING]
    if subject in {queue.name for queue in in_force.queues}:
        queues = explain_queue(in_force, report, subject, budgets=budgets, past=past)
        if not queues:
            raise FairshareError(f"{subject}: {_why_nothing(report)}")
        queues = tuple(_with_causes(each, recorded, versions) for each in queues)
        _print([queue_json(each) for each in queues], [queue_view(each) for each in queues], output)
        return
    found = find_pods(pods, subject)
    if len(found) > 1:
        names = ", ".join(f"{pod.namespace}/{pod.name}" for pod in found)
        raise FairshareError(f"{subject}: several pods have this name ({names}): write NAMESPACE/NAME")
    if found:
        account = explain_pod(in_force, report, found[0], pods, budgets=budgets, past=past)
        if account.queue is not None:
            account = replace(account, queue=_with_causes(account.queue, recorded, versions))
    else:
        account = _deleted_pod(subject, past)
    _print([pod_json(account)], [pod_view(account)], output)


def _recorded_and_budgets(
    client: AccountantApi, policy: Policy, report: CycleReport, start_ms: int, now_ms: int
) -> tuple[list[Decision], list[BudgetState]]:
    """Return the decisions of the span until now with the records of their cycles, and the budgets; none if the
    report already says that the accountant does not answer."""
    try:
        recorded = list(client.decisions(start_ms, now_ms + 1))
        return recorded, list(client.budgets()) if policy.budgets else []
    except AccountantUnavailable:
        if report.hold is None:
            raise
        return [], []


def _with_causes(account: QueueAccount, recorded: Sequence[Decision], policies: Mapping[str, Policy]) -> QueueAccount:
    """Return the explanation with the causes of each past change of the weight."""
    from fairshare.explain.weight_change_causes import weight_change, with_change

    past = tuple(with_change(each, weight_change(each, recorded, policies)) for each in account.past)
    return replace(account, past=past)


def _deleted_pod(name: str, past: Sequence[Decision]) -> PodAccount:
    """Return what is known of a pod that does not exist any more. Raises FairshareError if it was not preempted."""
    from fairshare.explain.queue_and_pod_explanation import PodAccount, mentions

    preemptions = tuple(d for d in past if d.kind == "preemption" and mentions(d, frozenset({name})))
    if not preemptions:
        raise FairshareError(
            f"{name}: no queue of the policy, no pod that requests GPUs and no recent preemption has this name"
        )
    gone = "the pod does not exist any more; the decisions below mention it"
    return PodAccount(name, None, None, None, (gone,), (), preemptions)


def _why_nothing(report: CycleReport) -> str:
    if report.hold is not None:
        return f"nothing can be computed, {report.hold.reason}: {report.hold.message}"
    faults = [text for target in report.targets for text in target.degraded.values()]
    return "; ".join(faults) or "no target of the policy has an object for this queue"


def _print(plain: list[dict[str, object]], views: Sequence[RenderableType], output: Output) -> None:
    from rich.console import Group

    show(output, lambda: Group(*views), plain if len(plain) > 1 else plain[0], plain)
