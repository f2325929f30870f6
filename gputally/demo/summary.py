"""What people see when a run is over: tables on the terminal, files in a folder."""

from __future__ import annotations

import io
import json
from decimal import Decimal
from pathlib import Path

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from accountant.books.costs import ACCOUNTS
from accountant.periods import utc
from accountant.reports import formats
from agent.output import Output
from agent.output import show as printed
from agent.terminal import Terminal
from agent.units import MS_PER_SECOND
from fairshare.explain.tables import report_view
from gputally.demo.letters import LEDGER_FILES
from gputally.demo.pipeline import Pipeline
from gputally.demo.results import Results

PLAN_WIDTH = 180
FILES = (*LEDGER_FILES, "plan.txt", "summary.json")


def write_files(pipeline: Pipeline, results: Results, folder: Path) -> None:
    """FILES, of which the accountant's own were begun before. Raises OSError, and WorkerLost for what the accountant
    cannot write."""
    (folder / "plan.txt").write_text(_plan(pipeline), encoding="utf-8")
    (folder / "summary.json").write_text(json.dumps(results.as_json(), indent=2) + "\n", encoding="utf-8")
    pipeline.files_written()


def show(results: Results, folder: Path, console: Console, output: Output = "table") -> None:
    """The summary. JSON is that of summary.json, CSV its teams."""
    if output != "table":
        found = results.as_json()
        teams = [{"team": name, **figures} for name, figures in found["teams"].items()]
        if not console.quiet:
            printed(output, lambda: "", found, teams)
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
    """The controller's last cycle as it would be printed."""
    text = io.StringIO()
    console = Terminal(file=text, width=PLAN_WIDTH, color_system=None)
    if pipeline.controller.last is not None:
        console.print(report_view(pipeline.controller.last))
    return text.getvalue()


def _accounts_table(results: Results) -> RenderableType:
    table = _table()
    table.add_column("account")
    for heading in ("GPU-hours", "of capacity"):
        table.add_column(heading, justify="right")
    for account in ACCOUNTS:
        amount = getattr(results.accounts, account)
        table.add_row(
            formats.ACCOUNT_NAMES[account], formats.hours(amount), formats.percent(amount / results.capacity_gpu_us)
        )
    table.add_section()
    exact = results.accounts.total == results.capacity_gpu_us
    table.add_row(
        f"= capacity {_mark(exact)}", formats.hours(results.capacity_gpu_us), formats.percent(1.0), style="bold"
    )
    return table


def _teams_table(results: Results) -> RenderableType:
    table = _table()
    table.add_column("team", no_wrap=True)
    for heading in ("GPU-hours", "busy", f"cost {results.currency}", "weight", "before", "after", "entitled"):
        table.add_column(heading, justify="right")
    for team in results.teams:
        held = team.accounts.allocated
        table.add_row(
            team.name,
            formats.hours(held),
            formats.percent(team.accounts.busy / held if held else None),
            formats.money(team.cost, results.currency),
            f"{team.weight:g}",
            formats.percent(team.share_before),
            _nearer(team.share_before, team.share_after, team.entitled),
            formats.percent(team.entitled),
        )
    held = results.unassigned.allocated
    if held:
        busy = formats.percent(results.unassigned.busy / held)
        rest = _rest(results)
        table.add_row(
            "no team", formats.hours(held), busy, formats.money(rest, results.currency), *[""] * 4, style="dim"
        )
    table.add_row(
        "unallocated",
        formats.hours(results.accounts.unallocated),
        "",
        formats.money(results.unallocated_cost, results.currency),
        *[""] * 4,
        style="dim",
    )
    table.add_section()
    table.add_row(
        "total",
        formats.hours(results.accounts.allocated + results.accounts.unallocated),
        "",
        formats.money(results.total_cost, results.currency),
        *[""] * 4,
        style="bold",
    )
    before = sum(abs(team.share_before - team.entitled) for team in results.teams) / 2
    after = sum(abs(team.share_after - team.entitled) for team in results.teams) / 2
    better = Text(formats.percent(after), "green" if after < before else "yellow")
    table.add_row("misplaced", *[""] * 4, formats.percent(before), better, "")
    return table


def _protocol_table(results: Results) -> RenderableType:
    table = _table()
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row("intervals sent", f"{results.sent:,}")
    table.add_row("intervals stored", f"{results.stored:,}")
    table.add_row(f"duplicates dropped ({results.acks_lost} answers lost on the way)", f"{results.duplicates:,}")
    table.add_row("coverage (metered part of the working capacity)", formats.percent(results.coverage, 3))
    table.add_row(
        f"control cycles ({results.holds} held for want of usage)",
        f"{results.cycles:,}",
    )
    table.add_row("weights written to Queue objects", f"{results.weights_published:,}")
    jobs = f"jobs started ({results.evictions:,} stops by reclaim, {results.rejected} never possible)"
    table.add_row(jobs, f"{results.started:,}")
    table.show_header = False
    return table


def _checks_table(results: Results) -> RenderableType:
    table = _table()
    table.show_header = False
    for _ in range(3):
        table.add_column("")
    for check in results.checks:
        table.add_row(_mark(check.holds), check.name.replace("_", " "), Text(check.detail, "dim"))
    return table


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)


def _span(results: Results) -> str:
    scenario = results.scenario
    start, end = (utc(at) for at in (scenario.start_ms, scenario.end_ms))
    return f"{start[:10]} to {end[:10]} ({scenario.days} days × {_gpus(results)} GPUs)"


def _gpus(results: Results) -> int:
    span_us = (results.scenario.end_ms - results.scenario.start_ms) * MS_PER_SECOND
    return results.capacity_gpu_us // span_us


def _mark(holds: bool) -> str:
    return "[green]✓[/green]" if holds else "[bold red]✗[/bold red]"


def _nearer(before: float, after: float, entitled: float) -> Text:
    """The new share, green where it came nearer to what the team is entitled to."""
    nearer = abs(after - entitled) < abs(before - entitled)
    return Text(formats.percent(after), "green" if nearer else "")


def _rest(results: Results) -> Decimal | None:
    """What nobody's team pays: the total less what is listed."""
    if results.total_cost is None:
        return None
    listed = [team.cost for team in results.teams] + [results.unallocated_cost]
    return results.total_cost - sum((cost for cost in listed if cost is not None), Decimal(0))
