"""Compares the ledger with the ground truth, and prints and writes the summary of the demo.

Every GPU time is an integer of microseconds."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Column, Table
from rich.text import Text

from accountant.core.periods import utc
from accountant.ledger.usage import ACCOUNTS
from accountant.reports import figure_formatting
from accountant.wire.policy_models import IDLE, UNASSIGNED
from accountant.wire.usage_cost_and_job_models import Accounts
from fairshare.explain.plan_tables import report_view
from fairshare.simulator.entitlement import entitlement, feasible_demand
from gputally.base.command_output import Output
from gputally.base.command_output import show as print_result
from gputally.base.terminal import Terminal, figures
from gputally.base.units import US_PER_MS
from gputally.demo.cluster_and_workload import parts
from gputally.demo.ground_truth import HELD, TRUE_ACCOUNTS, TrueTotals
from gputally.demo.pipeline import ControllerCounts, Pipeline
from gputally.demo.scenario import Scenario
from gputally.demo.worker_processes import LEDGER_FILES, LedgerFigures


@dataclass(frozen=True, slots=True)
class TeamResult:
    """The result of the demo for one team.

    accounts: the team's GPU time in the ledger.
    cost: its cost; None if some of the time has no price.
    weight: the weight of its queue in the policy.
    share_before, share_after: the team's share of all GPU time that teams held, under static and time-based weights.
    due: the share that is due to the team by its weight and its demand."""

    name: str
    accounts: Accounts
    cost: Decimal | None
    weight: float
    share_before: float
    share_after: float
    due: float


@dataclass(frozen=True, slots=True)
class DemoCheck:
    """One check of the run. holds: True if it passes. detail: the difference that the check found, or its figures."""

    name: str
    holds: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Results:
    """The results of a run.

    capacity_gpu_us: the GPU time of the whole cluster in the span.
    sent: the number of intervals that the agents sent, including those that they sent twice.
    started, rejected, evictions: the number of started jobs, of jobs that can never start, and of stops by reclaim.
    wall_seconds: the duration of the run.
    queues: the state of each queue at the end, with which `gputally demo --serve` shows the controller's pages."""

    scenario: Scenario
    ledger: LedgerFigures
    counts: ControllerCounts
    capacity_gpu_us: int
    teams: tuple[TeamResult, ...]
    sent: int
    started: int
    rejected: int
    evictions: int
    checks: tuple[DemoCheck, ...]
    wall_seconds: float
    queues: Mapping[str, Mapping[str, float]]

    @property
    def ok(self) -> bool:
        """True if every check passes."""
        return all(check.holds for check in self.checks)

    @property
    def unassigned(self) -> Accounts:
        """The GPU time that was held without a team."""
        return self.ledger.by_team.get(UNASSIGNED, Accounts())

    def as_json(self) -> dict[str, Any]:
        """Return the content of summary.json. Money is decimal text, and GPU time is integer microseconds."""
        scenario, ledger, counts = self.scenario, self.ledger, self.counts
        return {
            "schema": 1,
            "seed": scenario.seed,
            "span": {
                "start_ms": scenario.start_ms,
                "end_ms": scenario.end_ms,
                "days": scenario.days,
                "interval_s": scenario.interval_s,
            },
            "capacity_gpu_us": self.capacity_gpu_us,
            "accounts_gpu_us": ledger.accounts.model_dump(),
            "currency": ledger.currency,
            "cost": _text(ledger.total),
            "teams": {
                team.name: {
                    "gpu_us": team.accounts.allocated,
                    "busy_gpu_us": team.accounts.busy,
                    "cost": _text(team.cost),
                    "currency": ledger.currency,
                    "share_before": round(team.share_before, 6),
                    "share_after": round(team.share_after, 6),
                    "share_due": round(team.due, 6),
                }
                for team in self.teams
            },
            "unassigned_gpu_us": self.unassigned.allocated,
            "coverage": round(ledger.coverage, 6),
            "intervals": {
                "sent": self.sent,
                "stored": ledger.rows["stored"],
                "duplicates_dropped": ledger.rows["duplicate"],
                "quarantined": ledger.rows["quarantined"],
            },
            "controller": asdict(counts),
            "queues": self.queues,
            "jobs": {"started": self.started, "rejected": self.rejected, "reclaimed": self.evictions},
            "checks": {check.name: check.holds for check in self.checks},
            "wall_seconds": round(self.wall_seconds, 1),
        }


def collect(pipeline: Pipeline, ledger: LedgerFigures, before: TrueTotals, wall_seconds: float) -> Results:
    """Collect the results of a run. before: the ground truth of the run under static weights."""
    scenario = pipeline.scenario
    outcomes = pipeline.engine.outcomes.values()
    capacity = sum(len(node.gpus) for node in scenario.nodes) * (scenario.end_ms - scenario.start_ms) * US_PER_MS
    return Results(
        scenario=scenario,
        ledger=ledger,
        counts=pipeline.counts,
        capacity_gpu_us=capacity,
        teams=_teams(pipeline, before, ledger.by_team, ledger.costs),
        sent=pipeline.site_result.closed + pipeline.resent,
        started=sum(outcome.first_start_ms is not None for outcome in outcomes),
        rejected=sum(outcome.rejected for outcome in outcomes),
        evictions=sum(outcome.evictions for outcome in outcomes),
        checks=_checks(pipeline, ledger, capacity),
        wall_seconds=wall_seconds,
        queues=pipeline.queues(),
    )


