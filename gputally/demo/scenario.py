"""From what the user asked for to everything a run depends on, and what becomes of it without the controller.

Knows of the accountant only what a policy looks like: the run under static weights has a process of its own,
which should not begin by loading a server.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from accountant.wire import Policy
from agent.units import MS_PER_DAY, MS_PER_HOUR
from fairshare.explain import tracefile
from fairshare.simulator.cluster import WHOLE, NodeSpec, Outage
from fairshare.simulator.engine import Engine
from fairshare.simulator.jobs import Job
from fairshare.simulator.trace import teams_of
from gputally.demo import cluster, faults, policy, workload
from gputally.demo.faults import FaultPlan
from gputally.demo.truth import Books, Truth

START_MS = 1_790_812_800_000
"""2026-10-01T00:00Z."""
DAYS = 31
"""The whole of October: the report is that of a month."""
MOST_DAYS = 366
MOST_TEAMS = 64


@dataclass(frozen=True, slots=True)
class Options:
    """days None: 31, or as long as the trace."""

    days: int | None = None
    interval_s: int = 900
    seed: int = 1
    trace: Path | None = None


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
        return Engine(self.nodes, policy.claims(self.policy), self.jobs, outages=self.outages)


def build(options: Options) -> Scenario:
    """Raises fairshare.explain.tracefile.TraceError for a trace that cannot be replayed."""
    nodes = cluster.nodes()
    if options.trace is None:
        days = options.days or DAYS
        jobs = workload.generate(options.seed, START_MS, days, whole_gpus(nodes))
        rules = policy.teams_policy()
    else:
        jobs = tracefile.load(options.trace, START_MS)
        days = options.days or min(MOST_DAYS, 1 + (jobs[-1].submit_ms - START_MS) // MS_PER_DAY)
        teams = teams_of(jobs)
        if len(teams) > MOST_TEAMS:
            raise tracefile.TraceError(f"{options.trace}: {len(teams)} teams, the demo takes at most {MOST_TEAMS}")
        rules = policy.equal_policy(teams, whole_gpus(nodes))
    outages = cluster.outages(START_MS, days)
    broken = {outage.name for outage in outages}
    steady = [node.name for node in nodes if not broken & {node.name, *(gpu.uuid for gpu in node.gpus)}]
    return Scenario(
        seed=options.seed,
        start_ms=START_MS,
        days=days,
        interval_s=options.interval_s,
        nodes=nodes,
        policy=rules,
        jobs=tuple(jobs),
        outages=outages,
        faults=faults.plan(options.seed, steady, START_MS, days),
    )


def whole_gpus(nodes: tuple[NodeSpec, ...]) -> int:
    """GPUs that are handed out whole."""
    return sum(gpu.shapes == (WHOLE,) for node in nodes for gpu in node.gpus)


class Baseline:
    """The same jobs under static weights: what would have happened without the controller."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario

    def books(self) -> Books:
        """Of the whole span."""
        scenario = self._scenario
        truth = Truth(scenario.nodes, scenario.start_ms, scenario.interval_s * 1000)
        for event in scenario.engine().run_until(scenario.end_ms):
            truth.see(event)
        truth.finish(scenario.end_ms)
        return truth.books

    def close(self) -> None:
        """Nothing to let go of."""
