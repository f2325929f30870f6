"""What the first page shows beside the present: the last 24 hours and 30 days by account, what changed, the cost of
each day and the budgets with their forecasts, and who holds each GPU."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from typing import Final
from xml.etree import ElementTree as ET

from accountant.billing.budget_forecast import states
from accountant.billing.displayed_costs import displayed_costs
from accountant.core import periods
from accountant.core.claim_overlap import Span
from accountant.core.periods import Month
from accountant.ledger.protocols import Moment, policy_at
from accountant.ledger.usage import ACCOUNTS, HELD, added
from accountant.prices.price_book import PriceBook
from accountant.reports import figure_formatting
from accountant.reports.charts import ChartSeries, ranked, shade_weekends
from accountant.reports.week_parts import is_weekend
from accountant.wire.list_order import PageTables
from accountant.wire.policy_models import IDLE
from accountant.wire.usage_cost_and_job_models import Accounts, BudgetState
from gputally.base.money import exact_sum
from gputally.base.units import BUCKET_MS, MS_PER_DAY
from gputally.server.page_layout import drawn, rect, root, text

DAYS: Final = 30
MOST_NODES: Final = 64
MOST_GPUS: Final = 32
"""The GPUs of one node that are drawn."""
_LEAST_STRIPE: Final = 0.1
"""A part of a GPU's time that is less has no stripe."""
MOST_CHANGES: Final = 10
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 1040, 190, 70, 8, 12, 26


TABLES: Final = PageTables(
    {
        "nodes": {
            "node": lambda row: (row.cluster, row.node), "gpus": lambda row: row.gpus, "held": lambda row: row.held,
        },
        "changes": {
            "team": lambda row: row.team, "before": lambda row: row.before_us, "last": lambda row: row.gpu_us,
            "change": lambda row: row.gpu_us - row.before_us,
        },
        "budgets": {
            "name": lambda row: row.name, "of": figure_formatting.budget_of, "unit": lambda row: row.unit,
            "limit": lambda row: row.limit, "spent": lambda row: row.spent, "part": lambda row: row.ratio,
            "forecast": lambda row: row.forecast, "low": lambda row: row.forecast_low,
        },
        "teams": {
            "team": lambda row: row.team, "allocated": lambda row: row.allocated_us, "share": lambda row: row.share,
            "utilisation": lambda row: row.utilisation, "cost": lambda row: (row.cost, row.allocated_us),
        },
        "waiting": {
            "queue": lambda row: row.queue, "team": lambda row: row.team, "pods": lambda row: row.pods,
            "gpus": lambda row: row.gpus, "longest": lambda row: row.longest_ms,
        },
        "asks": {
            "queue": lambda row: row.queue, "asks": lambda row: row.asks, "holds": lambda row: row.holds,
            "waits": lambda row: max(row.asks - row.holds, 0), "as_of": lambda row: row.cycle.at_ms,
        },
        "holders": {
            "job": lambda row: (row.job, row.namespace), "team": lambda row: row.team,
            "gpu_model": lambda row: row.gpu_model, "gpus": lambda row: row.gpus,
            "utilisation": lambda row: row.utilisation,
        },
    },
    frozenset({"node", "team", "name", "of", "unit", "queue", "job", "gpu_model"}),
)  # fmt: skip
"""The tables of the page that can be sorted."""


@dataclass(frozen=True, slots=True)
class TeamChange:
    """The time that a team held in the last 24 hours, and in the 24 hours before, in GPU-µs."""

    team: str
    gpu_us: int
    before_us: int


@dataclass(frozen=True, slots=True)
class DayCost:
    """The cost of the time held on a local day; None if some of it has no price, or nothing is known of the day. last:
    the day is not over."""

    day: date
    cost: Decimal | None
    last: bool


@dataclass(frozen=True, slots=True)
class GpuCell:
    """A GPU and the classes of its colours: of the teams that hold it, or of the account that its time is in. text: the
    same in words."""

    gpu: str
    colours: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True)
class NodeCells:
    """The GPUs of a node. teams: the GPUs that each team holds, the most first. unknown: GPUs that nobody metered, of
    which nobody knows who holds them. more: GPUs that are not drawn."""

    cluster: str
    node: str
    gpus: int
    held: float
    unknown: float
    teams: tuple[tuple[str, float], ...]
    cells: tuple[GpuCell, ...]
    more: int


