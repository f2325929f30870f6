"""What a run came to: the ledger's figures, each held against the simulated truth.

Collects and compares; how it is shown is `summary`'s. Every GPU figure is an integer of microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from accountant.wire import IDLE, UNASSIGNED, Accounts
from agent.units import US_PER_MS
from fairshare.simulator.metrics import entitlement, feasible_demand
from gputally.demo.cluster import parts
from gputally.demo.letters import LedgerFigures
from gputally.demo.pipeline import Pipeline
from gputally.demo.scenario import Scenario
from gputally.demo.truth import ACCOUNTS, HELD, Books


@dataclass(frozen=True, slots=True)
class TeamResult:
    """share_before, share_after: of all GPU time that teams held, under static and time-based weights.
    entitled: the share it should have had, by weight and by what its jobs could have used."""

    name: str
    accounts: Accounts
    cost: Decimal | None
    weight: float
    share_before: float
    share_after: float
    entitled: float


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold, and whether it does."""

    name: str
    holds: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Results:
    """See the fields of summary.json in `as_json`."""

    scenario: Scenario
    capacity_gpu_us: int
    accounts: Accounts
    teams: tuple[TeamResult, ...]
    unassigned: Accounts
    currency: str
    total_cost: Decimal | None
    unallocated_cost: Decimal | None
    coverage: float
    sent: int
    stored: int
    duplicates: int
    quarantined: int
    cycles: int
    holds: int
    weights_published: int
    acks_lost: int
    started: int
    rejected: int
    evictions: int
    checks: tuple[Check, ...]
    wall_seconds: float

    @property
    def ok(self) -> bool:
        return all(check.holds for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """summary.json: money as decimal text, GPU time as integers of microseconds."""
        scenario = self.scenario
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
            "accounts_gpu_us": self.accounts.model_dump(),
            "currency": self.currency,
            "cost": _text(self.total_cost),
            "teams": {
                team.name: {
                    "gpu_us": team.accounts.allocated,
                    "busy_gpu_us": team.accounts.busy,
                    "cost": _text(team.cost),
                    "currency": self.currency,
                    "share_before": round(team.share_before, 6),
                    "share_after": round(team.share_after, 6),
                    "share_entitled": round(team.entitled, 6),
                }
                for team in self.teams
            },
            "unassigned_gpu_us": self.unassigned.allocated,
            "coverage": round(self.coverage, 6),
            "intervals": {
                "sent": self.sent,
                "stored": self.stored,
                "duplicates_dropped": self.duplicates,
                "quarantined": self.quarantined,
            },
            "controller": {
                "cycles": self.cycles,
                "holds": self.holds,
                "weights_published": self.weights_published,
            },
            "jobs": {"started": self.started, "rejected": self.rejected, "reclaimed": self.evictions},
            "checks": {check.name: check.holds for check in self.checks},
            "wall_seconds": round(self.wall_seconds, 1),
        }


def collect(pipeline: Pipeline, books: LedgerFigures, before: Books, wall_seconds: float) -> Results:
    """Compare what the ledger says with what really happened, and with what static weights had made of it."""
    scenario = pipeline.scenario
    outcomes = pipeline.engine.outcomes.values()
    capacity = sum(len(node.gpus) for node in scenario.nodes) * (scenario.end_ms - scenario.start_ms) * US_PER_MS
    return Results(
        scenario=scenario,
        capacity_gpu_us=capacity,
        accounts=books.accounts,
        teams=_teams(pipeline, before, books.by_team, books.costs),
        unassigned=books.by_team.get(UNASSIGNED, Accounts()),
        currency=books.currency,
        total_cost=books.total,
        unallocated_cost=books.costs.get(IDLE),
        coverage=books.coverage,
        sent=pipeline.taken.closed + pipeline.resent,
        stored=books.rows["stored"],
        duplicates=books.rows["duplicate"],
        quarantined=books.rows["quarantined"],
        cycles=pipeline.tally.cycles,
        holds=pipeline.tally.holds,
        weights_published=pipeline.tally.weights_published,
        acks_lost=books.acks_lost,
        started=sum(outcome.first_start_ms is not None for outcome in outcomes),
        rejected=sum(outcome.rejected for outcome in outcomes),
        evictions=sum(outcome.evictions for outcome in outcomes),
        checks=_checks(pipeline, books, capacity),
        wall_seconds=wall_seconds,
    )


def _teams(
    pipeline: Pipeline,
    before: Books,
    by_team: Mapping[str, Accounts],
    costs: Mapping[str, Decimal | None],
) -> tuple[TeamResult, ...]:
    scenario = pipeline.scenario
    weights = {queue.name: queue.weight for queue in scenario.policy.queues}
    static = {name: before.held_us(name) for name in weights}
    after = {name: by_team.get(name, Accounts()).allocated for name in weights}
    # What teams could have used is known to the simulation alone.
    demand = {
        name: max(amount * US_PER_MS, after[name])
        for name, amount in feasible_demand(
            pipeline.engine.outcomes.values(), scenario.start_ms, scenario.end_ms, parts()
        ).items()
        if name in weights
    }
    total = sum(after.values())
    entitled = entitlement(total, demand, weights)
    return tuple(
        TeamResult(
            name,
            by_team.get(name, Accounts()),
            costs.get(name, Decimal(0)),
            weights[name],
            static[name] / (sum(static.values()) or 1),
            after[name] / (total or 1),
            entitled[name] / (total or 1),
        )
        for name in sorted(weights)
    )


def _checks(pipeline: Pipeline, books: LedgerFigures, capacity: int) -> tuple[Check, ...]:
    accounts, by_team, rows = books.accounts, books.by_team, books.rows
    truth = pipeline.taken.books
    wrong = {
        name: getattr(accounts, name) - truth.totals[name]
        for name in ACCOUNTS
        if getattr(accounts, name) != truth.totals[name]
    }
    teams = {**truth.teams}
    known = {queue.name for queue in pipeline.scenario.policy.queues}
    nobody = dict.fromkeys(HELD, 0)
    for name in set(teams) - known:
        figures = teams.pop(name)
        nobody = {account: nobody[account] + figures[account] for account in HELD}
    teams[UNASSIGNED] = nobody
    astray = [
        name
        for name, figures in sorted(teams.items())
        if any(getattr(by_team.get(name, Accounts()), account) != figures[account] for account in HELD)
    ]
    closed, resent = pipeline.taken.closed, pipeline.resent
    return (
        Check("accounts_add_up_to_capacity", accounts.total == capacity, f"{accounts.total - capacity:+,} µs"),
        Check("ledger_equals_truth", not wrong, ", ".join(f"{k} {v:+,} µs" for k, v in wrong.items()) or "to the µs"),
        Check("teams_equal_truth", not astray, ", ".join(astray) or "to the µs"),
        Check("every_interval_stored_once", rows["stored"] == closed, f"{rows['stored']:,} of {closed:,}"),
        Check("duplicates_dropped", rows["duplicate"] == resent, f"{rows['duplicate']:,} of {resent:,} sent twice"),
        Check("nothing_quarantined", rows["quarantined"] == 0, f"{rows['quarantined']:,}"),
    )


def _text(amount: Decimal | None) -> str | None:
    return None if amount is None else str(amount)
