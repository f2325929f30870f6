"""The demo's composition: a simulated cluster through the real agents, accountant and controller.

    engine ─ events ─▶ machines with agents ─ HTTP ─▶ accountant ─ HTTP ─▶ controller ─▶ Queue objects ─▶ engine

Once per simulated hour the agents deliver, the accountant keeps house, and the controller runs one cycle;
the scheduler then obeys the weights that stand in the cluster. All clocks are virtual: the machines' move
through every event, the accountant's and the controller's from hour to hour. Nothing waits in real time, and
as little as possible for another: while an hour is booked and thought about, the machines live the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from types import TracebackType
from urllib.request import urlopen

from accountant.service import Service
from accountant.serving import serve
from accountant.settings import Settings
from agent.clock import VirtualClock
from agent.units import MS_PER_HOUR
from fairshare.client import AccountantClient
from fairshare.loop import Controller
from fairshare.report import CycleReport
from fairshare.simulator.events import Event, OutageBegan, OutageEnded
from fairshare.simulator.queues import QueueState
from gputally.demo.controlplane import ControlPlane
from gputally.demo.crew import Crew
from gputally.demo.inventory import SimulatedInventory
from gputally.demo.scenario import Scenario
from gputally.demo.site import Plot, Stocktaking
from gputally.demo.truth import Books
from gputally.demo.wire import UnreliableWire

PRICE_BOOK = files("gputally.demo") / "data" / "price-book.yaml"
_A_WEEK_S = 7 * 86_400
"""Between checkpoints. One costs what the last of the file's row groups holds, however little is new."""


@dataclass(slots=True)
class Tally:
    """What the controller did over the run."""

    cycles: int = 0
    holds: int = 0
    weights_published: int = 0


