"""Runs `usage`, `cost`, `waits`, `budgets`, `guarantees`, `check`, `jobs` and `nodes`.

A job can be named as the table
shows it or by a suffix of that name; the full id is needed only if the suffix is ambiguous."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from accountant.cli.connection_options import (
    Books,
    Compare,
    End,
    Grouping,
    LedgerOptions,
    ListPrinted,
    Priced,
    Printed,
    Start,
    Where,
    ZonedLedger,
    chosen_columns,
    chosen_order,
    filters,
    print_answer,
    write_binary,
)
from accountant.wire.option_types import JOB_ORDERS, NODE_ORDERS, ORDER_HELP, JobKind, JobState, WaitGroup
from gputally.base.command_options import refuse_ignored, with_option_groups
from gputally.base.command_output import Output, show

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.table import Table

    from accountant.cli.grouped_lines import Answer
    from gputally.base.accountant_connection import Query


app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
@with_option_groups
def usage(output: Printed = "table", *, wanted: Grouping, at: ZonedLedger) -> None:
    """Show GPU-hours by account and group."""
    from accountant.cli import grouped_lines, terminal_tables
    from accountant.wire.usage_cost_and_job_models import UsageAnswer

    order = grouped_lines.usage_order(wanted)
    with at.connection() as remote:
        found = remote.whole(UsageAnswer, "/v1/usage", _query(wanted, at.timezone))
    lines = grouped_lines.usage_lines(found, wanted, order)
    print_lines(output, lines, wanted.limit, lambda usage, most: terminal_tables.usage_table(usage, at.zone, most))


@app.command()
@with_option_groups
def cost(output: Printed = "table", *, wanted: Grouping, at: Priced) -> None:
    """Show the exact cost by group."""
    from accountant.cli import grouped_lines, terminal_tables
    from accountant.wire.usage_cost_and_job_models import CostAnswer

    order = grouped_lines.cost_order(wanted)
    amounts = {"amounts": "true"} if output == "table" else {}  # files for programs have exact costs
    with at.connection() as remote:
        found = remote.whole(CostAnswer, "/v1/cost", {**_query(wanted, at.timezone), **amounts})
    lines = grouped_lines.cost_lines(found, wanted, order)
    print_lines(output, lines, wanted.limit, lambda cost, most: terminal_tables.cost_table(cost, at.zone, most))


@app.command()
@with_option_groups
def waits(
    by: Annotated[WaitGroup, Option(help="The dimension of the lines.")] = "queue",
    start: Start = None,
    end: End = None,
    cluster: Annotated[str | None, Option(help="Only pods of this cluster (default: all clusters).")] = None,
    unused: Annotated[
        bool, Option("--unused", help="Instead the GPU time that was free or held idle while pods waited.")
    ] = False,
    output: Printed = "table",
    *,
    at: ZonedLedger,
) -> None:
    """Show how long pods waited in their queues: mean, median, 95th percentile and longest."""
    from accountant.cli import terminal_tables
    from accountant.wire.usage_cost_and_job_models import UnusedAnswer, WaitLine

    span: Query = {"start": start, "end": end, "timezone": at.timezone, "cluster": cluster}
    if unused:
        refuse_ignored("with --unused", "by")
        answer = at.ask(UnusedAnswer, "/v1/waits/unused", span)
        print_answer(output, answer, lambda one: terminal_tables.unused(one, at.zone), answer.lines)
        return
    found = at.ask(tuple[WaitLine, ...], "/v1/waits", {**span, "by": by})
    print_answer(output, found, lambda lines: terminal_tables.waits(lines, by, start, end))


@app.command()
@with_option_groups
def budgets(output: Printed = "table", *, at: Books) -> None:
    """Show the budgets of this month: limit, what is spent, and what the whole month is expected to come to."""
    from accountant.cli import terminal_tables
    from accountant.wire.usage_cost_and_job_models import BudgetState

    print_answer(output, at.ask(tuple[BudgetState, ...], "/v1/budgets"), terminal_tables.budgets)


@app.command()
@with_option_groups
def guarantees(output: Printed = "table", *, at: Books) -> None:
    """Show what each queue is guaranteed, the mean of what it held in the last minutes on record, and what is above."""
    from accountant.cli import terminal_tables
    from accountant.wire.usage_cost_and_job_models import GuaranteesAnswer

    found = at.ask(GuaranteesAnswer, "/v1/guarantees")
    print_answer(output, found, lambda answer: terminal_tables.guarantees(answer, at.zone), found.queues)


@app.command()
@with_option_groups
def check(
    output: Printed = "table",
    *,
    lake: Annotated[bool, Option("--lake", help="Also compare the lake with the ledger.")] = False,
    repair: Annotated[
        bool, Option("--repair", help="With --lake: first write to the lake what differs from the ledger.")
    ] = False,
    reason: Annotated[str, Option(help="With --repair: the reason, which the audit trail records.")] = "",
    at: LedgerOptions,
) -> None:
    """Recompute the accounts from the rows; exit 1 unless every GPU-microsecond is in exactly one account."""
    from accountant.api.bookkeeping_models import Balance, LakeRepaired
    from accountant.cli import terminal_tables

    if repair and not (lake and reason):
        raise typer.BadParameter("--repair needs --lake and a --reason for the audit trail", param_hint="--repair")
    if repair:
        at.act(LakeRepaired, "/v1/lake/repair", {"reason": reason})
    balance = at.ask(Balance, "/v1/check", {"lake": "true"} if lake else {})
    print_answer(output, balance, terminal_tables.balance_table)
    if balance.imbalance_gpu_us or balance.month_faults or balance.lake_differences:
        raise typer.Exit(1)


def _query(wanted: Grouping, timezone: str | None) -> Query:
    span = {"start": wanted.start, "end": wanted.end, "timezone": timezone}
    return {"by": wanted.by, **span, **filters(wanted.where)}


def print_lines(output: Output, found: Answer, limit: int | None, drawn: Callable[[Answer, int], Table]) -> None:
    """Prints lines of usage or cost.

    limit: how many; None: those that a table has, or all in a file.
    drawn: the table of this many lines."""
    from accountant.cli.grouped_lines import shortened

    kept = found if output == "table" else shortened(found, limit)
    print_answer(output, kept, lambda answer: drawn(answer, limit or SHOWN), kept.lines)


SHOWN = 50
"""Number of lines in a table without --limit."""


@app.command()
@with_option_groups
def jobs(
    job: Annotated[
        str | None,
        Argument(
            help="One job to show with its prices and epochs: its name in the list, the end of that name, its id, or "
            "one of its pods."
        ),
    ] = None,
    start: Start = None,
    end: End = None,
    state: Annotated[JobState | None, Option(help="Only jobs in this state.")] = None,
    where: Where = None,
    kind: Annotated[JobKind | None, Option(help="Only notebooks, services or batch jobs (training).")] = None,
    idle: Annotated[
        bool,
        Option("--idle", help="Only running jobs whose GPUs did nothing in the span (default: the last 30 minutes)."),
    ] = False,
    stopped: Annotated[
        bool,
        Option("--stopped", help="Only jobs of which a scheduler, or something else that evicts, stopped pods."),
    ] = False,
    search: Annotated[
        str,
        Option(help="Only jobs with this text in their path, CLUSTER/NAMESPACE/KIND/NAME, or in the name of a pod."),
    ] = "",
    sort: Annotated[str, Option(help=f"{ORDER_HELP} Columns: {', '.join(JOB_ORDERS.columns)}.")] = "cost",
    columns: Annotated[
        str | None, Option(help="Columns to show beside the job, as --sort names them: user,utilisation,cost.")
    ] = None,
    compare: Compare = False,
    limit: Annotated[
        int | None,
        Option(min=1, help=f"Number of jobs to show (default: {SHOWN} in a table, all in JSON, CSV and Parquet)."),
    ] = None,
    output: ListPrinted = "table",
    *,
    at: Priced,
) -> None:
    """List jobs with their GPU-hours, cost so far, burn rate and wait."""
    from accountant.cli.job_tables import COLUMNS, called, epoch_record, job_records, jobs_table, print_job
    from accountant.wire.job_columns import asks_lost
    from accountant.wire.usage_cost_and_job_models import JobAnswer, JobsAnswer

    zone = at.zone
    shown, order = chosen_columns(columns, COLUMNS), chosen_order(sort, JOB_ORDERS)
    start = "30m" if idle and start is None else start
    span: Query = {"start": start, "end": end, "timezone": at.timezone}
    if output == "parquet":
        refuse_ignored("with --output parquet", "job", "limit")
    with at.connection() as remote:
        if job is not None and output != "parquet":
            job_answer = remote.ask(JobAnswer, f"/v1/jobs/{job if '~' in job else called(job, remote, span)}", span)
            epochs = [epoch_record(job_answer, line) for line in job_answer.epochs]
            show(output, lambda: print_job(job_answer, zone), job_answer.model_dump(mode="json"), epochs)
            return
        query: Query = {**span, "state": state, "kind": kind, "search": search or None, "sort": order, **filters(where)}
        lost = asks_lost(shown, JOB_ORDERS.read(order).column) or (stopped and not shown)
        flags = {"idle": idle, "stopped": stopped, "compare": compare, "lost": lost and output != "parquet"}
        query = {**query, **{name: "true" if flag else None for name, flag in flags.items()}}
        if output == "parquet":
            write_binary(remote.get("/jobs.parquet", {**query, "columns": ",".join(shown) or None}))
            return
        most = SHOWN if limit is None and output == "table" else limit
        answer = remote.whole(JobsAnswer, "/v1/jobs", query, most)
    rows = job_records(answer.jobs, answer.currency, shown, compare=compare, lost=lost)
    show(output, lambda: jobs_table(answer, zone, shown), answer.model_dump(mode="json"), rows)


@app.command()
@with_option_groups
def nodes(
    start: Annotated[
        str | None,
        Option("--start", "--since", help="Start of the span: 7d before its end, a date or RFC 3339 (default: 7d)."),
    ] = None,
    end: End = None,
    where: Where = None,
    search: Annotated[str, Option(help="Only nodes with this text in CLUSTER/NODE.")] = "",
    sort: Annotated[str, Option(help=f"{ORDER_HELP} Columns: {', '.join(NODE_ORDERS.columns)}.")] = "name",
    columns: Annotated[
        str | None, Option(help="Columns to show beside the node, as --sort names them: gpus,held,down.")
    ] = None,
    compare: Compare = False,
    limit: Annotated[
        int | None,
        Option(min=1, help=f"Number of nodes to show (default: {SHOWN} in a table, all in JSON, CSV and Parquet)."),
    ] = None,
    output: ListPrinted = "table",
    *,
    at: ZonedLedger,
) -> None:
    """List nodes with what their GPUs did."""
    from accountant.cli.node_tables import COLUMNS, node_record, nodes_table
    from accountant.wire.usage_cost_and_job_models import NodesAnswer

    zone = at.zone
    shown, order = chosen_columns(columns, COLUMNS), chosen_order(sort, NODE_ORDERS)
    span: Query = {"start": start, "end": end, "timezone": at.timezone}
    query: Query = {**span, "search": search or None, "sort": order, **filters(where)}
    query = {**query, "compare": "true" if compare else None}
    if output == "parquet":
        refuse_ignored("with --output parquet", "limit")
    with at.connection() as remote:
        if output == "parquet":
            write_binary(remote.get("/nodes.parquet", {**query, "columns": ",".join(shown) or None}))
            return
        answer = remote.whole(NodesAnswer, "/v1/nodes", query, SHOWN if limit is None and output == "table" else limit)
    rows = (node_record(node, shown, compare=compare) for node in answer.lines)
    show(output, lambda: nodes_table(answer, zone, shown), answer.model_dump(mode="json"), rows)
