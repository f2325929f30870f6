"""Runs the commands of `fleet`: clusters, view, usage, cost, windows, report and serve, for several clusters, from the
lake to which they publish."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer
from typer import Argument, Option

from accountant.cli.connection_options import End, Grouping, Printed, Timezone, filters, write_file
from accountant.cli.usage_commands import print_lines
from accountant.exports.format_names import Format
from accountant.exports.protocol import default_format, exports, file_name
from accountant.lake.engines.protocol import SEAM, EnginePlugin
from gputally.base import instants
from gputally.base.clock import SystemClock
from gputally.base.command_options import refuse_ignored, with_option_groups
from gputally.base.command_output import show
from gputally.base.errors import CannotStart
from gputally.base.plugins import preferred, usable
from gputally.base.units import MS_PER_HOUR

if TYPE_CHECKING:
    from rich.table import Table

    from accountant.core.settings import Lake
    from accountant.fleet.fleet_ledgers import Fleet, FleetMonth, FleetQuery, ProgressCallback
    from accountant.wire.usage_cost_and_job_models import Dimension

app = typer.Typer(add_completion=False, rich_markup_mode=None)
fleet_app = typer.Typer(help="Usage, cost and reports of several clusters, from their lake.", no_args_is_help=True)
app.add_typer(fleet_app, name="fleet")
_ENGINES: Final = usable(SEAM, EnginePlugin)
_ENGINE: Final = preferred(_ENGINES, "duckdb")
_FORMAT: Final = default_format("html")
_URLS = ", ".join(engine.urls for engine in _ENGINES.values() if engine.urls)
LakePlace = Annotated[
    str,
    Option("--lake", envvar="GPUTALLY_LAKE", help="Settings file of the lake (YAML), or the folder of its warehouse."),
]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The options that choose the engine which runs a command's queries."""

    # No choice, because whoever names an engine that cannot be used is told why.
    engine: Annotated[
        str,
        Option(
            "--engine", metavar=f"[{'|'.join(_ENGINES)}]", autocompletion=lambda: list(_ENGINES),
            help="The engine that runs the queries.",
        ),
    ] = _ENGINE  # fmt: skip
    engine_url: Annotated[
        str,
        Option("--engine-url", envvar="GPUTALLY_ENGINE_URL", help=f"URL of the engine: {_URLS}."),
    ] = ""

    @contextlib.contextmanager
    def opened(self, lake: str | Lake, rates: Path | None = None) -> Iterator[Fleet]:
        """The ledgers of a lake, until the context ends. lake: settings, or the place of the settings or the lake."""
        # Imported here, because the import takes half a second, which other commands do not need.
        from accountant.fleet.fleet_ledgers import Fleet, Rates, load_lake
        from accountant.lake.engines.guard import open_engine
        from gputally.server import config_loading

        running = open_engine(self.engine, load_lake(lake) if isinstance(lake, str) else lake, self.engine_url)
        try:
            yield Fleet(running, config_loading.load_yaml(rates, Rates) if rates is not None else None)
        finally:
            running.close()


Clusters = Annotated[list[str] | None, Option("--cluster", help="Only this ledger (repeatable; default: all).")]
RatesFile = Annotated[Path | None, Option("--rates", help="File with exchange rates (YAML: to, rates).")]


@fleet_app.command()
@with_option_groups
def clusters(lake: LakePlace, output: Printed = "table", *, engine: EngineOptions) -> None:
    """List the ledgers that publish to the lake, and how recent their data is."""
    from accountant.core.periods import utc
    from gputally.base.number_format import NOTHING
    from gputally.base.terminal import table

    with engine.opened(lake) as fleet:
        members = fleet.members()
        statuses = [member.status for member in members]

    def drawn() -> Table:
        columns = ["ledger", "clusters", "time zone", "first record", "newest record", "published until"]
        rows = []
        for status in statuses:
            instants = (
                utc(at_ms) if at_ms else NOTHING for at_ms in (status.first_ms, status.newest_ms, status.until_ms)
            )
            rows.append((status.ledger, ", ".join(sorted(status.clusters)), status.timezone, *instants))
        return table("Ledgers of the lake", columns, rows)

    records = [
        {
            **asdict(member.status), "clusters": dict(member.status.clusters), "teams": sorted(member.status.teams),
            "fault": member.fault,
        }
        for member in members
    ]  # fmt: skip
    show(output, drawn, records)
    _name_left_out([member.fault for member in members if member.fault])


