"""Runs the demo hour by hour: scheduler engine, agents, accountant and controller on virtual clocks.

engine ─ events ─▶ machines with agents ─ HTTP ─▶ accountant ─ HTTP ─▶ controller ─▶ Queue objects ─▶ engine

Once per simulated hour the agents deliver, the accountant keeps house, and the controller runs one cycle;
the scheduler then obeys the weights that stand in the cluster. All clocks are virtual: the machines' move
through every event, the accountant's and the controller's from hour to hour. Nothing waits in real time, and
as little as possible for another: agents and accountant have processes of their own, and while an hour is booked
the controller thinks about the one before it and the machines live the next.

KAI's queue controller writes what queues hold and ask for into `Queue.status`; its scheduler reads
`overQuotaWeight` back. Who changes that weight, and why, is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2

from accountant.wire.policy_models import Policy
from fairshare.controller.control_loop import Controller
from fairshare.controller.cycle_report import CycleReport
from fairshare.simulator.engine_state import QueueState
from fairshare.simulator.simulation_model import WHOLE, Event, NodeSpec, OutageBegan, OutageEnded
from fairshare.targets.kai import KINDS, QUEUE, SHARD
from fairshare.usage.accountant_client import AccountantApi
from gputally.base.clock import VirtualClock
from gputally.base.units import MS_PER_HOUR
from gputally.demo.ground_truth import TrueTotals
from gputally.demo.scenario import Scenario
from gputally.demo.worker_processes import AccountantConfig, LedgerFigures, Parts, SiteConfig, SiteResult, order
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import CONFIG_MAP, GPU, NODE, Object

QUEUE_CONTROLLER = "queue-controller"
NODE_CONTROLLER = "kubelet"


class ControlPlane:
    """Queues, nodes and KAI's shard in a `MemoryCluster`."""

    def __init__(self, nodes: Sequence[NodeSpec], policy: Policy) -> None:
        self.cluster = MemoryCluster([*KINDS, NODE, CONFIG_MAP])
        self._nodes = {node.name: node for node in nodes}
        self._states: dict[str, QueueState] = {}
        for queue in policy.queues:
            gpu = {"quota": queue.deserved, "overQuotaWeight": queue.weight, "limit": queue.limit}
            spec: dict[str, Any] = {"priority": queue.priority, "resources": {"gpu": gpu}}
            self._put(QUEUE.api_version, QUEUE.kind, queue.name, spec)
        self._put(SHARD.api_version, SHARD.kind, "default", {"kValue": 0})
        for node in nodes:
            self._put(NODE.api_version, NODE.kind, node.name, {})
            self.node_ready(node.name, ready=True)

    def node_ready(self, name: str, *, ready: bool) -> None:
        """What the node controller says of a node."""
        whole = sum(shape == WHOLE for gpu in self._nodes[name].gpus for shape in gpu.shapes)
        status = {
            "allocatable": {GPU: str(whole)},
            "conditions": [{"type": "Ready", "status": "True" if ready else "Unknown"}],
        }
        self._put_status(NODE.api_version, NODE.kind, name, status, NODE_CONTROLLER)

    def report(self, states: Mapping[str, QueueState]) -> None:
        """The queue controller's part: what changed since the last time."""
        for name, state in sorted(states.items()):
            if self._states.get(name) != state:
                amounts = {
                    "requested": {GPU: str(state.requested)},
                    "allocated": {GPU: str(state.allocated)},
                    "allocatedNonPreemptible": {GPU: str(state.allocated_non_preemptible)},
                }
                self._put_status(QUEUE.api_version, QUEUE.kind, name, amounts, QUEUE_CONTROLLER)
        self._states = dict(states)

    def weights(self) -> dict[str, float]:
        """Over-quota weights as they stand now."""
        return {
            queue["metadata"]["name"]: float(queue["spec"]["resources"]["gpu"]["overQuotaWeight"])
            for queue in self.cluster.list(QUEUE)
        }

    def _put(self, api_version: str, kind: str, name: str, spec: Mapping[str, Any]) -> None:
        obj: Object = {"apiVersion": api_version, "kind": kind, "metadata": {"name": name}, "spec": spec}
        self.cluster.load([obj])

    def _put_status(self, api_version: str, kind: str, name: str, status: Mapping[str, Any], manager: str) -> None:
        obj: Object = {"apiVersion": api_version, "kind": kind, "metadata": {"name": name}, "status": status}
        self.cluster.apply(obj, field_manager=manager, subresource="status")


