"""The accountant of the simulated cluster, with its pages up, in a process of its own.

The accountant's service, ledger and server run unchanged. Made up are its clock, which goes from hour to hour as it is
told, its inventory, and the wire in front of it, which fails as planned. It keeps house when it is told to, so that a
run can be repeated; and it is asked once, at the end, what the ledger has to say.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from decimal import Decimal
from importlib.resources import as_file, files
from pathlib import Path

import structlog

from accountant.books.costs import cost
from accountant.money import Money
from accountant.reports import csv as csv_report
from accountant.reports import html as html_report
from accountant.reports.model import build
from accountant.service import Service
from accountant.serving import serve
from accountant.settings import Settings
from agent.clock import VirtualClock
from fairshare.simulator.events import OutageBegan, OutageEnded
from gputally.demo.inventory import SimulatedInventory
from gputally.demo.letters import LedgerFigures, Premises
from gputally.demo.wire import UnreliableWire

PRICE_BOOK = files("gputally.demo") / "data" / "price-book.yaml"
_A_WEEK_S = 7 * 86_400
"""Between checkpoints. One costs what the last of the file's row groups holds, however little is new."""

_LINGER_MS = 30
"""All agents deliver at once, on fewer cores than there are of them: one that comes late would cost a commit of its
own. The accountant waits no longer than until all are there."""


class Office:
    """An accountant that serves from construction to `close`."""

    def __init__(self, premises: Premises) -> None:
        """Raises what accountant.service.Service and serve raise where folder or port cannot be used."""
        _log_to(premises.log_file)
        self._clock = VirtualClock(premises.start_ms)
        self._inventory = SimulatedInventory(premises.nodes, premises.teams)
        with ExitStack() as opening:
            book = opening.enter_context(as_file(PRICE_BOOK))
            settings = Settings(
                data=premises.folder,
                listen=f"127.0.0.1:{premises.port}",
                auth="off",
                prices=book,
                linger_ms=_LINGER_MS,
                checkpoint_seconds=_A_WEEK_S,
                refresh_seconds=3_600,
            )
            self._service = opening.enter_context(Service(settings, self._clock, self._inventory))
            self._wire = UnreliableWire(self._service.app)
            self._url = opening.enter_context(serve(self._wire, settings.host, settings.port))
            self._open = opening.pop_all()

    def url(self) -> str:
        """Where it serves."""
        return self._url

    def hour(
        self, now_ms: int, outages: Sequence[OutageBegan | OutageEnded], away: bool, keep_house: bool = False
    ) -> None:
        """It is `now_ms`; these nodes went or came meanwhile. away: nobody answers until the next hour. keep_house:
        do what is due first."""
        if keep_house:
            self.maintain()
        self._clock.advance_to(now_ms)
        for event in outages:
            if isinstance(event, OutageBegan):
                self._inventory.node_down(event.outage.name, event.at_ms, event.outage.reason)
            else:
                self._inventory.node_up(event.outage.name, event.at_ms)
        self._wire.away = away

    def lose_next_ack(self) -> None:
        """Of the batch that comes next the sender will not hear."""
        self._wire.lose_next_ack = True

    def ack_was_lost(self) -> bool:
        """Whether one came since; the next one's answer arrives again."""
        lost = not self._wire.lose_next_ack
        self._wire.lose_next_ack = False
        return lost

    def maintain(self) -> None:
        """Do what is due by now."""
        self._service.maintain()

    def figures(self, start_ms: int, end_ms: int) -> LedgerFigures:
        """Ask the ledger everything once."""
        ledger = self._service.ledger
        (whole,) = ledger.usage(start_ms, end_ms, ())
        by_team = {line.key["team"]: line.accounts_gpu_us for line in ledger.usage(start_ms, end_ms, ("team",))}
        bill = cost(ledger, self._service.book(), start_ms, end_ms, ("team",))
        currency = bill.currency or ""
        return LedgerFigures(
            whole.accounts_gpu_us,
            by_team,
            currency,
            _payable(bill.total, currency),
            {line.key["team"]: _payable(line.cost, currency) for line in bill.lines},
            ledger.coverage(start_ms, end_ms),
            self._service.metrics.rows(),
            self._wire.acks_lost,
        )

    def write_files(self, folder: Path, start_ms: int, end_ms: int) -> None:
        """LEDGER_FILES: the month's report, its statement, a copy of the ledger. Raises OSError."""
        ledger = self._service.ledger
        with ledger.moment(start_ms, end_ms) as moment:
            report = build(moment, self._service.book(), start_ms, end_ms)
        (folder / "report.html").write_text(html_report.render(report), encoding="utf-8")
        (folder / "statement.csv").write_text(csv_report.render(report), encoding="utf-8", newline="")
        ledger.checkpoint()  # nothing writes any more: with its log folded in, the file is the whole ledger
        shutil.copyfile(self._service.settings.ledger_file, folder / "ledger.duckdb")

    def close(self) -> None:
        """Stop the server and close the ledger."""
        self._open.close()


def _log_to(file: Path | None) -> None:
    """What the accountant has to say, from warnings up, a line of JSON each."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING if file else logging.CRITICAL),
        logger_factory=structlog.WriteLoggerFactory(file.open("a", encoding="utf-8") if file else None),
    )


def _payable(amount: Decimal | None, currency: str) -> Decimal | None:
    return None if amount is None else Money(amount, currency).rounded().amount
