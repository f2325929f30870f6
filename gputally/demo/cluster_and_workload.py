"""Defines the demo's cluster and planned faults, and generates its jobs and arrivals from published distributions.

The cluster has eight nodes of eight GPUs: four with H100, three with A100, and one more with A100 that the cloud may
take back (pool `spot`). On the third A100 node two GPUs are partitioned by MIG and one is time-sliced. These three
serve notebooks and inference. MIG profiles and slice counts: NVIDIA MIG user guide, A100 80GB.

Besides outages of nodes and of a GPU, there are three kinds of planned faults. Lost acknowledgements make agents send
booked records again. An agent is killed and comes back minutes later. The accountant does not answer for an hour, in
which the agents spool.

The workload is synthetic, with figures from published traces:

* Run times are lognormal with the median of 24 min and the 90th percentile of 9.2 h of the Philly trace (Jeon et al.,
  USENIX ATC 2019), cut at 2 days. As in that trace, large gangs run longer.
* Most jobs take one GPU and few GPU-hours (Philly: 89 % of the jobs, 21 % of the GPU-hours). Jobs of 5 GPUs and more
  take about 60 % of the GPU-hours (Philly: 61 %).
* Jobs arrive in campaigns (a sweep is many jobs at once), which follow the working day and the sprints of a team. Hours
  therefore differ far more than in a Poisson process (Philly: index of dispersion 189).
* The utilisation of training jobs follows Philly's distribution (quartiles 0, 48, 92 %, 90th percentile 99 %).
  Notebooks have the utilisation of idle interactive pods (Alibaba GenAI: mean 7 %).

The teams together want `LOAD` times the capacity of the GPUs that are not divided, in bursts, so that queues wait and
shares decide. People look at their queue before they submit (`_Patience`), so no queue asks for many times the cluster.
The result is deterministic: every team draws from its own random stream, seeded by (seed, team)."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from random import Random
from zlib import crc32

from accountant.ledger.team_assignment import USER_KEY
from agent.core.readings import Gpu
from agent.simulation.simulated_node import A100, H100, MIG_PROFILES, MODELS, make_gpu
from fairshare.simulator.simulation_model import WHOLE, GpuSpec, JobKind, Outage, SimulatedJob, SimulatedNodeSpec
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR, MS_PER_MINUTE, MS_PER_SECOND

CLUSTER = "demo"
REGION = "eu-demo-1"
SHARED = "shared"
EXPORTED_LABELS = ("project", "cost-centre")
"""Labels of the pods that are dimensions of the demo's ledger."""
_LEFT_OPEN_MS = 36 * MS_PER_HOUR
REPLICAS = 4
"""Number of replicas of a time-sliced GPU that the device plugin offers to the kubelet."""
GEOMETRY = ("3g.40gb", "2g.20gb", "1g.10gb", "1g.10gb")


def nodes() -> tuple[SimulatedNodeSpec, ...]:
    """Return the eight nodes, those with H100 first."""
    partitioned = {5: GEOMETRY, 6: GEOMETRY, 7: (SHARED,) * REPLICAS}
    h100 = [_node(f"h100-{n}", H100.name) for n in range(1, 5)]
    a100 = [_node("a100-1", A100.name), _node("a100-2", A100.name), _node("a100-3", A100.name, partitioned)]
    return (*h100, *a100, _node("spot-1", A100.name, pool="spot"))


def _node(name: str, model: str, shapes: dict[int, tuple[str, ...]] | None = None, pool: str = "") -> SimulatedNodeSpec:
    gpus = (GpuSpec(f"GPU-{name}-{i}", model, (shapes or {}).get(i, (WHOLE,))) for i in range(8))
    return SimulatedNodeSpec(name, tuple(gpus), pool or name.split("-")[0])