@dataclass(slots=True)
class ControllerCounts:
    """What the controller did over the run."""

    cycles: int = 0
    holds: int = 0
    weights_published: int = 0


class Pipeline:
    """The running house. Use it as a context: leaving it stops the server and closes the ledger.

    folder: for the ledger and the outboxes; must be empty. port 0: any free one. parts: processes that nothing was
    made of yet; None: its own, without an outlet for warnings. scratch: the folder is to be removed where this process
    ends without having done so. scraped: the agents keep metrics, which costs the run a
    little, and nothing of an hour begins before the one before it is over. observe: hears of every cycle."""

    def __init__(
        self,
        scenario: Scenario,
        folder: Path,
        port: int = 0,
        *,
        parts: Parts | None = None,
        scratch: bool = False,
        scraped: bool = False,
        observe: Callable[[CycleReport], None] | None = None,
    ) -> None:
        """Raises what accountant.composition.Service and serve raise where folder or port cannot be used."""
        self.scenario = scenario
        self.tally = ControllerCounts()
        self.resent = 0
        """Intervals sent twice because the answer to the first time was lost."""
        self._clock = VirtualClock(scenario.start_ms)
        """The controller's; the accountant has one of its own."""
        self._scraped = scraped
        self.agent_pages: dict[str, str] = {}
        """The agents' /metrics pages by node, of the hour that `progress` is told of, before they deliver."""
        self.taken = SiteResult(TrueTotals(), 0)
        """What really happened, once the run is over."""
        teams = tuple(sorted(queue.name for queue in scenario.policy.queues))
        with ExitStack() as opening:
            mine = opening.enter_context(parts or Parts())
            self._office, self._crew = mine.office, mine.crew
            leaving = folder if scratch else None
            premises = AccountantConfig(scenario.nodes, teams, folder, port, scenario.start_ms, mine.log_file)
            self._office.start(premises, scratch=leaving)
            self.url: str = self._office.ask("url")
            plot = SiteConfig(
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
            self._crew.settle(plot, leaving)
            client = opening.enter_context(AccountantApi(self.url))
            self._stack = opening.pop_all()
        self.engine = scenario.engine()
        self.plane = ControlPlane(scenario.nodes, scenario.policy)
        self.controller = Controller(scenario.policy, client, self.plane.cluster, self._clock, observe=observe)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def run(self, progress: Callable[[int], None] = lambda _: None) -> None:
        """The whole span, hour by hour; `progress` hears of the virtual time, in whatever thread.

        As soon as an hour is booked the controller thinks about it and the scheduler goes on, whether or not the
        machines have lived the next one meanwhile: so the weights it finds are in force an hour later."""
        hours = self.scenario.days * 24
        events: Sequence[Event] = self.engine.events_until(self.scenario.start_ms)
        self._office.ask("hour", self.scenario.start_ms, _of_nodes(events), False)
        self._tell_nodes(events)
        self._crew.begin(events)
        events = self.engine.events_until(self._after(1))
        self._crew.set_out(events, self._after(1))
        control: Callable[[], None] | None = None
        keep_house = False  # of the hour before: an order of its own would have to be waited for
        with ThreadPoolExecutor(1, "scheduler") as scheduler:
            for hour in range(1, hours + 1):
                away = hour in self.scenario.faults.away
                self._office.ask("hour", self._after(hour), _of_nodes(events), away, keep_house)
                going_on = scheduler.submit(self._go_on, hour, control, events)
                self._crew.arrive()
                if self._scraped:
                    self.agent_pages = self._crew.scrape()
                self._deliver_alone(hour)
                self._crew.deliver()
                states, events = going_on.result()
                control = partial(self._control, hour, states, progress)
                alone = hour == hours or self._disturbed(hour, events)
                if alone:
                    self._crew.delivered()
                if hour < hours:
                    self._crew.set_out(events, self._after(hour + 1))
                if not alone:
                    self._crew.delivered()
                keep_house = hour < hours and not self._at_once(hour)
                if not keep_house:
                    self._office.ask("maintain")
                    control()
                    control = None
        self.taken = self._crew.finish(self.scenario.end_ms)

    def _go_on(
        self, hour: int, control: Callable[[], None] | None, events: Sequence[Event]
    ) -> tuple[Mapping[str, QueueState], Sequence[Event]]:
        """The controller's cycle for the hour before, if it is still due, then the scheduler until the end of the
        next: how the queues stand between, and what happens then. events: of `hour`."""
        if control is not None:
            control()
        self._tell_nodes(events)
        states = self.engine.queue_states()
        return states, self.engine.events_until(self._after(hour + 1)) if hour < self.scenario.days * 24 else ()

    def figures(self) -> LedgerFigures:
        """What the ledger has to say of the span."""
        found: LedgerFigures = self._office.ask("figures", self.scenario.start_ms, self.scenario.end_ms)
        return found

    def write_files(self, folder: Path) -> None:
        """Begin to write what comes out of the ledger (gputally.demo.worker_processes.LEDGER_FILES), and come back at
        once."""
        self._office.tell(order("write_files", folder, self.scenario.start_ms, self.scenario.end_ms))

    def files_written(self) -> None:
        """Wait for the end of `write_files`; it has to be waited for before anything else is asked. Raises
        WorkerLost where something cannot be written."""
        self._office.answer()

    def get(self, path: str) -> str:
        """A page of the accountant."""
        return httpx2.get(self.url + path, timeout=None).raise_for_status().text

    def _after(self, hour: int) -> int:
        return self.scenario.start_ms + hour * MS_PER_HOUR

    def _disturbed(self, hour: int, events: Sequence[Event]) -> bool:
        """Whether the machines may not live on from `hour` while their agents still deliver: because answers do not
        come at once, an agent ends before it has its own, or a check reads what is not delivered yet."""
        faults = self.scenario.faults
        ends = any(isinstance(event, OutageBegan) and event.outage.target == "node" for event in events)
        killed = self._after(hour) < faults.killed_ms <= self._after(hour + 1)
        return self._scraped or hour in faults.away or ends or killed

    def _at_once(self, hour: int) -> bool:
        """Whether the controller may not leave `hour` for when the next one is delivered: because it is not the same
        to be asked then (its policy is in force from when it first says so; nothing answers), or the demo is
        watched."""
        away = self.scenario.faults.away
        return self._scraped or hour in away or hour + 1 in away or self.tally.cycles == self.tally.holds

    def _tell_nodes(self, events: Sequence[Event]) -> None:
        """Have nodes that went and came known to the API server."""
        for event in _of_nodes(events):
            self.plane.node_ready(event.outage.name, ready=isinstance(event, OutageEnded))

    def _deliver_alone(self, hour: int) -> None:
        """Those agents send what they have whose answer gets lost."""
        for name in (node.name for node in self.scenario.nodes if (hour, node.name) in self.scenario.faults.lost_acks):
            self._office.ask("lose_next_ack")
            sent = self._crew.deliver_alone(name)
            self.resent += sent if self._office.ask("ack_was_lost") else 0

    def _control(self, hour: int, states: Mapping[str, QueueState], progress: Callable[[int], None]) -> None:
        """KAI's queue controller, our controller, KAI's scheduler: in this order. states: at the end of the hour."""
        self._clock.advance_to(self._after(hour))
        self.plane.report(states)
        report = self.controller.cycle()
        self._count(report)
        self.engine.set_weights(self.plane.weights())
        progress(self._after(hour))

    def _count(self, report: CycleReport) -> None:
        self.tally.cycles += 1
        self.tally.holds += report.hold is not None
        self.tally.weights_published += sum(
            outcome.result == "applied" for target in report.targets for outcome in target.outcomes
        )


def _of_nodes(events: Sequence[Event]) -> list[OutageBegan | OutageEnded]:
    return [event for event in events if isinstance(event, OutageBegan | OutageEnded) and event.outage.target == "node"]