@fleet_app.command()
def retire(
    lake: LakePlace,
    ledger: Annotated[str, Argument(help="Name of the ledger, as `fleet clusters` shows it.")],
    yes: Annotated[bool, Option("--yes", help="Do not ask.")] = False,
    output: Printed = "table",
) -> None:
    """Remove a ledger's tables from the lake, with its closed months. Stop its accountant first, or publish it under
    another name. The ledger itself stays as it is."""
    from accountant.fleet.fleet_ledgers import load_lake
    from accountant.lake.iceberg_catalog import Catalogue
    from gputally.base.terminal import table

    if not yes:
        typer.confirm(f"Remove all tables of the ledger {ledger} from the lake?", abort=True)
    catalogue = Catalogue.connect(load_lake(lake).model_copy(update={"ledger": ledger}))
    with closing(catalogue):
        removed = catalogue.retire()
    show(
        output, lambda: table("Removed from the lake", ["ledger", "tables"], [(ledger, str(removed))]),
        [{"ledger": ledger, "tables": removed}],
    )  # fmt: skip


@fleet_app.command()
def view(
    lake: LakePlace,
    table: Annotated[str, Argument(help="Table of the lake: usage_hourly, statement_lines, days, …")] = "usage_hourly",
    dialect: Annotated[str, Option(help="SQL dialect, by its name in SQLGlot.")] = "duckdb",
    catalog: Annotated[str, Option(help="Name of the lake's catalog in the engine.")] = "lake",
) -> None:
    """Print a query in which a table of all ledgers is one relation. Print it again after a ledger was added, renamed
    or removed."""
    from sqlglot import Dialects

    from accountant.fleet.fleet_ledgers import Fleet, load_lake
    from accountant.lake.engines.guard import open_engine
    from accountant.lake.iceberg_catalog import Catalogue
    from accountant.lake.tables import TABLES
    from accountant.lake.union_view import union_of_ledgers

    known, dialects = {one.name: one for one in TABLES}, sorted(one.value for one in Dialects if one.value)
    if table not in known:
        raise typer.BadParameter(f"there is no table {table!r}: choose from {', '.join(known)}", param_hint="TABLE")
    if dialect not in dialects:
        raise typer.BadParameter(f"there is no dialect {dialect!r}: choose from {', '.join(dialects)}")
    found = load_lake(lake)
    with closing(Catalogue.connect(found)) as catalogue, closing(open_engine("duckdb", found)) as engine:
        left_out, namespaces = [], []
        for one in Fleet(engine).statuses().values():
            if one.fault:
                left_out.append(one.fault)
            elif catalogue.has(known[table], one.namespace):
                namespaces.append(one.namespace)
            else:
                left_out.append(f"{one.ledger}: version {one.version or 'unknown'} published no table {table}")
        typer.echo(union_of_ledgers(catalogue, namespaces, known[table], dialect, catalog))
    _name_left_out(left_out)


@fleet_app.command()
@with_option_groups
def usage(
    lake: LakePlace,
    cluster: Clusters = None,
    timezone: Timezone = None,
    output: Printed = "table",
    *,
    wanted: Grouping,
    engine: EngineOptions,
) -> None:
    """Show GPU-hours by account and group, added up over the clusters."""
    from accountant.cli import grouped_lines, terminal_tables
    from accountant.core import periods

    zone = timezone or "UTC"
    query, order = _query(wanted, zone), grouped_lines.usage_order(wanted)
    with engine.opened(lake) as fleet, _progress() as progress:
        found = fleet.usage(fleet.members(cluster or ()), query, progress)
    lines, tz = grouped_lines.usage_lines(found, wanted, order), periods.zone(zone)
    print_lines(output, lines, wanted.limit, lambda usage, most: terminal_tables.usage_table(usage, tz, most))


@fleet_app.command()
@with_option_groups
def cost(
    lake: LakePlace,
    cluster: Clusters = None,
    rates: RatesFile = None,
    timezone: Timezone = None,
    output: Printed = "table",
    *,
    wanted: Grouping,
    engine: EngineOptions,
) -> None:
    """Show the exact cost by group, with each cluster's own prices."""
    from accountant.cli import grouped_lines, terminal_tables
    from accountant.core import periods

    zone = timezone or "UTC"
    query, order = _query(wanted, zone), grouped_lines.cost_order(wanted)
    with engine.opened(lake, rates) as fleet, _progress() as progress:
        found = fleet.cost(fleet.members(cluster or ()), query, progress)
    lines, tz = grouped_lines.cost_lines(found, wanted, order), periods.zone(zone)
    print_lines(output, lines, wanted.limit, lambda cost, most: terminal_tables.cost_table(cost, tz, most))


