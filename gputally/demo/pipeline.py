"""Runs the demo hour by hour: scheduler engine, agents, accountant and controller on virtual clocks.

engine ─ events ─▶ machines with agents ─ HTTP ─▶ accountant ─ HTTP ─▶ controller ─▶ Queue objects ─▶ engine

Once per simulated hour the agents deliver, the accountant runs its background tasks, and the controller runs one cycle.
The scheduler then uses the published weights. All clocks are virtual. The machines' clocks move through every event,
and the accountant's and the controller's from hour to hour.

No step waits in real time, and the parts overlap where possible. Agents and accountant have processes of their own.
While an hour is booked, the controller works on the hour before and the machines simulate the next one.

KAI's queue controller writes what queues hold and request into `Queue.status`, and its scheduler reads
`overQuotaWeight`. This module does not change weights."""

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
        """Set the node's condition, as the node controller does."""
        whole = sum(shape == WHOLE for gpu in self._nodes[name].gpus for shape in gpu.shapes)
        status = {
            "allocatable": {GPU: str(whole)},
            "conditions": [{"type": "Ready", "status": "True" if ready else "Unknown"}],
        }
        self._put_status(NODE.api_version, NODE.kind, name, status, NODE_CONTROLLER)

    def report(self, states: Mapping[str, QueueState]) -> None:
        """Write the changed queue states, as KAI's queue controller does."""
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
        """Return the over-quota weights that are in the objects now."""
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
    """Counts of what the controller did over the run."""

    cycles: int = 0
    holds: int = 0
    weights_published: int = 0


class Pipeline:
    """The running demo. Use it as a context: leaving it stops the server and closes the ledger.

    folder: for the ledger and the outboxes; must be empty.
    port 0: any free one.
    parts: unused worker processes; None: start new ones, whose warnings are not logged.
    scratch: remove the folder if this process ends without doing so.
    scraped: the agents keep metrics, which slows the run a little, and no hour begins before the previous one is over.
    observe: called with every cycle."""

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
        """Raises the exceptions of accountant.composition.Service and serve if folder or port cannot be used."""
        self.scenario = scenario
        self.tally = ControllerCounts()
        self.resent = 0
        """Intervals sent twice because the first answer was lost."""
        self._clock = VirtualClock(scenario.start_ms)
        """The controller's clock; the accountant has its own."""
        self._scraped = scraped
        self.agent_pages: dict[str, str] = {}
        """The agents' /metrics pages by node, for the hour that `progress` reports, before they deliver."""
        self.taken = SiteResult(TrueTotals(), 0)
        """The ground truth, after the run."""
        teams = tuple(sorted(queue.name for queue in scenario.policy.queues))
        with ExitStack() as opening:
            mine = opening.enter_context(parts or Parts())
            self._accountant, self._crew = mine.office, mine.crew
            leaving = folder if scratch else None
            premises = AccountantConfig(scenario.nodes, teams, folder, port, scenario.start_ms, mine.log_file)
            self._accountant.start(premises, scratch=leaving)
            self.url: str = self._accountant.ask("url")
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
        """Run the whole span hour by hour; `progress` gets the virtual time, in any thread.

        As soon as an hour is booked, the controller runs its cycle and the scheduler continues, even if the machines
        have not simulated the next hour yet. The weights therefore take effect an hour later."""
        hours = self.scenario.days * 24
        events: Sequence[Event] = self.engine.events_until(self.scenario.start_ms)
        self._accountant.ask("hour", self.scenario.start_ms, _of_nodes(events), False)
        self._tell_nodes(events)
        self._crew.begin(events)
        events = self.engine.events_until(self._after(1))
        self._crew.set_out(events, self._after(1))
        control: Callable[[], None] | None = None
        keep_house = False  # figures of the hour before, because a separate request would have to wait
        with ThreadPoolExecutor(1, "scheduler") as scheduler:
            for hour in range(1, hours + 1):
                away = hour in self.scenario.faults.away
                self._accountant.ask("hour", self._after(hour), _of_nodes(events), away, keep_house)
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
                    self._accountant.ask("maintain")
                    control()
                    control = None
        self.taken = self._crew.finish(self.scenario.end_ms)

    def _go_on(
        self, hour: int, control: Callable[[], None] | None, events: Sequence[Event]
    ) -> tuple[Mapping[str, QueueState], Sequence[Event]]:
        """Run the controller's cycle for the previous hour if it is due, then the scheduler until the end of the next
        hour. Returns the queue states in between and the events of the next hour. events: of `hour`."""
        if control is not None:
            control()
        self._tell_nodes(events)
        states = self.engine.queue_states()
        return states, self.engine.events_until(self._after(hour + 1)) if hour < self.scenario.days * 24 else ()

    def figures(self) -> LedgerFigures:
        """Query the ledger for the figures of the span."""
        found: LedgerFigures = self._accountant.ask("figures", self.scenario.start_ms, self.scenario.end_ms)
        return found

    def write_files(self, folder: Path) -> None:
        """Begin to write the ledger's files (gputally.demo.worker_processes.LEDGER_FILES), and return at once."""
        self._accountant.tell(order("write_files", folder, self.scenario.start_ms, self.scenario.end_ms))

    def files_written(self) -> None:
        """Wait for the end of `write_files`, before any other request. Raises WorkerLost if a file cannot be
        written."""
        self._accountant.answer()

    def get(self, path: str) -> str:
        """Return a page of the accountant."""
        return httpx2.get(self.url + path, timeout=None).raise_for_status().text

    def _after(self, hour: int) -> int:
        return self.scenario.start_ms + hour * MS_PER_HOUR

    def _disturbed(self, hour: int, events: Sequence[Event]) -> bool:
        """Return whether the machines must wait with the hour after `hour` until their agents have delivered: because
        answers are delayed, an agent ends before its answer arrives, or a check reads undelivered records."""
        faults = self.scenario.faults
        ends = any(isinstance(event, OutageBegan) and event.outage.target == "node" for event in events)
        killed = self._after(hour) < faults.killed_ms <= self._after(hour + 1)
        return self._scraped or hour in faults.away or ends or killed

    def _at_once(self, hour: int) -> bool:
        """Return whether the controller must handle `hour` before the next hour is delivered, because the result could
        differ (its policy takes effect when it first announces it; the accountant does not answer), or because the demo
        is observed."""
        away = self.scenario.faults.away
        return self._scraped or hour in away or hour + 1 in away or self.tally.cycles == self.tally.holds

    def _tell_nodes(self, events: Sequence[Event]) -> None:
        """Report nodes that went down or came back to the API server."""
        for event in _of_nodes(events):
            self.plane.node_ready(event.outage.name, ready=isinstance(event, OutageEnded))

    def _deliver_alone(self, hour: int) -> None:
        """Let the agents whose answers will be lost deliver their records."""
        for name in (node.name for node in self.scenario.nodes if (hour, node.name) in self.scenario.faults.lost_acks):
            self._accountant.ask("lose_next_ack")
            sent = self._crew.deliver_alone(name)
            self.resent += sent if self._accountant.ask("ack_was_lost") else 0

    def _control(self, hour: int, states: Mapping[str, QueueState], progress: Callable[[int], None]) -> None:
        """Run KAI's queue controller, gputally's controller and KAI's scheduler, in this order. states: at the end of
        the hour."""
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
