"""Runs `gputally fairshare`. `explain`, `replay`, `what-if` and `try-weight` are in `cli`, the other commands are here.

`main(argv)` returns the exit code: 0 success, 1 failure (one line per fault on stderr, never a traceback), 2 wrong
call.

Help loads no module that decides: each command imports what it needs."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from accountant.wire.option_types import MOST
from fairshare.cli.command_options import (
    CaPath,
    ClusterOptions,
    FleetOptions,
    Kubeconfig,
    PolicyPath,
    Printed,
    TargetOptions,
    TokenPath,
    dry_run_cycle,
    pods_of,
)
from fairshare.cli.explain_command import explain
from fairshare.cli.replay_command import replay
from fairshare.cli.try_weight_command import try_weight
from fairshare.cli.what_if_command import what_if
from gputally.base.background_tasks import set_on_signals
from gputally.base.clock import SystemClock
from gputally.base.command_options import refuse_ignored, with_option_groups
from gputally.base.command_output import show
from gputally.base.errors import AccountantError, ClusterError, DivisionError, FairshareError
from gputally.base.untrusted_text import for_terminal
from gputally.base.yaml_file import FileFault
from gputally.server.command_run import run_program

if TYPE_CHECKING:
    from rich.console import RenderableType


app = typer.Typer(
    help="Computes queue weights and preemptions from usage history.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)

app.command()(explain)
app.command()(replay)
app.command("what-if")(what_if)
app.command("try-weight")(try_weight)


@app.command()
def run(
    config: Annotated[Path | None, typer.Option(help="Settings file (YAML).")] = None,
    policy: Annotated[Path | None, typer.Option(help="Policy file (YAML).")] = None,
    url: Annotated[str | None, typer.Option(help="URL of the accountant.")] = None,
    token_file: TokenPath = None,
    ca_file: CaPath = None,
    accountants: Annotated[
        Path | None,
        typer.Option(help="File that lists the accountants of other clusters whose usage the policy counts."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="Name of this cluster in the ledger (default: the usage of all clusters counts)."),
    ] = None,
    objects: Annotated[
        str | None,
        typer.Option(help="Objects of the cluster: kubernetes (the API server), or a YAML file with them."),
    ] = None,
    kubeconfig: Kubeconfig = None,
    interval: Annotated[str | None, typer.Option(help="Time between two cycles, for example 1m.")] = None,
    listen: Annotated[
        str | None, typer.Option(help="Address (host:port) that serves /livez, /readyz and /metrics.")
    ] = None,
    extender_listen: Annotated[
        str | None, typer.Option(help="Address (host:port) that serves the kube-scheduler extender.")
    ] = None,
    pages_listen: Annotated[str | None, typer.Option(help="Address (host:port) that serves the HTML pages.")] = None,
    dry_run: Annotated[
        bool | None, typer.Option("--dry-run", help="Publish no weight, whatever the policy says.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="Log level: debug, info, warning or error.")] = None,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print the settings in force and stop.")] = False,
) -> None:
    """Publish weights until SIGTERM or Ctrl-C. The policy decides what is written."""
    from fairshare import composition
    from fairshare.controller import event_and_decision_recorder
    from fairshare.core.settings import load

    options = {
        "policy": policy, "url": url, "token_file": token_file, "ca_file": ca_file,
        "accountants": accountants, "cluster": cluster, "objects": objects,
        "kubeconfig": kubeconfig, "interval": interval, "listen": listen,
        "extender_listen": extender_listen, "pages_listen": pages_listen, "dry_run": dry_run, "log_level": log_level,
    }  # fmt: skip
    settings = load(config, os.environ, {name: value for name, value in options.items() if value is not None})
    if print_config:
        print(settings.as_yaml(), end="")
        return
    event_and_decision_recorder.configure(settings.log_level)
    stop = threading.Event()
    set_on_signals(stop)
    composition.run(settings, stop)


@app.command()
@with_option_groups
def plan(
    policy: PolicyPath,
    output: Printed = "table",
    *,
    at: FleetOptions,
    on: TargetOptions,
) -> None:
    """Run one cycle that writes nothing, and show every weight with the reason of every number.

    It uses the API server's dry-run, so it shows conflicts and refusals in advance. The accountant gets neither the
    policy nor the decisions."""
    from fairshare.controller import policy_file as policies
    from fairshare.explain import plan_tables

    others = at.others()
    with at.client() as client:
        report, _ = dry_run_cycle(policies.load(policy, others)[0], client, others, on)
    show(
        output,
        lambda: plan_tables.report_view(report),
        plan_tables.plan_document(report),
        plan_tables.plan_records(report),
    )
    if report.hold is not None or any(target.degraded for target in report.targets):
        raise typer.Exit(1)


@app.command()
@with_option_groups
def preempt(
    policy: PolicyPath,
    job: Annotated[str, typer.Option("--for", help="NAMESPACE/NAME of the workload that needs GPUs.")],
    threshold: Annotated[
        str | None, typer.Option(help="Preempt only if the workload's latency is above this time, for example 50ms.")
    ] = None,
    query: Annotated[
        str, typer.Option(help="PromQL query for the latency in seconds (default: the query of the policy's SLO).")
    ] = "",
    prometheus: Annotated[
        str,
        typer.Option(
            envvar="GPUTALLY_FAIRSHARE_PROMETHEUS", help="URL of the Prometheus server that answers the query."
        ),
    ] = "",
    gpus: Annotated[float, typer.Option(min=0, help="Number of GPUs to free if no pod of the workload waits.")] = 0.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the victims, and stop none of them.")] = False,
    output: Printed = "table",
    *,
    at: FleetOptions,
    on: ClusterOptions,
) -> None:
    """Preempt pods for one workload now, by the policy's rules and limits, and show the victims with the reasons."""
    from rich.text import Text

    from fairshare.cli.preemption_tables import preemption_view
    from fairshare.controller import policy_file as policies
    from fairshare.controller.control_loop import by_hand
    from fairshare.explain import plan_tables
    from fairshare.preemption.preemption_controller import latency_reason
    from fairshare.preemption.preemption_types import PreemptionCall
    from fairshare.preemption.service_latency_objectives import prometheus_latency
    from gputally.server.config_loading import parse_seconds

    others, clock = at.others(), SystemClock()
    loaded = policies.load(policy, others)[0]
    if threshold is None:
        refuse_ignored("without --threshold", "query", "prometheus")
    try:
        threshold_s = None if threshold is None else float(str(parse_seconds(threshold)))
    except ValueError as error:
        raise FairshareError(f"--threshold: {error}") from error
    with at.client() as client:
        latency = prometheus_latency(prometheus) if prometheus else None
        why = latency_reason(loaded, job, threshold_s, query, latency, clock.wall_ms())
        if why is None:
            text = Text(f"the latency of {job} is not above {threshold}: no workload is preempted")
            show(output, lambda: text, [])
            return
        cluster = on.open()
        call = PreemptionCall("", job, why, gpus, "by hand")
        mode: Literal["dry-run", "enforce"] = "dry-run" if dry_run else "enforce"
        pods = pods_of(cluster)
        report = by_hand(loaded, client, cluster, clock, pods, call, mode, on.status_object, others)
    show(output, lambda: preemption_view(report), plan_tables.preemption(report), plan_tables.stops(report))
    if any(verdict.outcome == "denied" for verdict in report.verdicts):
        raise typer.Exit(1)