@fleet_app.command()
@with_option_groups
def windows(
    lake: LakePlace,
    size: Annotated[str, Option(help="Length of the window: 7d, 12h.")] = "7d",
    half_life: Annotated[str | None, Option(help="Age at which usage counts half: 1d (default: no decay).")] = None,
    measure: Annotated[Literal["allocated", "busy"], Option(help="Measure that is added up.")] = "allocated",
    end: End = None,
    cluster: Clusters = None,
    output: Printed = "table",
    *,
    engine: EngineOptions,
) -> None:
    """Show the usage of each queue in a window, added up over the clusters. Without --end the window ends with the last
    full hour that every cluster has published."""
    from pydantic import ValidationError

    from accountant.cli import terminal_tables
    from accountant.core import periods
    from accountant.wire.policy_models import UNASSIGNED, WindowSpec
    from gputally.server.config_loading import fault_text

    try:
        spec = WindowSpec.model_validate({"size": size, "half_life": half_life})
    except ValidationError as error:
        raise typer.BadParameter(fault_text(error.errors()[0])) from error
    with engine.opened(lake) as fleet, _progress() as progress:
        members = fleet.members(cluster or ())
        if not members:
            raise CannotStart(
                "no ledger has published to this lake yet: set lake.warehouse in the settings of an accountant"
            )
        published_ms = min(member.clock.wall_ms() for member in members)
        at_ms = published_ms - published_ms % MS_PER_HOUR
        if end is not None:
            at_ms = instants.parse_edge(end, periods.zone("UTC"), at_ms)
        found = fleet.window(members, spec, at_ms, measure, progress)
    rows = [
        {"queue": queue, "usage": used, "unit": found.unit}
        for queue, used in [*found.usage.items(), (UNASSIGNED, found.unassigned)]
    ]
    show(output, lambda: terminal_tables.window_table(found), found.model_dump(mode="json"), rows)


@fleet_app.command()
@with_option_groups
def report(
    month: Annotated[str, Argument(help="A calendar month: 2026-10.")],
    lake: LakePlace,
    cluster: Clusters = None,
    team: Annotated[str | None, Option(help="With --to: reports of this team only.")] = None,
    rates: RatesFile = None,
    output: Printed = "table",
    to: Annotated[Path | None, Option(help="Folder into which the report of each cluster is written.")] = None,
    format: Annotated[Format, Option(help="With --to: file format of these reports.")] = _FORMAT,
    *,
    engine: EngineOptions,
) -> None:
    """Show what a month cost in every cluster: a summary, the lines of all statements (CSV), and each cluster's
    report."""
    from accountant.core.periods import Month
    from accountant.core.settings import InvoiceIssuer
    from gputally.base.terminal import Terminal

    calendar_month = Month.parse(month)
    if to is None:
        refuse_ignored("without --to", "format", "team")
    else:
        try:
            to.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CannotStart(f"{to}: the folder of --to cannot be made: {error.strerror}") from error
    from accountant.exports import rendering_process
    from accountant.fleet.fleet_ledgers import refuse_left_out, statement_lines

    with engine.opened(lake, rates) as fleet:
        members = fleet.members(cluster or ())
        with _progress() as progress:
            summary, stated = fleet.month(members, calendar_month, progress)
        if output == "csv":  # a table of amounts has no place to name what it lacks
            refuse_left_out(summary.left_out.values())
        written = []
        for member in members if to is not None else ():
            if member.name in summary.left_out:
                continue
            export = exports()[format]
            body = rendering_process.render(
                format, member.report(calendar_month, team, InvoiceIssuer() if export.charges else None)
            )
            assert to is not None
            file = to / file_name(export.suffix, month, member.name, team)
            write_file(file, body)
            written.append(f"{file}  {len(body):,} bytes")
    show(output, lambda: month_table(summary), summary.model_dump(mode="json"), statement_lines(stated))
    for line in written:
        Terminal(stderr=True).print(line)
    _name_left_out([*summary.left_out.values()])


@fleet_app.command()
@with_option_groups
def serve(
    config: Annotated[
        Path | None,
        Option(help="Settings file (YAML) with lake, listen, auth, callers, limits."),
    ] = None,
    lake: Annotated[
        str | None,
        Option(
            "--lake", envvar="GPUTALLY_LAKE", help="Settings file of the lake (YAML), or the folder of its warehouse."
        ),
    ] = None,
    rates: RatesFile = None,
    listen: Annotated[str | None, Option(metavar="HOST:PORT", help="Address to serve on.")] = None,
    auth: Annotated[str | None, Option(metavar="tokens|off", help="Whether requests need a token.")] = None,
    tokens: Annotated[Path | None, Option(help="Token file.")] = None,
    callers: Annotated[Path | None, Option(help="Callers file: issuers and grants of people who sign in.")] = None,
    *,
    engine: EngineOptions,
) -> None:
    """Serve the read-only pages and API of every cluster, and of all together, until SIGTERM or Ctrl-C."""
    from accountant.core.settings import load
    from accountant.fleet.fleet_ledgers import load_lake
    from accountant.fleet.fleet_server import FleetService, run
    from gputally.server import logs_and_metrics

    flags = {"listen": listen, "auth": auth, "tokens": tokens, "callers": callers}
    settings = load(config, os.environ, {name: value for name, value in flags.items() if value is not None})
    lake_settings = load_lake(lake) if lake is not None else settings.lake
    if lake_settings is None:
        raise CannotStart("no lake is given: give --lake, or set `lake` in the file of --config")
    logs_and_metrics.configure(settings.log_level)
    with engine.opened(lake_settings, rates) as fleet:
        run(FleetService(settings, fleet, SystemClock()))