def _teams(
    pipeline: Pipeline,
    before: TrueTotals,
    by_team: Mapping[str, Accounts],
    costs: Mapping[str, Decimal | None],
) -> tuple[TeamResult, ...]:
    scenario = pipeline.scenario
    weights = {queue.name: queue.weight for queue in scenario.policy.queues}
    static = {name: before.held_us(name) for name in weights}
    after = {name: by_team.get(name, Accounts()).allocated for name in weights}
    # The ledger does not know the demand, so it comes from the simulation.
    demand = {
        name: max(amount * US_PER_MS, after[name])
        for name, amount in feasible_demand(
            pipeline.engine.outcomes.values(), scenario.start_ms, scenario.end_ms, parts()
        ).items()
        if name in weights
    }
    total = sum(after.values())
    due = entitlement(total, demand, weights)
    return tuple(
        TeamResult(
            name,
            by_team.get(name, Accounts()),
            costs.get(name, Decimal(0)),
            weights[name],
            static[name] / (sum(static.values()) or 1),
            after[name] / (total or 1),
            due[name] / (total or 1),
        )
        for name in sorted(weights)
    )


def _checks(pipeline: Pipeline, ledger: LedgerFigures, capacity: int) -> tuple[DemoCheck, ...]:
    accounts, by_team, rows = ledger.accounts, ledger.by_team, ledger.rows
    truth = pipeline.site_result.totals
    differences = {
        name: getattr(accounts, name) - truth.accounts[name]
        for name in TRUE_ACCOUNTS
        if getattr(accounts, name) != truth.accounts[name]
    }
    teams = {**truth.teams}
    known = {queue.name for queue in pipeline.scenario.policy.queues}
    unassigned = dict.fromkeys(HELD, 0)
    for name in set(teams) - known:
        figures = teams.pop(name)
        unassigned = {account: unassigned[account] + figures[account] for account in HELD}
    teams[UNASSIGNED] = unassigned
    different_teams = [
        name
        for name, figures in sorted(teams.items())
        if any(getattr(by_team.get(name, Accounts()), account) != figures[account] for account in HELD)
    ]
    closed, resent = pipeline.site_result.closed, pipeline.resent
    return (
        DemoCheck("accounts_add_up_to_capacity", accounts.total == capacity, f"{accounts.total - capacity:+,} µs"),
        DemoCheck(
            "ledger_equals_truth",
            not differences,
            ", ".join(f"{k} {v:+,} µs" for k, v in differences.items()) or "to the µs",
        ),
        DemoCheck("teams_equal_truth", not different_teams, ", ".join(different_teams) or "to the µs"),
        DemoCheck("every_interval_stored_once", rows["stored"] == closed, f"{rows['stored']:,} of {closed:,}"),
        DemoCheck("duplicates_dropped", rows["duplicate"] == resent, f"{rows['duplicate']:,} of {resent:,} sent twice"),
        DemoCheck("nothing_quarantined", rows["quarantined"] == 0, f"{rows['quarantined']:,}"),
    )


def _text(amount: Decimal | None) -> str | None:
    return None if amount is None else str(amount)


PLAN_WIDTH = 180
FILES = (*LEDGER_FILES, "plan.txt", "summary.json")


def write_files(pipeline: Pipeline, results: Results, folder: Path) -> None:
    """Write FILES. The accountant has begun to write its files before. Raises OSError, and WorkerLost if the accountant
    cannot write a file."""
    (folder / "plan.txt").write_text(_plan(pipeline), encoding="utf-8")
    (folder / "summary.json").write_text(json.dumps(results.as_json(), indent=2) + "\n", encoding="utf-8")
    pipeline.files_written()


def show(results: Results, folder: Path, console: Console, output: Output = "table") -> None:
    """Print the summary. JSON is the content of summary.json, and CSV has one record per team."""
    if output != "table":
        summary = results.as_json()
        teams = [{"team": name, **figures} for name, figures in summary["teams"].items()]
        if not console.quiet:
            print_result(output, lambda: "", summary, teams)
        return
    for title, table in (
        (f"GPU-hours by account, {_span(results)}", _accounts_table(results)),
        ("Teams: cost, and share of held GPU time before and after time-based weights", _teams_table(results)),
        ("On the wire and in the scheduler", _protocol_table(results)),
        (f"Checks ({results.wall_seconds:.1f} s)", _checks_table(results)),
    ):
        console.print(Text(f"\n{title}", "bold"))
        console.print(table)
    console.print(f"[dim]{', '.join(FILES)} in[/dim] {folder}/")


