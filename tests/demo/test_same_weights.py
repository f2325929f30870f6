"""The same history gives the same weights, through agents, ledger and API server as in the simulator's own loop.

The scheduler engine runs twice. In one run agents meter it, the accountant books it, and the controller writes its
weights to Queue objects; in the other its usage goes directly into the replay's feedback. There are no faults; the
demo's own tests cover their effect on the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random

import pytest

from accountant.wire.policy_models import Bounds, Policy, QueuePolicy, Targets, WindowSpec
from agent.simulation.simulated_node import H100
from fairshare.controller.cycle_report import CycleReport
from fairshare.simulator.simulated_controller import Feedback
from fairshare.simulator.simulation_model import (
    ControllerView,
    Event,
    GpuSpec,
    SimulatedJob,
    SimulatedNodeSpec,
    Started,
    Stopped,
)
from gputally.base.units import MS_PER_HOUR, MS_PER_MINUTE, MS_PER_SECOND
from gputally.demo.cluster_and_workload import FaultPlan
from gputally.demo.pipeline import Pipeline
from gputally.demo.played_scheduler import played, queue_ref
from gputally.demo.scenario import START_MS, Scenario

TEAMS = ("research", "speech", "vision")
HOURS = 24
NEVER = FaultPlan(frozenset(), frozenset(), "", START_MS - 2, START_MS - 1)


def _policy() -> Policy:
    return Policy(
        window=WindowSpec(size=8 * 3600),
        bounds=Bounds(interval=1800),
        targets=Targets.model_validate({played().section: {"mode": "weight", "apply": "enforce"}}),
        queues=tuple(
            QueuePolicy(name=team, weight=weight, deserved=2.0, team=team, refs=(queue_ref(team),))
            for team, weight in zip(TEAMS, (1.0, 2.0, 3.0), strict=True)
        ),
    )


def _scenario() -> Scenario:
    """Two nodes with more work than fits; the heaviest queue starts late."""
    chance = Random(4)
    nodes = tuple(
        SimulatedNodeSpec(f"n{n}", tuple(GpuSpec(f"GPU-{n}-{g}", H100.name) for g in range(8)), "h100") for n in (1, 2)
    )
    jobs = [
        SimulatedJob(
            f"{team}-{i}", team, START_MS + chance.randrange(late, HOURS * 60) * MS_PER_MINUTE,
            chance.choice((1, 2, 4)), chance.randrange(30, 400) * MS_PER_MINUTE,
        )
        for team, late in zip(TEAMS, (0, 0, 600), strict=True)
        for i in range(60)
    ]  # fmt: skip
    return Scenario(4, START_MS, HOURS // 24, 900, nodes, _policy(), tuple(jobs), (), NEVER)


class _Published(Pipeline):
    """Records the weights in the cluster after every cycle."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        super().__init__(scenario, folder)
        self.seen: list[dict[str, float]] = []

    def _count(self, report: CycleReport) -> None:
        super()._count(report)
        assert report.hold is None
        self.seen.append(self.plane.weights())


class _Held:
    """The GPU-milliseconds of every team, from the engine's events."""

    def __init__(self) -> None:
        self._since: dict[str, int] = {}
        self._used = dict.fromkeys(TEAMS, 0)
        self._running: dict[str, SimulatedJob] = {}

    def see(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Started):
                self._since[event.job.id], self._running[event.job.id] = event.at_ms, event.job
            elif isinstance(event, Stopped):
                del self._running[event.job.id]
                self._used[event.job.queue] += (event.at_ms - self._since.pop(event.job.id)) * event.job.gpus

    def until(self, at_ms: int) -> list[int]:
        """Return GPU-seconds."""
        used = dict(self._used)
        for name, job in self._running.items():
            used[job.queue] += (at_ms - self._since[name]) * job.gpus
        return [used[team] // MS_PER_SECOND for team in TEAMS]


def _in_process(scenario: Scenario) -> list[Mapping[str, float]]:
    """The replay's loop over the demo's engine at the demo's pace: weights apply an hour after they are known."""
    engine, held, gpus = scenario.engine(), _Held(), 16
    feedback = Feedback(scenario.policy)
    held.see(engine.events_until(START_MS))
    held.see(engine.events_until(START_MS + MS_PER_HOUR))
    published: list[Mapping[str, float]] = []
    for hour in range(1, HOURS + 1):
        states = engine.queue_states()
        used = held.until(START_MS + hour * MS_PER_HOUR)
        if hour < HOURS:
            held.see(engine.events_until(START_MS + (hour + 1) * MS_PER_HOUR))
        view = ControllerView(
            hour * 3600, gpus, used, [states[team].allocated for team in TEAMS],
            [states[team].requested for team in TEAMS], [0] * len(TEAMS), [0] * len(TEAMS),
        )  # fmt: skip
        weights = dict(zip(TEAMS, feedback(view), strict=True))
        engine.set_weights(weights)
        published.append(weights)
    return published


def test_the_pipeline_publishes_what_the_simulator_would(tmp_path: Path) -> None:
    scenario = _scenario()
    with _Published(scenario, tmp_path) as pipeline:
        pipeline.run()
    expected = _in_process(scenario)
    assert len(pipeline.seen) == len(expected) == HOURS
    assert len({tuple(weights.items()) for weights in pipeline.seen}) > 5, "weights move"
    for hour, (found, wanted) in enumerate(zip(pipeline.seen, expected, strict=True), 1):
        assert found == pytest.approx(dict(wanted), rel=1e-5), f"hour {hour}"
