"""What is said between the demo's processes: plain data, which loads next to nothing.

A part's own libraries (the accountant's server and engine, above all) are loaded where it lives, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

from fairshare.simulator.cluster import NodeSpec
from gputally.demo.faults import FaultPlan
from gputally.demo.truth import Books

if TYPE_CHECKING:
    from accountant.wire import Accounts

OFFICE = "gputally.demo.office:Office"
SITE = "gputally.demo.site:Site"
LEDGER_FILES = ("report.html", "statement.csv", "ledger.duckdb")
"""What an office writes."""


@dataclass(frozen=True, slots=True)
class Premises:
    """What an office is built from. folder: for the ledger; must be empty. port 0: any free one. log_file: where
    its warnings go; None: only what is worse, to the terminal."""

    nodes: tuple[NodeSpec, ...]
    teams: tuple[str, ...]
    folder: Path
    port: int
    start_ms: int
    log_file: Path | None


@dataclass(frozen=True, slots=True)
class LedgerFigures:
    """A span as the ledger has it, and the rows that came, by what became of them. costs: payable, by team; None where
    something has no price."""

    accounts: Accounts
    by_team: Mapping[str, Accounts]
    currency: str
    total: Decimal | None
    costs: Mapping[str, Decimal | None]
    coverage: float
    rows: Mapping[str, int]
    acks_lost: int


@dataclass(frozen=True, slots=True)
class Plot:
    """What a site is built from."""

    nodes: tuple[NodeSpec, ...]
    queues: frozenset[str]
    folder: Path
    url: str
    interval_s: int
    start_ms: int
    faults: FaultPlan
    seed: int
    scraped: bool = False
    """Whether the agents keep metrics, as they do where a Prometheus looks at them."""


@dataclass(frozen=True, slots=True)
class Stocktaking:
    """At the end: what really happened on the site, and how many intervals its agents closed."""

    books: Books
    closed: int