class Pipeline:
    """The running house. Use it as a context: leaving it stops the server and closes the ledger.

    folder: for the ledger and the outboxes; must be empty. port 0: any free one. log_file: where
    the agents' warnings go. scraped: the agents keep metrics, which costs the run a little.
    observe: hears of every cycle."""

    def __init__(
        self,
        scenario: Scenario,
        folder: Path,
        port: int = 0,
        log_file: Path | None = None,
        *,
        scraped: bool = False,
        observe: Callable[[CycleReport], None] | None = None,
    ) -> None:
        """Raises what accountant.service.Service and serve raise where folder or port cannot be used."""
        self.scenario = scenario
        self.tally = Tally()
        self.resent = 0
        """Intervals sent twice because the answer to the first time was lost."""
        self._clock = VirtualClock(scenario.start_ms)
        self._scraped = scraped
        self.agent_pages: dict[str, str] = {}
        """The agents' /metrics pages by node, of the hour that `progress` is told of, before they deliver."""
        self.taken = Stocktaking(Books(), 0)
        """What really happened, once the run is over."""
        self._stack = ExitStack()
        with ExitStack() as opening:
            book = opening.enter_context(as_file(PRICE_BOOK))
            settings = Settings(
                data=folder,
                listen=f"127.0.0.1:{port}",
                auth="off",
                prices=book,
                linger_ms=40,
                checkpoint_seconds=_A_WEEK_S,
                refresh_seconds=3_600,
            )
            teams = sorted(queue.name for queue in scenario.policy.queues)
            self._inventory = SimulatedInventory(scenario.nodes, teams)
            self.service = opening.enter_context(Service(settings, self._clock, self._inventory))
            self.wire = UnreliableWire(self.service.app)
            self.url = opening.enter_context(serve(self.wire, settings.host, settings.port))
            client = opening.enter_context(AccountantClient(self.url))
            plot = Plot(
                nodes=scenario.nodes,
                queues=frozenset(teams),
                folder=folder / "outboxes",
                url=self.url,
                interval_s=scenario.interval_s,
                start_ms=scenario.start_ms,
                faults=scenario.faults,
                seed=scenario.seed,
                scraped=scraped,
            )
            self._crew = Crew(plot, log_file)
            opening.callback(self._crew.close)
            self._stack = opening.pop_all()
        self.engine = scenario.engine()
        self.plane = ControlPlane(scenario.nodes, scenario.policy)
        self.controller = Controller(scenario.policy, client, self.plane.cluster, self._clock, observe=observe)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def run(self, progress: Callable[[int], None] = lambda _: None) -> None:
        """The whole span, hour by hour; `progress` hears of the virtual time.

        While one hour is booked and the controller thinks about it, the scheduler goes on and the machines already
        live the next: so the weights it finds are in force an hour later."""
        hours = self.scenario.days * 24
        first = self.engine.run_until(self.scenario.start_ms)
        self._announce(first)
        self._crew.begin(first)
        events = self.engine.run_until(self._after(1))
        self._crew.set_out(events, self._after(1))
        for hour in range(1, hours + 1):
            now_ms = self._after(hour)
            self._crew.arrive()
            if self._scraped:
                self.agent_pages = self._crew.scrape()
            self._clock.advance_to(now_ms)
            self._announce(events)
            states = self.engine.queue_states()
            self.wire.away = hour in self.scenario.faults.away
            self._deliver_alone(hour)
            self._crew.deliver()
            if hour < hours:
                events = self.engine.run_until(self._after(hour + 1))
            alone = hour == hours or self._disturbed(hour, events)
            if alone:
                self._crew.delivered()
            if hour < hours:
                self._crew.set_out(events, self._after(hour + 1))
            if not alone:
                self._crew.delivered()
            self.service.maintain()
            self._control(states)
            progress(now_ms)
        self.taken = self._crew.finish(self.scenario.end_ms)

    def get(self, path: str) -> str:
        """A page of the accountant."""
        with urlopen(self.url + path) as answer:  # noqa: S310 - our own server on loopback
            return str(answer.read(), "utf-8")

    def _after(self, hour: int) -> int:
        return self.scenario.start_ms + hour * MS_PER_HOUR

    def _disturbed(self, hour: int, events: Sequence[Event]) -> bool:
        """Whether the machines may not live on from `hour` while their agents still deliver: because answers do not
        come at once, an agent ends before it has its own, or somebody looks at what is not delivered yet."""
        faults = self.scenario.faults
        ends = any(isinstance(event, OutageBegan) and event.outage.target == "node" for event in events)
        killed = self._after(hour) < faults.killed_ms <= self._after(hour + 1)
        return self._scraped or hour in faults.away or ends or killed

    def _announce(self, events: list[Event]) -> None:
        """Have nodes that went and came known to the API server and the inventory."""
        for event in events:
            if isinstance(event, OutageBegan | OutageEnded) and event.outage.target == "node":
                name, began = event.outage.name, isinstance(event, OutageBegan)
                self.plane.node_ready(name, ready=not began)
                if began:
                    self._inventory.node_down(name, event.at_ms, event.outage.reason)
                else:
                    self._inventory.node_up(name, event.at_ms)

    def _deliver_alone(self, hour: int) -> None:
        """Those agents send what they have whose answer gets lost."""
        for name in (node.name for node in self.scenario.nodes if (hour, node.name) in self.scenario.faults.lost_acks):
            self.wire.lose_next_ack = True
            sent = self._crew.deliver_alone(name)
            self.resent += 0 if self.wire.lose_next_ack else sent
            self.wire.lose_next_ack = False

    def _control(self, states: Mapping[str, QueueState]) -> None:
        """KAI's queue controller, our controller, KAI's scheduler: in this order."""
        self.plane.report(states)
        report = self.controller.cycle()
        self._count(report)
        self.engine.set_weights(self.plane.weights())

    def _count(self, report: CycleReport) -> None:
        self.tally.cycles += 1
        self.tally.holds += report.hold is not None
        self.tally.weights_published += sum(
            outcome.result == "applied" for target in report.targets for outcome in target.outcomes
        )
