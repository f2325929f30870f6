"""Runs the demo hour by hour: scheduler engine, agents, accountant and controller on virtual clocks.

engine ─ events ─▶ machines with agents ─ HTTP ─▶ accountant ─ HTTP ─▶ controller ─▶ Queue objects ─▶ engine

Once per simulated hour the agents deliver, the accountant runs its background tasks, and the controller runs one cycle.
The scheduler then uses the published weights. The machines' clocks move through every event, and the clocks of the
accountant and the controller from hour to hour.

No step waits in real time. The agents and the accountant have processes of their own. While the accountant books an
hour, the controller works on the hour before, and the machines simulate the next one.

In place of the played scheduler's programs, the module writes into the status of its queues what they hold and request,
and reads their weights. It does not change weights."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Self
from zoneinfo import ZoneInfo

import httpx2

from accountant.wire.policy_models import Policy
from fairshare.controller.control_loop import Controller
from fairshare.controller.cycle_report import CycleReport
from fairshare.simulator.engine_state import QueueState
from fairshare.simulator.simulation_model import (
    WHOLE,
    Event,
    OutageBegan,
    OutageEnded,
    SimulatedJob,
    SimulatedNodeSpec,
)
from fairshare.usage.accountant_client import AccountantApi
from gputally.base.clock import VirtualClock
from gputally.base.units import MS_PER_HOUR
from gputally.demo.closed_month import close_month, month_to_close
from gputally.demo.ground_truth import TrueTotals
from gputally.demo.played_scheduler import player
from gputally.demo.scenario import Scenario
from gputally.demo.worker_processes import (
    AccountantConfig,
    LedgerFigures,
    SiteConfig,
    SiteResult,
    WorkerProcesses,
    encode_call,
)
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import CONFIG_MAP, GPU, NODE, Object

QUEUE_CONTROLLER = "queue-controller"
NODE_CONTROLLER = "kubelet"


class ControlPlane:
    """A `MemoryCluster` with the queues, the nodes and the played scheduler's settings."""

    def __init__(
        self, nodes: Sequence[SimulatedNodeSpec], policy: Policy, weights: Mapping[str, float] | None = None
    ) -> None:
        """weights: the present weights of queues; None: those of the policy."""
        self._player = player()
        self._queue = self._player.kinds[0]
        self.cluster = MemoryCluster([*self._player.kinds, NODE, CONFIG_MAP])
        self._nodes = {node.name: node for node in nodes}
        self._states: dict[str, QueueState] = {}
        for queue in policy.queues:
            spec = self._player.queue_spec(queue, (weights or {}).get(queue.name, queue.weight))
            self._put(self._queue.api_version, self._queue.kind, queue.name, spec)
        self.cluster.load([self._player.settings()])
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
        """Write the changed queue states, as the scheduler's controller does."""
        for name, state in sorted(states.items()):
            if self._states.get(name) != state:
                amounts = self._player.queue_status(state.requested, state.allocated, state.allocated_non_preemptible)
                self._put_status(self._queue.api_version, self._queue.kind, name, amounts, QUEUE_CONTROLLER)
        self._states = dict(states)

    def weights(self) -> dict[str, float]:
        """Return the present weights of the queues' objects."""
        return {queue["metadata"]["name"]: self._player.weight(queue) for queue in self.cluster.list(self._queue)}

    def _put(self, api_version: str, kind: str, name: str, spec: Mapping[str, Any]) -> None:
        obj: Object = {"apiVersion": api_version, "kind": kind, "metadata": {"name": name}, "spec": spec}
        self.cluster.load([obj])

    def _put_status(self, api_version: str, kind: str, name: str, status: Mapping[str, Any], manager: str) -> None:
        obj: Object = {"apiVersion": api_version, "kind": kind, "metadata": {"name": name}, "status": status}
        self.cluster.apply(obj, field_manager=manager, subresource="status")


_UTC = ZoneInfo("UTC")
_SUBMIT_MS = attrgetter("submit_ms")
_CYCLES = 1
"""The accountant's pipe for cycles, which are sent beside other calls."""


@dataclass(slots=True)
class ControllerCounts:
    """Counts the controller's cycles, the cycles that held the weights, and the published weights."""

    cycles: int = 0
    holds: int = 0
    weights_published: int = 0