@app.command()
def divide(
    input: Annotated[
        str, typer.Option("--input", help="JSON file with a case, a list of cases, or {meta, vectors}; - reads stdin.")
    ],
    output: Printed = "table",
    explain: Annotated[
        bool, typer.Option("--explain", help="Show every round of the division and every remainder.")
    ] = False,
) -> None:
    """Divide GPUs among queues by the rule of weights and usage, with a scheduler's rounding, and show the shares.

    With --output json it prints an array with an object {name, shares, remaining} for each case."""
    from rich.console import Group

    from fairshare.cli.division_cases import parse
    from fairshare.explain import plan_tables
    from fairshare.laws.division import divide as divide_case

    try:
        text = sys.stdin.buffer.read() if input == "-" else Path(input).read_bytes()
    except OSError as error:
        raise DivisionError(f"{input}: {error.strerror}") from error
    try:
        divided = [(case, divide_case(case, explain=explain, as_source=True)) for case in parse(text)]
    except DivisionError as error:
        raise DivisionError(f"{'stdin' if input == '-' else input}: {error}") from error
    document = [plan_tables.division_json(case, result, explain=explain) for case, result in divided]

    def view() -> RenderableType:
        tables: list[RenderableType] = []
        for case, result in divided:
            tables.append(plan_tables.division_table(case, result))
            if explain:
                tables.append(plan_tables.steps_table(case, result))
        return Group(*tables)

    show(output, view, document, plan_tables.shares(divided))


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="Policy file (YAML).")],
    capacity: Annotated[
        float | None,
        typer.Option(min=0, max=MOST, help="Number of GPUs of the cluster, with which quotas are compared."),
    ] = None,
    gang: Annotated[
        list[str] | None,
        typer.Option(help="A gang as QUEUE=GPUS: warns if the feedback law can never admit it. Needs --capacity."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if there are warnings.")] = False,
) -> None:
    """Report errors in a policy (exit 1), and warnings about settings that are rarely intended (exit 0)."""
    from fairshare.controller import policy_file as policies

    if gang and capacity is None:
        raise policies.PolicyFault("--gang: give --capacity too, the number of GPUs of the cluster")
    policy, document = policies.load(file)
    warnings = policies.show(document, policies.advice(policy, capacity, policies.gangs(policy, gang or ())))
    for line in warnings:
        print(line)
    print(f"{file}: {len(policy.queues)} queues, version {policy.version()}")
    if strict and warnings:
        raise typer.Exit(1)


@app.command()
@with_option_groups
def release(
    policy: PolicyPath,
    left_behind: Annotated[
        bool,
        typer.Option("--left-behind", help="Restore only objects to which no queue of the policy refers any more."),
    ] = False,
    other: Annotated[
        list[Path] | None,
        typer.Option(help="Another policy that publishes to this cluster. Its objects stay as they are. Repeatable."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the weights, and write none of them.")] = False,
    output: Printed = "table",
    *,
    on: TargetOptions,
) -> None:
    """Restore the weights that the queues had before gputally, and let preempted workloads run again. Use it to switch
    gputally off."""
    from fairshare.controller import policy_file as policies
    from fairshare.controller.weight_writer import release_weights
    from fairshare.explain import plan_tables
    from fairshare.preemption.unfinished_preemptions import FinishedPreemptions, finish_all

    loaded = policies.load(policy)[0]
    others = [policies.load(path)[0] for path in other or ()]
    unread: dict[str, ClusterError] = {}
    with on.targets(loaded) as (cluster, outside):
        outcomes = release_weights(
            loaded, cluster, clusters=outside, dry_run=dry_run, left_behind=left_behind, others=others,
            unread=unread.__setitem__,
        )  # fmt: skip
    ended = finish_all(cluster, SystemClock().wall_ms()) if not dry_run and not left_behind else FinishedPreemptions()
    for line in (*ended.lines(), *(f"{name} keeps its weights: {error}" for name, error in unread.items())):
        print(for_terminal(line), file=sys.stderr)
    if not outcomes and output == "table":
        print("nothing to release: no queue has a weight of the controller")
    else:
        show(
            output,
            lambda: plan_tables.outcomes_table(outcomes),
            [plan_tables.outcome_record(each) for each in outcomes],
        )
    failed = any(outcome.result not in {"applied", "would-apply"} for outcome in outcomes)
    if failed or unread or ended.left or ended.faults:
        raise typer.Exit(1)


@app.command()
@with_option_groups
def adopt(
    policy: PolicyPath,
    queue: Annotated[str | None, typer.Option(help="Queue of the policy to take over (default: all).")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the fields, and take over none of them.")] = False,
    output: Printed = "table",
    *,
    on: TargetOptions,
) -> None:
    """Take over the fields of the weights from their present managers (Argo CD, Flux, kubectl). No value changes."""
    from rich.console import Group
    from rich.text import Text

    from fairshare.controller import policy_file as policies
    from fairshare.controller.weight_writer import adopt as take_over
    from fairshare.controller.weight_writer import advice
    from fairshare.explain import plan_tables

    loaded = policies.load(policy)[0]
    with on.targets(loaded) as (cluster, outside):
        adoptions = take_over(loaded, cluster, queue=queue, clusters=outside, name=on.status, dry_run=dry_run)
    if not adoptions and output == "table":
        print("nothing to take over: no other manager owns a field that the policy publishes")
        return
    lines = sorted({line for each in adoptions for line in advice(each)})
    show(
        output,
        lambda: Group(plan_tables.adoptions_table(adoptions), *(Text(f"  {line}") for line in lines)),
        [plan_tables.adoption_record(each) for each in adoptions],
    )
    if any(each.result not in {"applied", "would-apply"} for each in adoptions):
        raise typer.Exit(1)


@app.command()
def shard(
    policy: PolicyPath,
    endpoint: Annotated[str, typer.Option(help="Address at which the scheduler's Prometheus client queries usage.")],
) -> None:
    """Print the part of a scheduler's own configuration that matches the policy. Applying it may restart the
    scheduler."""
    import yaml

    from fairshare.controller import policy_file as policies
    from fairshare.targets.installed import adapters

    chosen, _ = policies.load(policy)
    fitting = [spec for each in adapters() if (spec := each.configuration(chosen, endpoint)) is not None]
    if not fitting:
        raise FairshareError("no installed scheduler has a configuration of its own that depends on the policy")
    print(yaml.safe_dump_all([{"spec": spec} for spec in fitting], sort_keys=False), end="")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit code."""
    return run_program(app, "gputally fairshare", argv, (FairshareError, AccountantError, FileFault))


if __name__ == "__main__":
    sys.exit(main())
