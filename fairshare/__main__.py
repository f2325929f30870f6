"""The controller's command: run it, see its plan, check a policy, divide by hand, give the weights back.

`main(argv)` returns an exit code: 0 done, 1 could not (one clear line per fault on stderr, never a
traceback), 2 called wrongly.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Group, RenderableType
from rich.text import Text

from accountant.wire import MOST
from agent.clock import SystemClock
from agent.output import show
from agent.plaintext import for_terminal
from agent.yamlfile import FileFault
from fairshare import log, plain, service
from fairshare import policy as policies
from fairshare.adapters.kai import shard_advice
from fairshare.client import AccountantClient
from fairshare.commands.explain import explain, remembered
from fairshare.commands.options import (
    DEFAULT_STATUS,
    DEFAULT_URL,
    CaPath,
    ClusterName,
    Kubeconfig,
    LedgerName,
    PolicyPath,
    Printed,
    RunaiCa,
    RunaiCredentials,
    StatusName,
    TokenPath,
    Url,
    pods_of,
)
from fairshare.commands.preempt import preempt
from fairshare.commands.replay import replay
from fairshare.commands.simulate import simulate
from fairshare.commands.what_if import what_if
from fairshare.division import divide as divide_case
from fairshare.errors import DivisionError, FairshareError
from fairshare.explain import tables
from fairshare.loop import Controller
from fairshare.preempting.resuming import Ended, end_all
from fairshare.publishing.adopt import adopt as take_over
from fairshare.publishing.adopt import advice
from fairshare.publishing.releasing import release_weights
from fairshare.runai.opening import opened
from fairshare.settings import load
from fairshare.status import StatusObject
from fairshare.targets import ADAPTERS
from fairshare.weighing import cases

app = typer.Typer(
    help="Usage history into queue weights.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)

app.command()(simulate)
app.command()(explain)
app.command()(replay)
app.command("what-if")(what_if)
app.command()(preempt)


@app.command()
def run(
    config: Annotated[Path | None, typer.Option(help="Settings file (YAML).")] = None,
    policy: Annotated[Path | None, typer.Option(help="Policy file (YAML).")] = None,
    accountant: Annotated[str | None, typer.Option(help="Base URL of the accountant.")] = None,
    token_file: TokenPath = None,
    ca_file: CaPath = None,
    cluster: Annotated[str | None, typer.Option(help="kubernetes, or a YAML file of objects.")] = None,
    kubeconfig: Kubeconfig = None,
    interval: Annotated[str | None, typer.Option(help="Time between two cycles, for example 1m.")] = None,
    listen: Annotated[str | None, typer.Option(help="host:port of /livez, /readyz and /metrics.")] = None,
    extender_listen: Annotated[str | None, typer.Option(help="host:port for the kube-scheduler's extender.")] = None,
    pages_listen: Annotated[str | None, typer.Option(help="host:port of the pages for people.")] = None,
    dry_run: Annotated[
        bool | None, typer.Option("--dry-run", help="Publish no weight, whatever the policy says.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print the settings in force and stop.")] = False,
) -> None:
    """Publish weights until SIGTERM or Ctrl-C. What is written, and whether, the policy says."""
    given = {
        "policy": policy, "accountant": accountant, "token_file": token_file, "ca_file": ca_file, "cluster": cluster,
        "kubeconfig": kubeconfig, "interval": interval, "listen": listen,
        "extender_listen": extender_listen, "pages_listen": pages_listen, "dry_run": dry_run, "log_level": log_level,
    }  # fmt: skip
    settings = load(config, os.environ, {name: value for name, value in given.items() if value is not None})
    if print_config:
        print(settings.as_yaml(), end="")
        return
    log.configure(settings.log_level)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    service.run(settings, stop)


@app.command()
def plan(
    policy: PolicyPath,
    accountant: Url = DEFAULT_URL,
    token_file: TokenPath = None,
    ca_file: CaPath = None,
    cluster_name: LedgerName = "",
    cluster: ClusterName = "kubernetes",
    kubeconfig: Kubeconfig = None,
    status: StatusName = DEFAULT_STATUS,
    runai_credentials: RunaiCredentials = None,
    runai_ca_file: RunaiCa = None,
    output: Printed = "table",
) -> None:
    """One cycle that writes nothing: every weight as it would be, with the reason of every number.

    Asks the API server in dry-run, so conflicts and refusals are known before. The accountant is told
    neither the policy nor the decisions."""
    given = policies.load(policy)[0]
    wanted = policies.only_try(given)
    with (
        AccountantClient(accountant, token_file=token_file, ca_file=ca_file, cluster=cluster_name) as client,
        ExitStack() as open_,
    ):
        there, clock = service.open_cluster(cluster, kubeconfig), SystemClock()
        where = StatusObject.named(status)
        elsewhere = open_.enter_context(opened(wanted, there, runai_credentials, runai_ca_file, where, clock))
        seen = pods_of(there)
        memory = remembered(there, status)
        report = Controller(
            wanted, client, there, clock, clusters=elsewhere, silent=True, pods=lambda: seen, memory=memory
        ).cycle()
    show(output, lambda: tables.report_view(report), plain.plan_document(report), plain.plan_records(report))
    if report.hold is not None or any(target.degraded for target in report.targets):
        raise typer.Exit(1)


@app.command()
def divide(
    input: Annotated[str, typer.Option("--input", help="JSON: one case, a list, or {meta, vectors}; - is stdin.")],
    output: Printed = "table",
    explain: Annotated[bool, typer.Option("--explain", help="Show every round and remainder.")] = False,
) -> None:
    """Divide as KAI does, and show how. JSON: an array of {name, shares, remaining}, one per case."""
    try:
        text = sys.stdin.buffer.read() if input == "-" else Path(input).read_bytes()
    except OSError as error:
        raise DivisionError(f"{input}: {error.strerror}") from error
    try:
        divided = [(case, divide_case(case, explain=explain, kai_compat=True)) for case in cases.parse(text)]
    except DivisionError as error:
        raise DivisionError(f"{'stdin' if input == '-' else input}: {error}") from error
    document = [tables.division_json(case, result, explain=explain) for case, result in divided]

    def drawn() -> RenderableType:
        each = ((tables.division_table(*one), *([tables.steps_table(one[1])] if explain else ())) for one in divided)
        return Group(*(part for parts in each for part in parts))

    show(output, drawn, document, plain.shares(divided))


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="Policy file (YAML).")],
    capacity: Annotated[
        float | None, typer.Option(min=0, max=MOST, help="GPUs of the cluster, to compare quotas with.")
    ] = None,
    gang: Annotated[
        list[str] | None, typer.Option(help="QUEUE=GPUS: can the law ever let this gang in? Needs --capacity.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 for warnings as well.")] = False,
) -> None:
    """Say what is wrong with a policy (exit 1), and what is allowed but seldom meant (exit 0)."""
    policy, document = policies.load(file)
    warnings = policies.show(document, policies.advice(policy, capacity, policies.gangs(policy, gang or ())))
    for line in warnings:
        print(line)
    print(f"{file}: {len(policy.queues)} queues, version {policy.version()}")
    if strict and warnings:
        raise typer.Exit(1)


@app.command()
def release(
    policy: PolicyPath,
    cluster: ClusterName = "kubernetes",
    kubeconfig: Kubeconfig = None,
    status: StatusName = DEFAULT_STATUS,
    runai_credentials: RunaiCredentials = None,
    runai_ca_file: RunaiCa = None,
    left_behind: Annotated[
        bool, typer.Option("--left-behind", help="Only objects that no queue of the policy is tied to any more.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show it.")] = False,
    output: Printed = "table",
) -> None:
    """Give every queue the weight back that stood there before gputally, and let who gave way run again; for
    switching it off."""
    given, there = policies.load(policy)[0], service.open_cluster(cluster, kubeconfig)
    where, clock = StatusObject.named(status), SystemClock()
    with opened(given, there, runai_credentials, runai_ca_file, where, clock) as elsewhere:
        outcomes = release_weights(given, there, clusters=elsewhere, dry_run=dry_run, left_behind=left_behind)
    ended = end_all(there, clock.wall_ms()) if not dry_run and not left_behind else Ended()
    for line in ended.told():
        print(for_terminal(line), file=sys.stderr)
    if not outcomes and output == "table":
        print("nothing to release: no queue carries a weight of ours")
    else:
        show(output, lambda: tables.outcomes_table(outcomes), [plain.outcome(each) for each in outcomes])
    stays = any(outcome.result not in {"applied", "would-apply"} for outcome in outcomes)
    if stays or ended.left or ended.faults:
        raise typer.Exit(1)


@app.command()
def adopt(
    policy: PolicyPath,
    queue: Annotated[str | None, typer.Option(help="Only this queue of the policy.")] = None,
    cluster: ClusterName = "kubernetes",
    kubeconfig: Kubeconfig = None,
    status: StatusName = DEFAULT_STATUS,
    runai_credentials: RunaiCredentials = None,
    runai_ca_file: RunaiCa = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show it.")] = False,
    output: Printed = "table",
) -> None:
    """Take the weight's field over from whoever owns it (Argo CD, Flux, kubectl), at the value that stands."""
    wanted = policies.load(policy)[0]
    there, where, clock = service.open_cluster(cluster, kubeconfig), StatusObject.named(status), SystemClock()
    with opened(wanted, there, runai_credentials, runai_ca_file, where, clock) as elsewhere:
        taken = take_over(wanted, there, ADAPTERS, queue=queue, clusters=elsewhere, dry_run=dry_run)
    if not taken and output == "table":
        print("nothing to take over: nobody else owns a field that the policy publishes")
        return
    lines = sorted({line for each in taken for line in advice(each)})
    show(
        output,
        lambda: Group(tables.adoptions_table(taken), *(Text(f"  {line}") for line in lines)),
        [plain.adoption(each) for each in taken],
    )
    if any(each.result not in {"applied", "would-apply"} for each in taken):
        raise typer.Exit(1)


@app.command()
def shard(
    policy: PolicyPath,
    endpoint: Annotated[str, typer.Option(help="Where KAI asks for usage (its Prometheus client's address).")],
) -> None:
    """Print the part of a KAI SchedulingShard that goes with the policy. Applying it restarts KAI's scheduler."""
    print(yaml.safe_dump({"spec": shard_advice(policies.load(policy)[0], endpoint)}, sort_keys=False), end="")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    try:
        app(args=list(sys.argv[1:] if argv is None else argv), prog_name="gputally fairshare")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 1
    except (FairshareError, FileFault) as fault:
        for line in str(fault).splitlines():
            print(for_terminal(f"gputally fairshare: {line}"), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
