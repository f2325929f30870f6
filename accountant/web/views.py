"""What the pages show, computed from the ledger: frozen rows, sorted, with their totals.

Rendering (accountant.web.pages) adds nothing but form. No clock and no HTTP: the instant is an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from accountant.costs import ACCOUNTS, ALLOCATED, Account
from accountant.ledger import Ledger
from accountant.money import exact_sum
from accountant.periods import Month, zone
from accountant.prices import PriceBook
from accountant.reports.tables import AccountRow, share
from accountant.statements import statement
from accountant.wire import Accounts, UsageLine, WindowSpec
from agent.units import BUCKET_MS, MS_PER_DAY, US_PER_MS

TRUSTED = 0.98
"""Coverage from which on a span counts as known."""
MOST_HOLDERS = 40


@dataclass(frozen=True, slots=True)
class Holding:
    """A workload and the GPUs it holds on average over the span shown."""

    team: str
    namespace: str
    job: str
    gpu_model: str
    gpus: float
    utilisation: float | None


@dataclass(frozen=True, slots=True)
class Now:
    """The newest quarter of an hour that is metered: [start_ms, end_ms)."""

    start_ms: int
    end_ms: int
    accounts: tuple[AccountRow, ...]
    gpus: float
    holders: tuple[Holding, ...]
    held_gpus: float
    more_holders: int


@dataclass(frozen=True, slots=True)
class TeamSoFar:
    """A team's month so far. cost: payable, of what has a price; None without a price book."""

    team: str
    allocated_us: int
    utilisation: float | None
    share: float | None
    cost: Decimal | None
    unpriced_us: int


@dataclass(frozen=True, slots=True)
class MonthSoFar:
    """The running month. total: what the teams' lines add up to; None without a price book."""

    month: Month
    teams: tuple[TeamSoFar, ...]
    allocated_us: int
    utilisation: float | None
    total: Decimal | None
    currency: str | None
    unpriced_us: int
    coverage: float


@dataclass(frozen=True, slots=True)
class NodeCoverage:
    """One node's month so far. capacity without what was down."""

    node: str
    capacity_us: int
    unmetered_us: int
    down_us: int

    @property
    def coverage(self) -> float | None:
        return share(self.capacity_us - self.unmetered_us, self.capacity_us)


def now(ledger: Ledger, at_ms: int) -> Now:
    """The newest settled quarter of an hour; where little is metered, the last one there was."""
    window = ledger.window(WindowSpec(size=MS_PER_DAY // 1000), at_ms, "allocated", TRUSTED)
    end = window.watermark_ms if window.watermark_ms is not None else at_ms
    start = end - BUCKET_MS
    sums = _sum(ledger.usage(start, end, ()))
    holders = [
        Holding(
            line.key["team"], line.key["namespace"], line.key["job"], line.key["gpu_model"],
            line.accounts_gpu_us.allocated / (BUCKET_MS * US_PER_MS), utilisation(line.accounts_gpu_us),
        )
        for line in ledger.usage(start, end, ("team", "namespace", "job", "gpu_model"))
        if line.accounts_gpu_us.allocated
    ]  # fmt: skip
    holders.sort(key=lambda row: (-row.gpus, row.team, row.namespace, row.job, row.gpu_model))
    return Now(
        start_ms=start,
        end_ms=end,
        accounts=account_rows(sums),
        gpus=sums.total / (BUCKET_MS * US_PER_MS),
        holders=tuple(holders[:MOST_HOLDERS]),
        held_gpus=sums.allocated / (BUCKET_MS * US_PER_MS),
        more_holders=max(0, len(holders) - MOST_HOLDERS),
    )


def month_so_far(ledger: Ledger, book: PriceBook | None, at_ms: int, timezone: str) -> MonthSoFar:
    """Every team that held a GPU this month, the largest first; amounts as a statement of today would bill them."""
    month = Month.of(at_ms - 1, zone(timezone))
    stated = statement(ledger, book, month.span(zone(timezone))[0], at_ms, timezone)
    by_team: dict[str, dict[str, int]] = {}
    unpriced: dict[str, int] = {}
    for line in stated.lines:
        if line.account in ALLOCATED:
            sums = by_team.setdefault(line.team, {})
            sums[line.account] = sums.get(line.account, 0) + line.gpu_us
            unpriced[line.team] = unpriced.get(line.team, 0) + (line.gpu_us if line.cost is None else 0)
    accounts = {team: Accounts(**sums) for team, sums in by_team.items()}
    whole = Accounts(**{name: sum(getattr(one, name) for one in accounts.values()) for name in ALLOCATED})
    rows = [
        TeamSoFar(
            team=team,
            allocated_us=held.allocated,
            utilisation=utilisation(held),
            share=share(held.allocated, whole.allocated),
            cost=stated.payable.get(team, Decimal(0)) if book is not None else None,
            unpriced_us=unpriced[team],
        )
        for team, held in accounts.items()
    ]
    return MonthSoFar(
        month=month,
        teams=tuple(sorted(rows, key=lambda row: (-row.allocated_us, row.team))),
        allocated_us=whole.allocated,
        utilisation=utilisation(whole),
        total=exact_sum(row.cost for row in rows if row.cost is not None) if book is not None else None,
        currency=stated.currency,
        unpriced_us=sum(unpriced.values()),
        coverage=stated.coverage,
    )


def by_node(ledger: Ledger, start_ms: int, end_ms: int) -> tuple[NodeCoverage, ...]:
    """Nodes by how much of them nobody measured, worst first."""
    rows = [
        NodeCoverage(
            node=line.key["node"],
            capacity_us=line.accounts_gpu_us.total - line.accounts_gpu_us.down,
            unmetered_us=line.accounts_gpu_us.unmetered,
            down_us=line.accounts_gpu_us.down,
        )
        for line in ledger.usage(start_ms, end_ms, ("node",))
    ]
    return tuple(sorted(rows, key=lambda row: (-row.unmetered_us, row.node)))


def account_rows(accounts: Accounts) -> tuple[AccountRow, ...]:
    """All accounts in their order, with their share of the capacity; costs are not looked at here."""
    values: dict[Account, int] = {name: getattr(accounts, name) for name in ACCOUNTS}
    return tuple(AccountRow(name, gpu_us, share(gpu_us, accounts.total), Decimal(0)) for name, gpu_us in values.items())


def utilisation(accounts: Accounts) -> float | None:
    """Busy share of the allocated time whose use is known."""
    return share(accounts.busy, accounts.busy + accounts.allocated_idle)


def _sum(lines: Sequence[UsageLine]) -> Accounts:
    return Accounts(**{name: sum(getattr(line.accounts_gpu_us, name) for line in lines) for name in ACCOUNTS})