@dataclass(frozen=True, slots=True)
class Home:
    """day, month: the accounts of the last 24 hours and of the last 30 local days, today among them.
    changes: the teams whose time changed most against the 24 hours before; None if nothing is known of one of the two.
    costs: by day; None without a price book.
    nodes: the first MOST_NODES nodes, and more_nodes of those left out.
    unknown: all nodes with unknown GPUs, the most first."""

    end_ms: int
    day: Accounts
    month: Accounts
    changes: tuple[TeamChange, ...] | None
    costs: tuple[DayCost, ...] | None
    currency: str | None
    budgets: tuple[BudgetState, ...]
    series: tuple[ChartSeries, ...]
    nodes: tuple[NodeCells, ...]
    more_nodes: int
    unknown: tuple[NodeCells, ...]


def span_of(at_ms: int, timezone: str) -> Span:
    """The 30 local days that end with an instant."""
    tz = periods.zone(timezone)
    first = periods.local_date(at_ms - 1, tz) - timedelta(days=DAYS - 1)
    return periods.day_span(first, tz)[0], at_ms


def figures(ledger: Moment, book: PriceBook | None, at_ms: int, now: Span, timezone: str) -> Home:
    """The figures up to `at_ms`, on a whole quarter-hour or, in a lake, hour. now: the newest metered span. The moment
    must have been opened for `span_of`."""
    since_ms, _ = span_of(at_ms, timezone)
    yesterday_ms, day_before_ms = at_ms - MS_PER_DAY, at_ms - 2 * MS_PER_DAY
    edges = (since_ms, day_before_ms, yesterday_ms, at_ms)
    of_teams = ledger.usage(edges, ("team",), None, timezone)
    parts = [of_teams.lines(span) for span in range(len(edges) - 1)]
    before, last = (
        {line.key["team"]: line.accounts_gpu_us.allocated for line in part if line.key["team"] != IDLE}
        for part in parts[1:]
    )
    changes = [
        TeamChange(team, last.get(team, 0), before.get(team, 0))
        for team in before.keys() | last.keys()
        if last.get(team, 0) != before.get(team, 0)
    ]
    changes.sort(key=lambda one: (-abs(one.gpu_us - one.before_us), one.team))
    day_before, day = (added(line.accounts_gpu_us for line in part) for part in parts[1:])
    # A day of which records begin in the midst is not compared with a whole one.
    both = day_before.is_known and day.is_known and ledger.status().extent[0] <= day_before_ms
    version = policy_at(ledger.status(), at_ms - 1)
    month = Month.of(at_ms - 1, periods.zone(timezone))
    series, nodes = _cells(ledger, now, timezone)
    return Home(
        end_ms=at_ms,
        day=day,
        month=added(line.accounts_gpu_us for part in parts for line in part),
        changes=tuple(changes[:MOST_CHANGES]) if both else None,
        costs=_costs(ledger, book, (since_ms, at_ms), timezone) if book is not None else None,
        currency=book.currency if book is not None else None,
        budgets=() if version is None else tuple(states(ledger, book, version.policy, month, at_ms, timezone)),
        series=series,
        nodes=tuple(nodes[:MOST_NODES]),
        more_nodes=max(0, len(nodes) - MOST_NODES),
        unknown=tuple(sorted((node for node in nodes if node.unknown), key=lambda node: -node.unknown)),
    )


def _costs(ledger: Moment, book: PriceBook, span: Span, timezone: str) -> tuple[DayCost, ...]:
    """The cost of what teams held on each day from the first record to the newest, in the amounts that pages show."""
    tz = periods.zone(timezone)
    of_day: dict[str, Decimal | None] = {}
    for (day, team), amount in displayed_costs(ledger, book, *span, ("day", "team"), None, timezone).known.items():
        if team != IDLE:
            so_far = of_day.get(day, Decimal(0))
            of_day[day] = None if so_far is None or amount is None else exact_sum([so_far, amount])
    by_day = ledger.usage(span, ("day",), None, timezone).lines()
    known = {line.key["day"] for line in by_day if line.accounts_gpu_us.is_known}
    first_ms, newest_ms = ledger.status().extent
    return tuple(
        DayCost(
            date,
            of_day.get(date.isoformat(), Decimal(0)) if date.isoformat() in known else None,
            end < periods.day_span(date, tz)[1],
        )
        for date, begin, end in periods.days(*span, tz)
        if end > first_ms and begin < newest_ms
    )