def devices(node: SimulatedNodeSpec) -> tuple[Gpu, ...]:
    """Return the node's GPUs as its agent sees them; slot `index` of a partitioned GPU is the MIG instance at
    `index`."""
    models = {model.name: model for model in MODELS.values()}
    return tuple(
        make_gpu(spec.uuid, index, models[spec.model], [shape for shape in spec.shapes if shape in MIG_PROFILES])
        for index, spec in enumerate(node.gpus)
    )


def compute_of(shape: str) -> int:
    """Return the compute slices of a MIG profile, out of the seven of its GPU."""
    return MIG_PROFILES[shape][0]


def parts() -> dict[str, Fraction]:
    """Return the fraction of a GPU that a slot has, by shape, for all shapes except a whole GPU."""
    return {SHARED: Fraction(1, REPLICAS)} | {shape: Fraction(compute_of(shape), 7) for shape in GEOMETRY}


def outages(start_ms: int, days: int) -> tuple[Outage, ...]:
    """Return the outages of a run: of a node for some hours, of the spot node twice, and of one GPU for a day.

    The times depend on the length of the run, so that a short run has outages too. They are off the interval grid."""
    span = days * MS_PER_DAY

    def at(part: float) -> int:
        """Return the time at `part` of the run, moved off the edge of an interval."""
        return start_ms + int(span * part) // MS_PER_MINUTE * MS_PER_MINUTE + 7_321

    unit = min(MS_PER_HOUR, span // 96)
    late = max(0.71, 1 - 6 / days)  # in the last week of a long run, and before the last hours of a short one
    return (
        Outage("node", "h100-3", at(0.40), at(0.40) + 5 * unit + 911_000, "power supply failed"),
        Outage("node", "spot-1", at(0.22), at(0.22) + 3 * unit + 47_000, "spot capacity reclaimed"),
        Outage("node", "spot-1", at(late), at(late) + 9 * unit + 128_500, "spot capacity reclaimed"),
        Outage("gpu", "GPU-a100-2-4", at(0.55), at(0.55) + 24 * unit + 35_250, "Xid 79: GPU has fallen off the bus"),
    )


_HOURS_PER_LOST_ACK = 24


@dataclass(frozen=True)
class FaultPlan:
    """The planned faults of a run.

    lost_acks: lost acknowledgements, as (hour of the run, node).
    away: hours of the run in which the accountant does not answer.
    killed_ms, back_ms: the times at which the agent on `killed_node` is killed and comes back."""

    lost_acks: frozenset[tuple[int, str]]
    away: frozenset[int]
    killed_node: str
    killed_ms: int
    back_ms: int


def plan(seed: int, nodes: Sequence[str], start_ms: int, days: int) -> FaultPlan:
    """Return the faults of a run: about one lost acknowledgement per day, one hour in which the accountant does not
    answer, and one killed agent. Their times are apart from each other, and no multiples of the interval.

    nodes: at least two nodes without outages; the agent of the first one is killed."""
    random = Random(f"{seed}/faults")  # noqa: S311 - the demo must be repeatable
    hours = days * 24
    away = int(hours * 0.83)
    possible = [hour for hour in range(2, hours) if abs(hour - away) > 2]
    lost = random.sample(possible, max(2, hours // _HOURS_PER_LOST_ACK))
    killed_ms = start_ms + int(days * MS_PER_DAY * 0.62) // MS_PER_MINUTE * MS_PER_MINUTE + 4_567
    return FaultPlan(
        lost_acks=frozenset((hour, random.choice(nodes[1:])) for hour in lost),
        away=frozenset({away}),
        killed_node=nodes[0],
        killed_ms=killed_ms,
        back_ms=killed_ms + 11 * MS_PER_MINUTE + 890,
    )


LOAD = 1.25
"""GPU-hours that the teams want over those of the whole GPUs. They keep a part for later, and at last for never."""
_WHOLE_GPUS, _WAITING = 61, 0.3
"""The GPUs that are not divided, and the part of those that a team wants for which its jobs may wait before its people
keep further ones for later."""
_SWEEP_GPUS = 32
"""GPUs that one campaign asks for at most."""
_MIG_STEP, _SHARED_STEP = 7, 4
"""Steps of the utilisation in permille of a part of a GPU, so that the busy time is whole microseconds of the GPU."""
_MEDIAN_MS = 24 * MS_PER_MINUTE
_SIGMA = 2.447
"""ln(9.2 h / 24 min) / 1.2816: lognormal through the median and the 90th percentile."""
_LONGEST_MS = 2 * MS_PER_DAY
_UTILISATION = ((0.0, 0.0), (0.25, 0.06), (0.5, 0.48), (0.75, 0.92), (0.9, 0.99), (1.0, 1.0))
"""Quantiles of GPU utilisation over jobs; the first quartile is nearly idle instead of idle."""
_HOURS = (3, 2, 2, 2, 2, 3, 4, 6, 9, 12, 13, 13, 12, 13, 14, 14, 13, 11, 9, 7, 6, 5, 4, 4)
"""Relative number of campaigns per hour of the day."""


@dataclass(frozen=True)
class Team:
    """One team: the quota and the weight of its queue, and its workload.

    share: the team's part of all offered GPU-hours.
    gangs: sizes of jobs, as (GPUs, relative GPU-hours).
    sweep: mean number of jobs in a campaign.
    sprints: the spans in which the team works, as (start, end) parts of the run. Outside them it submits few jobs.
    notebooks: number of people with a notebook on a part of a GPU.
    hoarders: number of people with a notebook on a whole GPU.
    services: inference services that always run, as (shape, utilisation in permille).
    short_per_day: number of pods per day that run for seconds to minutes.
    words: the team's projects, from which the jobs get their names.
    people: the users of the team.
    cost_centre: pays for the team."""

    name: str
    deserved: int
    weight: float
    share: float
    gangs: tuple[tuple[int, float], ...]
    sweep: float = 1.5
    sprints: tuple[tuple[float, float], ...] = ((0.0, 1.0),)
    notebooks: int = 0
    hoarders: int = 0
    services: tuple[tuple[str, int], ...] = ()
    short_per_day: int = 0
    words: tuple[str, ...] = field(default=("train",))
    people: tuple[str, ...] = ()
    cost_centre: str = ""


TEAMS = (
    Team(
        "llm", 4, 3.0, 0.32, ((8, 4), (16, 5), (4, 1)), 1.2, ((0.10, 0.36), (0.55, 0.95)),
        words=("pretrain", "sft", "long-context", "reward"), people=("amara", "bjorn", "chen", "dalia"),
        cost_centre="4100",
    ),
    Team(
        "vision", 4, 3.0, 0.36, ((1, 3), (2, 2), (4, 2), (8, 3)), 3.0, notebooks=1,
        words=("detector", "segment", "video", "depth"), people=("elif", "farid", "greta"), cost_centre="4100",
    ),
    Team(
        "speech", 3, 2.0, 0.14, ((1, 3), (2, 3), (4, 4)), 1.8, notebooks=2, hoarders=2,
        words=("asr", "tts", "codec"), people=("hana", "ivo", "jun", "kofi"), cost_centre="4200",
    ),
    Team(
        "research", 3, 2.0, 0.13, ((1, 6), (2, 2), (8, 2)), 9.0, ((0.0, 0.35), (0.5, 0.95)), notebooks=4, hoarders=3,
        words=("ablation", "sweep", "probe", "eval"),
        people=("lena", "marco", "nadia", "omar", "pia", "quentin", "rosa"), cost_centre="7000",
    ),
    Team(
        "platform", 3, 1.0, 0.05, ((1, 5), (2, 5)), 1.5, notebooks=1, short_per_day=40,
        services=(("3g.40gb", 410), ("3g.40gb", 280), ("2g.20gb", 350), (SHARED, 220)),
        words=("image-build", "bench", "nightly"), people=("sven", "tara"), cost_centre="7000",
    ),
)  # fmt: skip
_OF_JOB = re.compile(r"[a-z]+-(?P<word>\D+)-(?P<number>\d+)")
_PROJECTS: dict[JobKind, str] = {"notebook": "exploration", "inference": "serving", "short": "ci"}


def labels_of(job: SimulatedJob) -> dict[str, str]:
    """Return the labels that the job's pods have: its name and, if it is of one of TEAMS, who runs it, for which
    project, and which cost centre pays."""
    labels = {"app.kubernetes.io/name": job.id}
    team, found = _TEAMS.get(job.queue), _OF_JOB.match(job.id)
    if team is not None and found is not None:
        labels |= {
            USER_KEY: team.people[(int(found["number"]) - 1) % len(team.people)],
            "project": _PROJECTS.get(job.kind, found["word"]),
            "cost-centre": team.cost_centre,
        }
    return labels


_SAVING_GPUS = 4


def saves(job: SimulatedJob) -> bool:
    """Return True if a job writes checkpoints, and says when: large training jobs do."""
    return job.kind == "training" and job.gpus >= _SAVING_GPUS


_FAILURES = {0: (137, "OOMKilled"), 1: (1, "Error"), 2: (1, "Error")}
_OF_JOBS = 40
"""Of so many jobs of teams, one ends for each of `_FAILURES`."""


def failure(job: SimulatedJob) -> tuple[int, str] | None:
    """Return the exit code and the reason with which a container of the job ends at the end of its run; None if it ends
    well. Only programs that end by themselves fail: those that train and those that run for a short time."""
    if job.kind not in ("training", "short") or job.queue not in _TEAMS or _OF_JOB.match(job.id) is None:
        return None
    return _FAILURES.get(crc32(job.id.encode()) % _OF_JOBS)


_TEAMS = {team.name: team for team in TEAMS}
SANDBOX = "sandbox"
"""Namespace of a pod that belongs to no queue and no team, because its labels name no queue."""


def generate(seed: int, start_ms: int, days: int, whole_gpus: int) -> list[SimulatedJob]:
    """Return all jobs of a run, in the order of their submission."""
    offered = LOAD * whole_gpus * days * 24.0
    jobs: list[SimulatedJob] = []
    for team in TEAMS:
        random = Random(f"{seed}/{team.name}")  # noqa: S311 - the demo must be repeatable
        jobs += _team(random, team, start_ms, days, offered)
    jobs += _forgotten(start_ms, days)
    return sorted(jobs, key=lambda job: (job.submit_ms, job.id))


def _team(random: Random, team: Team, start_ms: int, days: int, offered_hours: float) -> Iterator[SimulatedJob]:
    yield from _campaigns(random, team, start_ms, days, offered_hours * team.share)
    yield from _short_pods(random, team, start_ms, days)
    yield from _notebooks(random, team, start_ms, days)
    yield from _services(random, team, start_ms, days)


def _campaigns(random: Random, team: Team, start_ms: int, days: int, hours: float) -> Iterator[SimulatedJob]:
    """Generate training campaigns until the team has wanted its GPU-hours for each gang size. Those that nobody
    submits before the end of the run, because the team waits for GPUs, are left out.

    Only the time inside the run counts, so that long jobs at its end do not distort the load."""
    end_ms = start_ms + days * MS_PER_DAY
    calendar = _Calendar(team.sprints, start_ms, days)
    parts = sum(part for _, part in team.gangs)
    campaigns: list[list[SimulatedJob]] = []
    for gpus, part in team.gangs:
        left = hours * part / parts
        while left > 0:
            at = calendar.draw(random)
            typical = _run_time(random, gpus)
            word = random.choice(team.words)
            trials = 1 + int(random.expovariate(1 / (team.sweep - 1))) if team.sweep > 1 and gpus <= 8 else 1
            trials = min(trials, max(1, _SWEEP_GPUS // gpus))
            utilisation = _quantile(_UTILISATION, random.random())
            campaign = []
            for trial in range(trials):
                at += random.randrange(200, 20_000) if trial else 0
                duration = max(61_003, min(_LONGEST_MS, int(typical * random.lognormvariate(0.0, 0.35))))
                permille = _permille(utilisation * random.uniform(0.92, 1.04))
                name = f"{team.name}-{word}-{len(campaigns) + 1:03d}" + (f"-{trial}" if trials > 1 else "")
                campaign.append(SimulatedJob(name, team.name, at, gpus, duration, utilisation_permille=permille))
                left -= gpus * max(0, min(duration, end_ms - at)) / MS_PER_HOUR
            campaigns.append(campaign)
    patience = _Patience(team)
    for campaign in sorted(campaigns, key=lambda jobs: (jobs[0].submit_ms, jobs[0].id)):
        later_ms = patience.submit(campaign) - campaign[0].submit_ms
        for job in campaign:
            if job.submit_ms + later_ms < end_ms:
                yield replace(job, submit_ms=job.submit_ms + later_ms)


class _Patience:
    """When a team submits its campaigns. People look at their queue first: while jobs of their team wait for more GPUs
    than it usually holds, they keep the next campaign for later.

    The class estimates the wait as if the team had a part of the cluster for itself."""

    def __init__(self, team: Team) -> None:
        self._gpus = max(*(size for size, _ in team.gangs), round(_WHOLE_GPUS * team.share))
        self._free_ms = [0] * self._gpus
        """When each GPU of the team's part is free, in order of time."""
        self._starts: list[tuple[int, int]] = []
        """The starts of jobs that wait, as (time, GPUs), in a heap."""
        self._waiting = 0

    def submit(self, campaign: Sequence[SimulatedJob]) -> int:
        """Return the time at which the first job of the campaign is submitted, and count the campaign as submitted."""
        at_ms = campaign[0].submit_ms
        while self._starts and (self._starts[0][0] <= at_ms or self._waiting > self._gpus * _WAITING):
            start_ms, gpus = heappop(self._starts)
            at_ms = max(at_ms, start_ms)
            self._waiting -= gpus
        for job in campaign:
            start_ms = max(at_ms, self._free_ms[job.gpus - 1])
            self._free_ms[: job.gpus] = [start_ms + job.duration_ms] * job.gpus
            self._free_ms.sort()
            heappush(self._starts, (start_ms, job.gpus))
            self._waiting += job.gpus
        return at_ms


def _short_pods(random: Random, team: Team, start_ms: int, days: int) -> Iterator[SimulatedJob]:
    """Generate pods of seconds to a few minutes, each inside one metering interval: smoke tests of a build system."""
    calendar = _Calendar(((0.0, 1.0),), start_ms, days)
    for number in range(team.short_per_day * days):
        duration = int(min(random.lognormvariate(4.1, 0.9), 600.0) * MS_PER_SECOND) + random.randrange(1_000)
        permille = random.randrange(250, 950)
        yield SimulatedJob(
            f"{team.name}-smoke-{number:04d}", team.name, calendar.draw(random), 1, duration, "short",
            utilisation_permille=permille,
        )  # fmt: skip


def _notebooks(random: Random, team: Team, start_ms: int, days: int) -> Iterator[SimulatedJob]:
    """Generate notebooks, which open in the morning of a working day, are hardly used, and close in the evening. A
    fifth of them runs through the night."""
    for person in range(team.notebooks + team.hoarders):
        hoards = person >= team.notebooks
        shape = WHOLE if hoards else random.choice((SHARED, SHARED, "1g.10gb", "2g.20gb"))
        for day in range(days):
            morning = start_ms + day * MS_PER_DAY
            if _weekend(morning) or random.random() < 0.15:
                continue
            opened = morning + int(random.uniform(7.5, 10.5) * MS_PER_HOUR)
            forgotten = random.random() < 0.2
            hours = random.uniform(14.0, 22.0) if forgotten else random.uniform(5.0, 9.5)
            yield SimulatedJob(
                f"{team.name}-notebook-{person + 1}-{day + 1:02d}", team.name, opened, 1, int(hours * MS_PER_HOUR),
                "notebook", shape=shape, utilisation_permille=_in_steps(random.choice((0, 8, 28, 41, 70, 182)), shape),
                preemptible=not hoards,
            )  # fmt: skip


def _services(random: Random, team: Team, start_ms: int, days: int) -> Iterator[SimulatedJob]:
    """Generate inference services. Each runs for almost a day, and the next one starts a day after its start."""
    for number, (shape, utilisation) in enumerate(team.services):
        for day in range(days):
            at = start_ms + day * MS_PER_DAY + number * 97_000 + random.randrange(1_000)
            yield SimulatedJob(
                f"{team.name}-serve-{number + 1}-{day + 1:02d}", team.name, at, 1, MS_PER_DAY - 1_000, "inference",
                shape=shape, utilisation_permille=_in_steps(utilisation + random.randrange(-40, 41), shape),
            )  # fmt: skip


def _forgotten(start_ms: int, days: int) -> list[SimulatedJob]:
    """Generate one pod without a team, for a fifth of the run, and a notebook that does nothing from a day and a half
    before the end."""
    end_ms = start_ms + days * MS_PER_DAY
    at = start_ms + int(days * MS_PER_DAY * 0.3) + 13_579
    opened_ms = max(start_ms, end_ms - _LEFT_OPEN_MS) + 24_680
    return [
        SimulatedJob("debug-shell", SANDBOX, at, 1, int(days * MS_PER_DAY * 0.2), "notebook", utilisation_permille=15),
        SimulatedJob(f"speech-notebook-4-{days + 1:02d}", "speech", opened_ms, 1, _LONGEST_MS, "notebook",
            utilisation_permille=0, preemptible=False),
    ]  # fmt: skip


class _Calendar:
    """Draws times with the intensity of a team's work, which depends on the hour of the day, the weekend and the
    sprints."""

    def __init__(self, sprints: Sequence[tuple[float, float]], start_ms: int, days: int) -> None:
        self._start_ms = start_ms
        weights = []
        for hour in range(days * 24):
            at = start_ms + hour * MS_PER_HOUR
            part = hour / (days * 24)
            busy = any(begin <= part < end for begin, end in sprints)
            weekend = 0.35 if _weekend(at) else 1.0
            weights.append(_HOURS[at // MS_PER_HOUR % 24] * weekend * (1.0 if busy else 0.04))
        self._sums = list(accumulate(weights))

    def draw(self, random: Random) -> int:
        hour = bisect_left(self._sums, random.random() * self._sums[-1])
        return self._start_ms + hour * MS_PER_HOUR + random.randrange(MS_PER_HOUR)


def _weekend(at_ms: int) -> bool:
    """Return True if a time is on a weekend; 1970-01-01 was a Thursday."""
    return (at_ms // MS_PER_DAY + 3) % 7 >= 5


def _run_time(random: Random, gpus: int) -> float:
    """Draw a lognormal run time in milliseconds. The median grows with the gang, because small jobs are mostly trials
    of large ones."""
    return min(_LONGEST_MS, _MEDIAN_MS * math.sqrt(gpus) * math.exp(random.gauss(0.0, _SIGMA)))


def _quantile(points: Sequence[tuple[float, float]], p: float) -> float:
    """Interpolate linearly between the given quantiles."""
    for (p0, x0), (p1, x1) in pairwise(points):
        if p <= p1:
            return x0 + (x1 - x0) * (p - p0) / (p1 - p0)
    return points[-1][1]


def _permille(utilisation: float) -> int:
    return max(0, min(1000, round(utilisation * 1000)))


def _in_steps(permille: int, shape: str) -> int:
    step = 1 if shape == WHOLE else _SHARED_STEP if shape == SHARED else _MIG_STEP
    return permille // step * step
