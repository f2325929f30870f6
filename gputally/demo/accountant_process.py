"""Runs the demo's accountant, beside a simulated API server, behind a network that loses answers.

The accountant's service, ledger, server and inventory run unchanged. The demo replaces the clock, which moves from hour
to hour, the API server, and the network connection, which fails as planned. Background tasks run only at the demo's
request, so that every run gives the same result."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from decimal import Decimal
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from accountant.billing.usage_pricing import cost
from accountant.composition import Service
from accountant.core.settings import Kubernetes, Settings
from accountant.exports import rendering_process
from accountant.inventory.inventory_file import MergedInventory
from accountant.inventory.kubernetes_inventory import ClusterInventory
from accountant.ledger.protocols import Down, Facts, NamespaceFacts, NodeFacts
from accountant.ledger.usage import coverage
from accountant.reports.report_builder import build
from fairshare.simulator.simulation_model import Event, OutageBegan, SimulatedJob, SimulatedNodeSpec, Started, Stopped
from gputally.base.clock import VirtualClock
from gputally.base.money import Money
from gputally.base.units import MS_PER_DAY
from gputally.demo.cluster_and_workload import CLUSTER, EXPORTED_LABELS, REGION
from gputally.demo.simulated_api_server import SimulatedApiServer
from gputally.demo.worker_processes import REPORT_FILES, AccountantConfig, LedgerFigures
from gputally.server.https_server import serve
from gputally.server.one_address import OneAddress

if TYPE_CHECKING:
    from fairshare.controller.cycle_report import CycleReport
    from gputally.demo.controller_pages import ControllerPages

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class UnreliableWire:
    """A network connection to an ASGI application that can fail. The demo sets the attributes between requests.

    app: the application.
    away: True while a proxy answers 502 instead of the accountant. A browser gets a page that says so.
    lose_next_ack: True to book the next batch and lose the answer."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.away = False
        self.lose_next_ack = False
        self.acks_lost = 0
        self.refused = 0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Handle a request by the ASGI protocol."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if self.away:
            self.refused += 1
            await _consume(receive)
            await (_outage_page(send) if _from_browser(scope) else _bad_gateway(send))
        elif self.lose_next_ack and (scope["method"], scope["path"]) == ("POST", "/v1/usage"):
            self.lose_next_ack = False
            self.acks_lost += 1
            await self.app(scope, receive, _discard)
            await _bad_gateway(send)
        else:
            await self.app(scope, receive, send)


async def _consume(receive: Receive) -> None:
    while (await receive()).get("more_body", False):
        pass


async def _discard(_message: Message) -> None:
    pass


def _from_browser(scope: MutableMapping[str, Any]) -> bool:
    return any(name == b"accept" and b"text/html" in value for name, value in scope["headers"])


async def _bad_gateway(send: Send) -> None:
    await _answer(send, 502, b"text/plain", b"bad gateway")


_OUTAGE = b"""<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="2">
<title>gputally demo: simulated outage</title><h1>The demo simulates an outage</h1>
<p>In this simulated hour, no request reaches the accountant. The agents keep their records and deliver them in the next
hour. This page loads again by itself.</p></html>"""


async def _outage_page(send: Send) -> None:
    await _answer(send, 503, b"text/html; charset=utf-8", _OUTAGE)


async def _answer(send: Send, status: int, content_type: bytes, body: bytes) -> None:
    headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class NodeInventory:
    """An accountant.ledger.protocols.Inventory with the nodes and namespaces, as an operator lists them in a file, and
    with the reasons of outages. The simulation updates it when a node goes down or comes back."""

    def __init__(self, nodes: Sequence[SimulatedNodeSpec], teams: Sequence[str]) -> None:
        self._nodes = {
            node.name: NodeFacts(
                cluster=CLUSTER,
                name=node.name,
                pool=node.pool,
                region=REGION,
                zone=f"{REGION}a",
                capacity_type="spot" if node.pool == "spot" else "on-demand",
            )
            for node in nodes
        }
        self._namespaces = tuple(NamespaceFacts(CLUSTER, team, team) for team in sorted(teams))

    def node_down(self, name: str, at_ms: int, reason: str) -> None:
        """Record that the node is not ready from `at_ms` on."""
        node = self._nodes[name]
        self._nodes[name] = replace(node, down=(*node.down, Down(at_ms, None, reason)))

    def node_up(self, name: str, at_ms: int) -> None:
        """Record that the node is ready again."""
        node = self._nodes[name]
        self._nodes[name] = replace(node, down=(*node.down[:-1], replace(node.down[-1], end_ms=at_ms)))

    def read(self, now_ms: int) -> Facts:  # noqa: ARG002 - the simulation reports no future events
        """Return all facts that are known at present."""
        return Facts(nodes=tuple(self._nodes[name] for name in sorted(self._nodes)), namespaces=self._namespaces)

    def taken(self) -> None:
        """Do nothing: every reading is complete."""


WATCHED = Kubernetes(inventory=True, cluster=CLUSTER)
"""The accountant's pods come from the API server of this cluster."""
PRICE_BOOK = files("gputally.demo") / "data" / "price-book.yaml"
_CHECKPOINT_S = 7 * 86_400
"""Time between checkpoints. A checkpoint rewrites the file's last row groups even if few rows are new."""

_LINGER_MS = 30
"""Time that the accountant waits for further batches before it commits, because a late batch costs a commit of its own.
All agents deliver at once, on fewer cores than there are agents."""