def _plan(pipeline: Pipeline) -> str:
    """Return the report of the controller's last cycle, as `gputally fairshare plan` prints it."""
    text = io.StringIO()
    console = Terminal(file=text, width=PLAN_WIDTH, color_system=None)
    if pipeline.controller.last is not None:
        console.print(report_view(pipeline.controller.last))
    return text.getvalue()


def _accounts_table(results: Results) -> RenderableType:
    table = _table("account", *figures("GPU-hours", "of capacity"))
    for account in ACCOUNTS:
        amount = getattr(results.ledger.accounts, account)
        table.add_row(
            figure_formatting.ACCOUNT_NAMES[account],
            figure_formatting.hours(amount),
            figure_formatting.percent(amount / results.capacity_gpu_us),
        )
    table.add_section()
    exact = results.ledger.accounts.total == results.capacity_gpu_us
    table.add_row(
        f"= capacity {_mark(exact)}",
        figure_formatting.hours(results.capacity_gpu_us),
        figure_formatting.percent(1.0),
        style="bold",
    )
    return table


def _teams_table(results: Results) -> RenderableType:
    currency = results.ledger.currency
    headings = figures("GPU-hours", "busy", f"cost {currency}", "weight", "before", "after", "due")
    table = _table(Column("team", no_wrap=True), *headings)
    for team in results.teams:
        held = team.accounts.allocated
        table.add_row(
            team.name,
            figure_formatting.hours(held),
            figure_formatting.percent(team.accounts.busy / held if held else None),
            figure_formatting.money(team.cost, currency),
            f"{team.weight:g}",
            figure_formatting.percent(team.share_before),
            _share_after(team.share_before, team.share_after, team.due),
            figure_formatting.percent(team.due),
        )
    held = results.unassigned.allocated
    if held:
        busy = figure_formatting.percent(results.unassigned.busy / held)
        rest = _cost_without_team(results)
        table.add_row(
            "no team",
            figure_formatting.hours(held),
            busy,
            figure_formatting.money(rest, currency),
            *[""] * 4,
            style="dim",
        )
    table.add_row(
        "unallocated",
        figure_formatting.hours(results.ledger.accounts.unallocated),
        "",
        figure_formatting.money(results.ledger.costs.get(IDLE), currency),
        *[""] * 4,
        style="dim",
    )
    table.add_section()
    table.add_row(
        "total",
        figure_formatting.hours(results.ledger.accounts.allocated + results.ledger.accounts.unallocated),
        "",
        figure_formatting.money(results.ledger.total, currency),
        *[""] * 4,
        style="bold",
    )
    before = sum(abs(team.share_before - team.due) for team in results.teams) / 2
    after = sum(abs(team.share_after - team.due) for team in results.teams) / 2
    better = Text(figure_formatting.percent(after), "green" if after < before else "yellow")
    table.add_row("misplaced", *[""] * 4, figure_formatting.percent(before), better, "")
    return table


def _protocol_table(results: Results) -> RenderableType:
    ledger, counts = results.ledger, results.counts
    table = _table("", *figures(""))
    table.show_header = False
    table.add_row("intervals sent", f"{results.sent:,}")
    table.add_row("intervals stored", f"{ledger.rows['stored']:,}")
    table.add_row(f"duplicates dropped ({ledger.acks_lost} answers lost on the way)", f"{ledger.rows['duplicate']:,}")
    table.add_row("coverage (metered part of the working capacity)", figure_formatting.percent(ledger.coverage))
    table.add_row(f"control cycles ({counts.holds} held because usage was missing)", f"{counts.cycles:,}")
    table.add_row("weights written to Queue objects", f"{counts.weights_published:,}")
    jobs = f"jobs started ({results.evictions:,} stops by reclaim, {results.rejected} never possible)"
    table.add_row(jobs, f"{results.started:,}")
    return table


def _checks_table(results: Results) -> RenderableType:
    table = _table("", "", "")
    table.show_header = False
    for check in results.checks:
        table.add_row(_mark(check.holds), check.name.replace("_", " "), Text(check.detail, "dim"))
    return table


def _table(*columns: str | Column) -> Table:
    return Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)


def _span(results: Results) -> str:
    scenario = results.scenario
    start, end = (utc(at) for at in (scenario.start_ms, scenario.end_ms))
    gpus = sum(len(node.gpus) for node in scenario.nodes)
    return f"{start[:10]} to {end[:10]} ({scenario.days} days × {gpus} GPUs)"


def _mark(holds: bool) -> str:
    return "[green]✓[/green]" if holds else "[bold red]✗[/bold red]"


def _share_after(before: float, after: float, due: float) -> Text:
    """Render the new share, in green if it is closer to the team's entitlement than the old share."""
    closer = abs(after - due) < abs(before - due)
    return Text(figure_formatting.percent(after), "green" if closer else "")


def _cost_without_team(results: Results) -> Decimal | None:
    """Return the cost of GPU time that was held without a team: the total less the cost of the teams and of unallocated
    time; None if some of the time has no price."""
    total = results.ledger.total
    if total is None:
        return None
    costs = [team.cost for team in results.teams] + [results.ledger.costs.get(IDLE)]
    return total - sum((cost for cost in costs if cost is not None), Decimal(0))