class Pipeline:
    """The running demo. As a context manager it stops the server and closes the ledger.

    folder: an empty folder for the ledger and the outboxes.
    port: the port of the accountant; 0 for any free port.
    processes: unused worker processes; None to start new ones, whose warnings are not logged.
    scratch: True to have the workers remove the folder if this process ends without doing so.
    scraped: True to have the agents keep metrics. Then no hour begins before the previous one is complete.
    pages: True to serve the controller's pages at the accountant's address.
    observe: the function that gets the report of every cycle."""

    def __init__(
        self,
        scenario: Scenario,
        folder: Path,
        port: int = 0,
        *,
        processes: WorkerProcesses | None = None,
        scratch: bool = False,
        scraped: bool = False,
        pages: bool = False,
        observe: Callable[[CycleReport], None] | None = None,
    ) -> None:
        """Start the accountant and the agents' machines. Raises WorkerLost if the folder or the port cannot be used."""
        self.scenario = scenario
        self.counts = ControllerCounts()
        self.resent = 0
        """Number of intervals that agents sent twice because the first answer was lost."""
        self._clock = VirtualClock(scenario.start_ms)
        """The controller's clock. The accountant has a clock of its own."""
        self._scraped = scraped
        self._pages = pages
        self.agent_pages: dict[str, str] = {}
        """The agents' /metrics pages by node, at the end of the last hour, before the agents deliver."""
        self.site_result = SiteResult(TrueTotals(), 0)
        """The ground truth and the number of closed intervals, after the run."""
        teams = tuple(sorted(queue.name for queue in scenario.policy.queues))
        with ExitStack() as stack:
            processes = stack.enter_context(closing(processes or WorkerProcesses()))
            self._accountant, self._agents = processes.accountant, processes.agents
            removed_folder = folder if scratch else None
            accountant_config = AccountantConfig(
                scenario.nodes, teams, folder, port, scenario.start_ms, processes.log_file,
                scenario.policy if pages else None,
            )  # fmt: skip
            self._accountant.start(accountant_config, scratch=removed_folder)
            self.url: str = self._accountant.call("url")
            self._grace_ms: int = self._accountant.call("grace_ms")
            site_config = SiteConfig(
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
            self._agents.create_sites(site_config, removed_folder)
            client = stack.enter_context(AccountantApi(self.url))
            self._stack = stack.pop_all()
        self.engine = scenario.engine()
        self._jobs = sorted(scenario.jobs, key=_SUBMIT_MS)
        self.plane = ControlPlane(scenario.nodes, scenario.policy)
        self.controller = Controller(scenario.policy, client, self.plane.cluster, self._clock, observe=observe)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, progress: Callable[[int], None] = lambda _: None) -> None:
        """Run the whole span hour by hour. progress: the function that gets the virtual time of a finished
        hour, in any thread.

        The controller runs its cycle as soon as an hour is booked, while the machines simulate the next hour. The
        weights therefore take effect an hour later."""
        hours = self.scenario.days * 24
        events: Sequence[Event] = self.engine.events_until(self.scenario.start_ms)
        self._accountant.call("hour", self.scenario.start_ms, self._submitted(0), events, False)
        self._report_nodes(events)
        self._agents.begin(events)
        events = self.engine.events_until(self._after(1))
        self._agents.start_hour(events, self._after(1))
        control: Callable[[], None] | None = None
        run_maintenance = False  # with the next call, because a call of its own would have to wait
        with ThreadPoolExecutor(1, "scheduler") as scheduler:
            for hour in range(1, hours + 1):
                away = hour in self.scenario.faults.away
                submitted = self._submitted(hour)
                self._accountant.call("hour", self._after(hour), submitted, events, away, run_maintenance)
                next_hour = scheduler.submit(self._schedule_hour, hour, control, events)
                self._agents.finish_hour()
                if self._scraped:
                    self.agent_pages = self._agents.scrape()
                self._deliver_alone(hour)
                self._agents.start_delivery()
                states, events = next_hour.result()
                control = partial(self._control, hour, states, progress)
                deliver_first = hour == hours or self._must_deliver_first(hour, events)
                if deliver_first:
                    self._agents.finish_delivery()
                if hour < hours:
                    self._agents.start_hour(events, self._after(hour + 1))
                if not deliver_first:
                    self._agents.finish_delivery()
                self._close_month(hour)
                run_maintenance = hour < hours and not self._must_control_first(hour)
                if not run_maintenance:
                    self._accountant.call("maintain")
                    control()
                    control = None
        self.site_result = self._agents.finish(self.scenario.end_ms)

    def _schedule_hour(
        self, hour: int, control: Callable[[], None] | None, events: Sequence[Event]
    ) -> tuple[Mapping[str, QueueState], Sequence[Event]]:
        """Run the controller's cycle for the previous hour, if `control` is given, and then the scheduler until the end
        of the next hour. Return the queue states at the end of `hour` and the events of the next hour.

        events: the events of `hour`."""
        if control is not None:
            control()
        self._report_nodes(events)
        states = self.engine.queue_states()
        return states, self.engine.events_until(self._after(hour + 1)) if hour < self.scenario.days * 24 else ()

    def _close_month(self, hour: int) -> None:
        """Close a month as soon as its grace period is over."""
        if month := month_to_close(self.scenario.start_ms, self._after(hour), self._grace_ms):
            close_month(self._ask, self.scenario, month)

    def _ask(self, method: str, path: str, body: object) -> Any:
        return httpx2.request(method, self.url + path, json=body, timeout=None).raise_for_status().json()

    def figures(self) -> LedgerFigures:
        """Query the ledger for the figures of the span."""
        figures: LedgerFigures = self._accountant.call("figures", self.scenario.start_ms, self.scenario.end_ms)
        return figures

    def queues(self) -> dict[str, dict[str, float]]:
        """Return the present state of each queue, as of `QueueState`."""
        return {name: asdict(state) for name, state in sorted(self.engine.queue_states().items())}

    def write_files(self, folder: Path) -> None:
        """Start to write the ledger's files (gputally.demo.worker_processes.LEDGER_FILES), and return at once."""
        self._accountant.send(encode_call("write_files", folder, self.scenario.start_ms, self.scenario.end_ms))

    def files_written(self) -> None:
        """Wait for the end of `write_files`, before any other request. Raises WorkerLost if a file cannot be
        written."""
        self._accountant.result()

    def get(self, path: str) -> str:
        """Return a page of the accountant."""
        return httpx2.get(self.url + path, timeout=None).raise_for_status().text

    def _after(self, hour: int) -> int:
        return self.scenario.start_ms + hour * MS_PER_HOUR

    def _submitted(self, hour: int) -> Sequence[SimulatedJob]:
        """Return the jobs that are submitted in an hour of the run, or before the run for hour 0."""
        first = bisect_right(self._jobs, self._after(hour - 1), key=_SUBMIT_MS) if hour else 0
        return self._jobs[first : bisect_right(self._jobs, self._after(hour), key=_SUBMIT_MS)]

    def _must_deliver_first(self, hour: int, events: Sequence[Event]) -> bool:
        """Return True if the agents must finish their delivery before the machines simulate the hour after `hour`. This
        is so if the accountant does not answer, if an agent ends in the next hour, or if the demo is scraped."""
        faults = self.scenario.faults
        ends = any(isinstance(event, OutageBegan) and event.outage.target == "node" for event in events)
        killed = self._after(hour) < faults.killed_ms <= self._after(hour + 1)
        return self._scraped or hour in faults.away or ends or killed

    def _must_control_first(self, hour: int) -> bool:
        """Return True if the controller must run its cycle for `hour` before the agents deliver the next hour. This is
        so until the first cycle with usage, around an hour in which the accountant does not answer, and if the demo is
        scraped; otherwise the results could differ from run to run."""
        away = self.scenario.faults.away
        return self._scraped or hour in away or hour + 1 in away or self.counts.cycles == self.counts.holds

    def _report_nodes(self, events: Sequence[Event]) -> None:
        """Write to the API server which nodes went down or came back."""
        for event in _of_nodes(events):
            self.plane.node_ready(event.outage.name, ready=isinstance(event, OutageEnded))

    def _deliver_alone(self, hour: int) -> None:
        """Let the agents whose acknowledgements get lost in `hour` deliver their records, one after the other."""
        for name in (node.name for node in self.scenario.nodes if (hour, node.name) in self.scenario.faults.lost_acks):
            self._accountant.call("lose_next_ack")
            sent = self._agents.deliver_alone(name)
            self.resent += sent if self._accountant.call("ack_was_lost") else 0

    def _control(self, hour: int, states: Mapping[str, QueueState], progress: Callable[[int], None]) -> None:
        """Run the scheduler's controller of queues, gputally's controller and the scheduler, in this order.

        states: the queues at the end of the hour."""
        self._clock.advance_to(self._after(hour))
        self.plane.report(states)
        report = self.controller.cycle()
        self._count(report)
        if self._pages:
            self._accountant.send(encode_call("show_cycle", report), _CYCLES)
            self._accountant.result(_CYCLES)
        self.engine.set_weights(self.plane.weights())
        progress(self._after(hour))

    def _count(self, report: CycleReport) -> None:
        self.counts.cycles += 1
        self.counts.holds += report.hold is not None
        self.counts.weights_published += sum(
            outcome.result == "applied" for target in report.targets for outcome in target.outcomes
        )


def _of_nodes(events: Sequence[Event]) -> list[OutageBegan | OutageEnded]:
    return [event for event in events if isinstance(event, OutageBegan | OutageEnded) and event.outage.target == "node"]