class DemoAccountant:
    """An accountant that serves from construction to `close`."""

    def __init__(self, config: AccountantConfig) -> None:
        """Start the accountant. Raises the exceptions of accountant.composition.Service and of `serve` if the folder or
        the port cannot be used."""
        _log_to(config.log_file)
        self._clock = VirtualClock(config.start_ms)
        self._nodes = NodeInventory(config.nodes, config.teams)
        self._cluster = SimulatedApiServer(config.nodes, config.teams)
        self._pods = ClusterInventory(self._cluster.api(), self._clock, CLUSTER, exported=EXPORTED_LABELS)
        self._pods.sync()
        inventory = MergedInventory([self._nodes, self._pods])
        with ExitStack() as stack:
            book = stack.enter_context(as_file(PRICE_BOOK))
            settings = Settings(
                data=config.folder,
                listen=f"127.0.0.1:{config.port}",
                auth="off",
                prices=book,
                linger_ms=_LINGER_MS,
                checkpoint_seconds=_CHECKPOINT_S,
                refresh_seconds=3_600,
                exported_labels=EXPORTED_LABELS,
                kubernetes=WATCHED,
                controller_pages="/" if config.pages_policy is not None else None,
            )
            self._service = stack.enter_context(Service(settings, self._clock, inventory))
            self._wire = UnreliableWire(self._service.app)
            self._url = stack.enter_context(serve(self._wire, settings.host, settings.port))
            self._controller: ControllerPages | None = None
            if config.pages_policy is not None:
                # Imported here, because an accountant without these pages does not load their libraries.
                from gputally.demo.controller_pages import ControllerPages

                self._controller = ControllerPages(config.pages_policy, config.folder, self._url, self._clock)
                stack.callback(self._controller.close)
                self._wire.app = OneAddress(self._service.app, self._controller.app)
            self._stack = stack.pop_all()

    def url(self) -> str:
        """Return the address at which the accountant serves."""
        return self._url

    def grace_ms(self) -> int:
        """Return the time between the end of a month and its close."""
        return self._service.settings.grace_days * MS_PER_DAY

    def hour(
        self,
        now_ms: int,
        submitted: Sequence[SimulatedJob],
        events: Sequence[Event],
        away: bool,
        run_maintenance: bool = False,
    ) -> None:
        """Set the clock to `now_ms`, and let the API server and the operator record what happened until then.

        submitted, events: the jobs and the events since the last call.
        away: True to answer no agent until the next hour.
        run_maintenance: True to run the background tasks that are due before the clock moves."""
        if run_maintenance:
            self.maintain()
        self._clock.advance_to(now_ms)
        for event in events:
            if isinstance(event, Started | Stopped) or event.outage.target != "node":
                continue
            if isinstance(event, OutageBegan):
                self._nodes.node_down(event.outage.name, event.at_ms, event.outage.reason)
            else:
                self._nodes.node_up(event.outage.name, event.at_ms)
        self._cluster.apply(now_ms, submitted, events, self._pods.follow)
        self._wire.away = away

    def show_cycle(self, report: CycleReport) -> None:
        """Show a cycle on the controller's pages. Other calls may run at the same time."""
        if self._controller is not None:
            self._controller.show(report)

    def lose_next_ack(self) -> None:
        """Lose the acknowledgement of the next batch."""
        self._wire.lose_next_ack = True

    def ack_was_lost(self) -> bool:
        """Return True if a batch has arrived since `lose_next_ack`. No further answer is lost."""
        lost = not self._wire.lose_next_ack
        self._wire.lose_next_ack = False
        return lost

    def maintain(self) -> None:
        """Run the background tasks that are due."""
        self._service.maintain()

    def figures(self, start_ms: int, end_ms: int) -> LedgerFigures:
        """Query the ledger for all figures of the span."""
        with self._service.ledger.moment(start_ms, end_ms) as moment:
            (whole,) = moment.usage((start_ms, end_ms), ()).lines()
            of_teams = moment.usage((start_ms, end_ms), ("team",)).lines()
            bill = cost(moment, self._service.book(), start_ms, end_ms, ("team",))
        by_team = {line.key["team"]: line.accounts_gpu_us for line in of_teams}
        currency = bill.currency or ""
        return LedgerFigures(
            whole.accounts_gpu_us,
            by_team,
            currency,
            _payable(bill.total, currency),
            {line.key["team"]: _payable(line.cost, currency) for line in bill.lines},
            coverage([whole]) or 0.0,  # without capacity, nothing is metered
            self._service.metrics.rows(),
            self._wire.acks_lost,
        )

    def write_files(self, folder: Path, start_ms: int, end_ms: int) -> None:
        """Write LEDGER_FILES: the month's report, its statement and a copy of the ledger. Raises OSError."""
        ledger = self._service.ledger
        with ledger.moment(start_ms, end_ms) as moment:
            report = build(moment, self._service.book(), start_ms, end_ms)
        for name, file in REPORT_FILES.items():
            (folder / file).write_bytes(rendering_process.render(name, report))
        ledger.checkpoint()  # no rows arrive any more, so the file then has the whole ledger
        shutil.copyfile(self._service.settings.ledger_file, folder / "ledger.duckdb")

    def close(self) -> None:
        """Stop the server and close the ledger."""
        self._stack.close()


def _log_to(file: Path | None) -> None:
    """Write the accountant's warnings and errors to a file, one JSON object per line; None: only critical errors, to
    stdout."""
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