def _cells(ledger: Moment, now: Span, timezone: str) -> tuple[tuple[ChartSeries, ...], list[NodeCells]]:
    """The colours of the teams, and the nodes, by cluster and name."""
    by_node: dict[tuple[str, str], dict[str, list[tuple[str, Accounts]]]] = defaultdict(lambda: defaultdict(list))
    sums: dict[str, int] = {}
    for line in ledger.usage(now, ("cluster", "node", "gpu", "team"), None, timezone).lines():
        key, accounts = line.key, line.accounts_gpu_us
        by_node[key["cluster"], key["node"]][key["gpu"]].append((key["team"], accounts))
        if accounts.allocated:
            sums[key["team"]] = sums.get(key["team"], 0) + accounts.allocated
    series = ranked(sums, ledger.status().teams)
    colour = {team: one.css for one in series for team in one.teams}
    gpu_us = (now[1] - now[0]) * 1000
    nodes = []
    for (cluster, node), gpus in sorted(by_node.items()):
        teams: dict[str, int] = {}
        for of_gpu in gpus.values():
            for team, accounts in of_gpu:
                if accounts.allocated:
                    teams[team] = teams.get(team, 0) + accounts.allocated
        nodes.append(
            NodeCells(
                cluster=cluster,
                node=node,
                gpus=len(gpus),
                held=sum(teams.values()) / gpu_us,
                unknown=sum(accounts.unmetered for of_gpu in gpus.values() for _, accounts in of_gpu) / gpu_us,
                teams=tuple(
                    (team, teams[team] / gpu_us) for team in sorted(teams, key=lambda team: (-teams[team], team))
                ),
                cells=tuple(_cell(gpu, of_gpu, colour) for gpu, of_gpu in sorted(gpus.items())[:MOST_GPUS]),
                more=max(0, len(gpus) - MOST_GPUS),
            )
        )
    return series, nodes


def _cell(gpu: str, of_gpu: list[tuple[str, Accounts]], colour: dict[str, str]) -> GpuCell:
    """The colours of the teams that held the GPU, and of what else it was, of each if it was so for a tenth of the time
    or more."""
    whole = added(accounts for _, accounts in of_gpu)
    parts = [(team, colour[team], figure_formatting.name(team), accounts.allocated)
             for team, accounts in of_gpu if accounts.allocated]  # fmt: skip
    parts.sort(key=lambda part: (part[1], part[0]))
    parts += [("", f"a-{name}", figure_formatting.ACCOUNT_NAMES[name].lower(), getattr(whole, name))
              for name in ACCOUNTS if name not in HELD]  # fmt: skip
    least = whole.total * _LEAST_STRIPE
    shown = [part for part in parts if part[3] and part[3] >= least] or [max(parts, key=lambda part: part[3])]
    return GpuCell(gpu, tuple(css for _, css, _, _ in shown), ", ".join(text for _, _, text, _ in shown))


def cost_svg(days: tuple[DayCost, ...], currency: str, title: str) -> str:
    """A column for each day. A day of unknown cost has none; today's column is pale, because the day is not over."""
    most = max((float(one.cost) for one in days if one.cost is not None), default=0.0) or 1.0
    described = "; ".join(f"{one.day:%-d %b} {figure_formatting.money(one.cost, currency)}" for one in days)
    svg = root("costs", _WIDTH, _HEIGHT, title, described)
    plot, bottom = _HEIGHT - _TOP - _BOTTOM, _HEIGHT - _BOTTOM
    for share in (0.5, 1.0):
        text(svg, "tick", 0, bottom - plot * share + 4, figure_formatting.large_money(Decimal(most * share), currency))
    pitch = (_WIDTH - _LEFT - _RIGHT) / max(1, len(days))
    shade_weekends(svg, [is_weekend(one.day) for one in days], _LEFT, pitch, _TOP, plot)
    for number, one in enumerate(days):
        x, group = _LEFT + pitch * number, ET.SubElement(svg, "g")
        said = figure_formatting.money(one.cost, currency) if one.cost is not None else "unknown"
        ET.SubElement(group, "title").text = f"{one.day:%-d %b}: {said}{', so far' if one.last else ''}"
        if one.cost is not None:
            tall = plot * float(one.cost) / most
            rect(group, "a-unallocated" if one.last else "a-busy", x + pitch * 0.1, bottom - tall, pitch * 0.8, tall)
        if number % 5 == 0:
            text(svg, "tick mid", x + pitch / 2, _HEIGHT - 8, f"{one.day:%-d %b}")
    return drawn(svg)


def whole_quarter(at_ms: int) -> int:
    """The last whole quarter-hour, so that the answers of one quarter are equal and read few single records."""
    return at_ms - at_ms % BUCKET_MS