def month_table(summary: FleetMonth) -> Table:
    """A table of one month: every ledger, the highest amount first, then what each team owes in all ledgers."""
    from accountant.cli.grouped_lines import NAMES
    from accountant.reports.figure_formatting import money
    from gputally.base.money import exact_sum
    from gputally.base.number_format import NOTHING, hours
    from gputally.base.terminal import figures, table

    month_rows = table(
        f"The fleet in {summary.month}",
        ["ledger", "month",
         *figures("GPU-hours", "busy", "idle", "unallocated", "unmetered", "due", "unpriced GPU-hours")],
        (
            (
                entry.ledger,
                entry.status,
                *(hours(us) for us in (entry.accounts_gpu_us.total, entry.accounts_gpu_us.busy,
                                       entry.accounts_gpu_us.allocated_idle, entry.accounts_gpu_us.unallocated,
                                       entry.accounts_gpu_us.unmetered)),
                money(entry.due, entry.currency),
                hours(entry.unpriced_gpu_us) if entry.unpriced_gpu_us else "",
            )
            for entry in sorted(summary.ledgers, key=lambda row: (-(row.due or 0), row.ledger))
        ),
    )  # fmt: skip
    month_rows.add_section()
    rows_of_team = {row.team: [entry for entry in summary.teams if entry.team == row.team] for row in summary.teams}
    for team, rows in sorted(rows_of_team.items()):
        due = ", ".join(
            money(
                exact_sum(entry.due for entry in rows if entry.currency == currency and entry.due is not None), currency
            )
            for currency in sorted({entry.currency for entry in rows if entry.currency and entry.due is not None})
        )
        held_us = sum(entry.gpu_us for entry in rows)
        month_rows.add_row(NAMES.get(team, team), f"{len(rows)} ledgers", hours(held_us), *[""] * 4, due, "")
    totals = ", ".join(money(due, currency) for currency, due in summary.totals.items())
    converted = f"; together {money(summary.converted, summary.converted_to)}" if summary.converted is not None else ""
    beside = ", ".join(money(amount, currency) for currency, amount in summary.not_billed.items())
    month_rows.caption = (
        f"due: {totals or NOTHING}{converted}{f'; not held, billed to no team: {beside}' if beside else ''}"
    )
    return month_rows


def _name_left_out(reasons: Sequence[str]) -> None:
    """Names the ledgers that could not be read, on standard error."""
    from gputally.base.terminal import Terminal

    for reason in reasons:
        Terminal(stderr=True).print(f"not included: {reason}")


@contextlib.contextmanager
def _progress() -> Iterator[ProgressCallback]:
    """A progress bar on standard error, if that is a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from gputally.base.terminal import Terminal

    console = Terminal(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("clusters", total=None)
        yield lambda name, done, total: bar.update(task, description=name, completed=done, total=total)


def _query(wanted: Grouping, timezone: str) -> FleetQuery:
    """The query of the options. The end defaults to now, the start to the beginning of the end's month."""
    from accountant.core import periods
    from accountant.core.periods import Month, utc
    from accountant.fleet.fleet_ledgers import FleetQuery

    zone = periods.zone(timezone)
    now_ms = SystemClock().wall_ms()
    end_ms = now_ms if wanted.end is None else instants.parse_edge(wanted.end, zone, now_ms)
    month_ms = Month.of(end_ms - 1, zone).span(zone)[0]
    start_ms = month_ms if wanted.start is None else instants.parse_edge(wanted.start, zone, end_ms)
    if end_ms <= start_ms:
        raise CannotStart(f"the span ends at or before its start: {utc(start_ms)} to {utc(end_ms)}")
    where = {_dimensions(name.removeprefix("where."))[0]: values for name, values in filters(wanted.where).items()}
    return FleetQuery(start_ms, end_ms, _dimensions(wanted.by), where, timezone)


def _dimensions(by: str) -> tuple[Dimension, ...]:
    from accountant.wire.usage_cost_and_job_models import known_dimension

    try:
        return tuple(known_dimension(part) for part in by.split(",") if part)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
