"""The demo's composition: a simulated cluster through the real agents, accountant and controller.

    engine ─ events ─▶ machines with agents ─ HTTP ─▶ accountant ─ HTTP ─▶ controller ─▶ Queue objects ─▶ engine

Once per simulated hour the agents deliver, the accountant keeps house, and the controller runs one cycle;
the scheduler then obeys the weights that stand in the cluster. Two clocks, both virtual: the machines' moves
through every event, the accountant's and the controller's from hour to hour. Nothing waits in real time.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from types import TracebackType
from urllib.request import urlopen

from accountant.service import Service, serve
from accountant.settings import Settings
from accountant.wire import Policy
from agent.clock import VirtualClock
from agent.units import MS_PER_HOUR
from fairshare.client import AccountantClient
from fairshare.loop import Controller
from fairshare.report import CycleReport
from fairshare.simulator.cluster import WHOLE, NodeSpec, Outage
from fairshare.simulator.engine import Engine
from fairshare.simulator.jobs import Job
from gputally.demo import policy as policies
from gputally.demo.controlplane import ControlPlane
from gputally.demo.faults import FaultPlan
from gputally.demo.inventory import SimulatedInventory
from gputally.demo.site import Site
from gputally.demo.truth import Truth
from gputally.demo.wire import UnreliableWire

PRICE_BOOK = files("gputally.demo") / "data" / "price-book.yaml"
_A_DAY_S = 86_400


@dataclass(frozen=True)
class Scenario:
    """Everything a run depends on."""

    seed: int
    start_ms: int
    days: int
    interval_s: int
    nodes: tuple[NodeSpec, ...]
    policy: Policy
    jobs: tuple[Job, ...]
    outages: tuple[Outage, ...]
    faults: FaultPlan

    @property
    def end_ms(self) -> int:
        return self.start_ms + self.days * 24 * MS_PER_HOUR

    def engine(self) -> Engine:
        """The scheduler at the start, with the weights of the policy file."""
        return Engine(self.nodes, policies.claims(self.policy), self.jobs, outages=self.outages)


@dataclass(slots=True)
class Tally:
    """What the controller did over the run."""

    cycles: int = 0
    holds: int = 0
    weights_published: int = 0


def whole_gpus(nodes: tuple[NodeSpec, ...]) -> int:
    """GPUs that are handed out whole."""
    return sum(gpu.shapes == (WHOLE,) for node in nodes for gpu in node.gpus)


def baseline(scenario: Scenario) -> tuple[Engine, Truth]:
    """The same jobs under static weights: what would have happened without the controller."""
    engine = scenario.engine()
    truth = Truth(scenario.nodes, scenario.start_ms, scenario.interval_s * 1000)
    for event in engine.run_until(scenario.end_ms):
        truth.see(event)
    truth.finish(scenario.end_ms)
    return engine, truth


class Pipeline:
    """The running house. Use it as a context: leaving it stops the server and closes the ledger.

    folder: for the ledger and the outboxes; must be empty. port 0: any free one."""

    def __init__(self, scenario: Scenario, folder: Path, port: int = 0) -> None:
        """Raises what accountant.service.Service and serve raise where folder or port cannot be used."""
        self.scenario = scenario
        self.tally = Tally()
        self.resent = 0
        """Intervals sent twice because the answer to the first time was lost."""
        self._clock = VirtualClock(scenario.start_ms)
        self._machine_clock = VirtualClock(scenario.start_ms)
        self._stack = ExitStack()
        with ExitStack() as opening:
            book = opening.enter_context(as_file(PRICE_BOOK))
            settings = Settings(
                data=folder,
                listen=f"127.0.0.1:{port}",
                auth="off",
                prices=book,
                linger_ms=15,
                checkpoint_seconds=_A_DAY_S,
                refresh_seconds=3_600,
            )
            teams = sorted(queue.name for queue in scenario.policy.queues)
            inventory = SimulatedInventory(scenario.nodes, teams)
            self.service = opening.enter_context(Service(settings, self._clock, inventory))
            self.wire = UnreliableWire(self.service.app)
            self.url = opening.enter_context(serve(self.wire, settings.host, settings.port))
            client = opening.enter_context(AccountantClient(self.url))
            self._pool = opening.enter_context(ThreadPoolExecutor(len(scenario.nodes), "agent"))
            self.site = Site(
                scenario.nodes,
                inventory,
                frozenset(teams),
                folder / "outboxes",
                self.url,
                scenario.interval_s,
                self._machine_clock,
                scenario.faults,
                scenario.seed,
            )
            opening.callback(self.site.close)
            self._stack = opening.pop_all()
        self.engine = scenario.engine()
        self.plane = ControlPlane(scenario.nodes, scenario.policy)
        self.controller = Controller(scenario.policy, client, self.plane.cluster, self._clock)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def run(self, progress: Callable[[int], None] = lambda _: None) -> None:
        """The whole span, hour by hour; `progress` hears of the virtual time."""
        self.site.begin(self.engine.run_until(self.scenario.start_ms))
        for hour in range(1, self.scenario.days * 24 + 1):
            now_ms = self.scenario.start_ms + hour * MS_PER_HOUR
            self.site.follow(self.engine.run_until(now_ms), now_ms)
            self._clock.advance_to(now_ms)
            self.wire.away = hour in self.scenario.faults.away
            self._deliver(hour)
            self.service.maintain()
            self._control()
            progress(now_ms)
        self.site.truth.finish(self.scenario.end_ms)

    def get(self, path: str) -> str:
        """A page of the accountant."""
        with urlopen(self.url + path) as answer:  # noqa: S310 - our own server on loopback
            return str(answer.read(), "utf-8")

    def _deliver(self, hour: int) -> None:
        """Every agent sends what it has: first, alone, those whose answer gets lost, then all at once."""
        for name, machine in self.site.machines.items():
            if (hour, name) in self.scenario.faults.lost_acks:
                unconfirmed = machine.unconfirmed
                self.wire.lose_next_ack = True
                machine.deliver()
                self.resent += unconfirmed if not self.wire.lose_next_ack else 0
                self.wire.lose_next_ack = False
        for _ in self._pool.map(lambda machine: machine.deliver(), self.site.machines.values()):
            pass

    def _control(self) -> None:
        """KAI's queue controller, our controller, KAI's scheduler: in this order."""
        for name, machine in self.site.machines.items():
            self.plane.node_ready(name, ready=machine.running)
        self.plane.report(self.engine.queue_states())
        report = self.controller.cycle()
        self._count(report)
        self.engine.set_weights(self.plane.weights())

    def _count(self, report: CycleReport) -> None:
        self.tally.cycles += 1
        self.tally.holds += report.hold is not None
        self.tally.weights_published += sum(
            outcome.result == "applied" for target in report.targets for outcome in target.outcomes
        )
