"""Builds a run from the user's options: cluster, policy, jobs and faults. Also runs the jobs under static weights.

The module imports only the policy models of the accountant, because the run under static weights is a separate process
that should not load a server.

Deserved quotas are about a quarter of each team's share. The scheduler divides the rest of the GPUs by weight, so the
feedback law can change who gets them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from accountant.wire.policy_models import Bounds, Budget, Policy, QueuePolicy, Targets, WindowSpec
from fairshare.core.queues_and_weights import QueueClaim
from fairshare.simulator import job_traces
from fairshare.simulator.job_traces import teams_of
from fairshare.simulator.scheduler_engine import ClusterSimulation
from fairshare.simulator.simulation_model import WHOLE, Outage, SimulatedJob, SimulatedNodeSpec
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR
from gputally.demo import cluster_and_workload
from gputally.demo.cluster_and_workload import TEAMS, FaultPlan
from gputally.demo.ground_truth import GroundTruth, TrueTotals
from gputally.demo.options import DAYS, MOST_DAYS, DemoOptions
from gputally.demo.played_scheduler import played, queue_ref

WINDOW_S = 7 * MS_PER_DAY // 1000
K = 5.0


def teams_policy() -> Policy:
    """Return the policy of the five teams of the generated workload, with two budgets of a month."""
    rules = _policy([(team.name, float(team.deserved), team.weight) for team in TEAMS])
    return rules.model_copy(
        update={
            "budgets": (
                Budget(name="vision-month", team="vision", limit=Decimal(32_000), currency="USD"),
                Budget(name="research-month", team="research", limit=Decimal(16_000), currency="USD"),
            )
        }
    )


def equal_policy(teams: Sequence[str], gpus: int) -> Policy:
    """Return the policy for the teams of a trace. All weights are equal, and each deserved quota is a quarter of an
    equal share of the GPUs."""
    return _policy([(team, float(gpus // (4 * len(teams))), 1.0) for team in sorted(teams)])


def claims(policy: Policy) -> tuple[QueueClaim, ...]:
    """Return the queues as the scheduler has them before the controller publishes a weight."""
    return tuple(
        QueueClaim(q.name, 0.0, q.deserved, q.limit, q.weight, priority=q.priority, parent=q.parent)
        for q in policy.queues
    )


def _policy(rows: Sequence[tuple[str, float, float]]) -> Policy:
    return Policy(
        schema=1,
        window=WindowSpec(kind="sliding", size=WINDOW_S),
        measure="allocated",
        k=K,
        min_coverage=0.98,
        bounds=Bounds(min_multiplier=0.2, max_multiplier=4.0),
        targets=Targets.model_validate({played().section: {"mode": "weight", "apply": "enforce"}}),
        queues=tuple(
            QueuePolicy(name=name, deserved=deserved, weight=weight, team=name, refs=(queue_ref(name),))
            for name, deserved, weight in rows
        ),
    )


START_MS = 1_792_108_800_000
"""2026-10-16T00:00Z: the agents are installed in mid-month."""
MOST_TEAMS = 64


@dataclass(frozen=True)
class Scenario:
    """Everything on which a run depends."""

    seed: int
    start_ms: int
    days: int
    interval_s: int
    nodes: tuple[SimulatedNodeSpec, ...]
    policy: Policy
    jobs: tuple[SimulatedJob, ...]
    outages: tuple[Outage, ...]
    faults: FaultPlan

    @property
    def end_ms(self) -> int:
        return self.start_ms + self.days * 24 * MS_PER_HOUR

    def engine(self) -> ClusterSimulation:
        """Return the scheduler in its initial state, with the weights of the policy file."""
        return ClusterSimulation(self.nodes, claims(self.policy), self.jobs, outages=self.outages)


def build(options: DemoOptions) -> Scenario:
    """Build the scenario. Raises fairshare.simulator.job_traces.TraceError for a trace that cannot be replayed."""
    nodes = cluster_and_workload.nodes()
    if options.trace is None:
        days = options.days or DAYS
        jobs = cluster_and_workload.generate(options.seed, START_MS, days, whole_gpus(nodes))
        rules = teams_policy()
    else:
        jobs = job_traces.load(options.trace, START_MS)
        days = options.days or min(MOST_DAYS, 1 + (jobs[-1].submit_ms - START_MS) // MS_PER_DAY)
        teams = teams_of(jobs)
        if len(teams) > MOST_TEAMS:
            raise job_traces.TraceError(
                f"{options.trace}: {len(teams)} teams are more than the demo's {MOST_TEAMS}: leave out some teams"
            )
        rules = equal_policy(teams, whole_gpus(nodes))
    outages = cluster_and_workload.outages(START_MS, days)
    broken = {outage.name for outage in outages}
    without_outage = [node.name for node in nodes if not broken & {node.name, *(gpu.uuid for gpu in node.gpus)}]
    return Scenario(
        seed=options.seed,
        start_ms=START_MS,
        days=days,
        interval_s=options.interval_s,
        nodes=nodes,
        policy=rules,
        jobs=tuple(jobs),
        outages=outages,
        faults=cluster_and_workload.plan(options.seed, without_outage, START_MS, days),
    )


def whole_gpus(nodes: tuple[SimulatedNodeSpec, ...]) -> int:
    """Return the number of GPUs that are allocated whole."""
    return sum(gpu.shapes == (WHOLE,) for node in nodes for gpu in node.gpus)


class Baseline:
    """Runs the same jobs under static weights, to compare a cluster with the controller to one without it."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario

    def totals(self) -> TrueTotals:
        """Return the true totals of the whole run."""
        scenario = self._scenario
        truth = GroundTruth(scenario.nodes, scenario.start_ms, scenario.interval_s * 1000)
        for event in scenario.engine().events_until(scenario.end_ms):
            truth.apply(event)
        truth.finish(scenario.end_ms)
        return truth.totals

    def close(self) -> None:
        """Do nothing: there is nothing to close."""
