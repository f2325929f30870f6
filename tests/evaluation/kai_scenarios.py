"""Reads and runs the scenario files of KAI's own time-based simulator, so that a scenario runs in both simulators.

The YAML has `Cycles, WindowSize, HalfLifePeriod` (seconds), `KValue`, `Nodes: [{GPUs, Count}]`, `Queues: [{Name,
Parent, Priority, DeservedGPUs, Weight}]`, `Jobs: {queue: {GPUs (per pod), NumPods, NumJobs}}`. The CSV has
`Time,QueueID,Allocation,FairShare`.

A cycle takes one second. As in KAI's simulator, jobs never end and every pod is scheduled separately. Under the law
`kai` the scheduler counts history itself (with the file's k, in whole GPUs), under `static` k is 0. The weights are
those of the file, except in the controller's turns. A turn lasts a fortieth of the scenario's window, where a cluster
has four hours and a week. All nodes form one pool: they determine only the number of GPUs and the largest pod."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from accountant.wire.policy_models import Policy, QueuePolicy, TurnPolicy, WindowSpec
from fairshare.core.queues_and_weights import UNLIMITED, DivisionProblem, QueueClaim
from fairshare.laws.division import divide, fair_shares
from fairshare.simulator.scheduler_engine import replay
from fairshare.simulator.simulated_controller import Feedback, SlidingUsage
from fairshare.simulator.simulation_model import (
    ControllerView,
    Dividing,
    ReplayPool,
    ReplayRecord,
    Rules,
    workload_of_rows,
)
from gputally.base.errors import DivisionError
from gputally.base.units import MS_PER_SECOND
from gputally.base.yaml_file import Document, FileFault
from gputally.server.config_loading import Model, validate


def whole_gpus(names: Sequence[str], deserved: Sequence[float], priorities: Sequence[int] = ()) -> Dividing:
    """Return a function that divides whole GPUs as KAI does without history (k = 0).

    deserved, priorities: one per queue, in the order of `names`; without priorities every queue has 100."""

    def dividing(view: ControllerView, weights: Sequence[float]) -> list[float]:
        claims = tuple(
            QueueClaim(
                name,
                view.asked[q],
                deserved[q],
                weight=weights[q],
                priority=priorities[q] if priorities else 100,
                creation=q,
            )
            for q, name in enumerate(names)
        )
        shares = divide(DivisionProblem("cycle", view.capacity, 0.0, claims), as_source=True).shares
        return [shares[name] for name in names]

    return dividing


LAWS = ("static", "kai")
_FOREVER_S = 10**9
_MOST_CYCLES = 1_000_000
_MOST_GPUS, _MOST_PODS = 1_000_000, 1_000_000
"""The largest number of GPUs of all nodes, and of pods of one queue. A larger number is probably a typing error and
could fill the memory."""
_MOST_AMOUNT = 1e9


def _quota(value: float) -> float:
    if value < 0 and value != UNLIMITED:
        raise ValueError(f"{value:g} is neither -1 (unlimited) nor 0 or more")
    return value


class _Keys(Model, coerce_numbers_to_str=True):
    """A mapping of the file. As in KAI, upper and lower case of keys are equal, and a null counts as a missing key."""

    @model_validator(mode="before")
    @classmethod
    def _spelt(cls, data: object) -> object:
        if not isinstance(data, Mapping):
            return data
        spelt = {str(field.alias).lower(): field.alias for field in cls.model_fields.values()}
        return {spelt.get(str(key).lower(), str(key)): value for key, value in data.items() if value is not None}


class _Node(_Keys):
    """An entry of `Nodes`. KAI ignores `Count` and makes one node of every entry, and so does this module."""

    gpus: int = Field(alias="GPUs", ge=1, le=_MOST_GPUS)
    count: int = Field(default=1, alias="Count")


class _Queue(_Keys):
    name: str = Field(alias="Name", min_length=1)
    parent: str = Field(default="", alias="Parent")
    priority: int = Field(default=100, alias="Priority", ge=0)
    deserved: Annotated[float, Field(alias="DeservedGPUs", le=_MOST_AMOUNT), AfterValidator(_quota)] = 0.0
    weight: float = Field(default=1.0, alias="Weight", ge=0, le=_MOST_AMOUNT)

    def claim(self, creation: int) -> QueueClaim:
        return QueueClaim(
            self.name, 0.0, self.deserved, weight=self.weight, priority=self.priority, creation=creation,
            parent=self.parent or None,
        )  # fmt: skip


class _Jobs(_Keys):
    gpus: int = Field(alias="GPUs", ge=1)
    pods: int = Field(default=1, alias="NumPods", ge=0, le=_MOST_PODS)
    jobs: int = Field(default=1, alias="NumJobs", ge=0, le=_MOST_PODS)


class _File(_Keys):
    cycles: int = Field(default=100, alias="Cycles", ge=1, le=_MOST_CYCLES)
    window_s: int = Field(default=5, alias="WindowSize", ge=1)
    half_life_s: int = Field(default=0, alias="HalfLifePeriod", ge=0)
    k: float = Field(default=1.0, alias="KValue", ge=0, le=_MOST_AMOUNT)
    nodes: list[_Node] = Field(alias="Nodes", min_length=1)
    queues: list[_Queue] = Field(alias="Queues", min_length=1)
    jobs: dict[str, _Jobs] = Field(default={}, alias="Jobs")


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario of KAI's simulator.

    gpus: the GPUs of every node.
    queues: the leaf queues, with their parents.
    pods: the GPUs of every pod, by queue.
    departments: the queues that have children."""

    cycles: int
    window_s: int
    half_life_s: int | None
    k: float
    gpus: tuple[int, ...]
    queues: tuple[QueueClaim, ...]
    pods: Mapping[str, tuple[int, ...]]
    departments: tuple[QueueClaim, ...] = ()

    @property
    def capacity(self) -> int:
        return sum(self.gpus)

    @property
    def divided(self) -> bool:
        """Return True if the leaf queues have different parents."""
        return len({queue.parent for queue in self.queues}) > 1

    def leaves_of(self, department: str) -> list[int]:
        """Return the indices in `queues` of the leaves below a department."""
        parents = {queue.name: queue.parent for queue in (*self.departments, *self.queues)}
        leaves = []
        for q, queue in enumerate(self.queues):
            ancestor = queue.parent
            while ancestor is not None and ancestor != department:
                ancestor = parents[ancestor]
            if ancestor is not None:
                leaves.append(q)
        return leaves


def parse(document: Document) -> Scenario:
    """Return the scenario of a YAML document. Raises FileFault for a bad key, DivisionError for a bad queue tree."""
    file = validate(document, _File)
    gpus = tuple(node.gpus for node in file.nodes)
    if (total := sum(gpus)) > _MOST_GPUS:
        raise _fault(document, "Nodes", f"{total} GPUs in all nodes, and at most {_MOST_GPUS} are allowed")
    parents = {queue.parent for queue in file.queues}
    claims = tuple(each.claim(i) for i, each in enumerate(q for q in file.queues if q.name not in parents))
    departments = tuple(each.claim(i) for i, each in enumerate(file.queues) if each.name in parents)
    divide(DivisionProblem("tree", 0.0, 0.0, (*departments, *claims)))
    pods: dict[str, tuple[int, ...]] = {}
    for name, job in file.jobs.items():
        count = job.pods * job.jobs
        if name not in {claim.name for claim in claims}:
            raise _fault(document, f"Jobs.{name}", "no leaf queue has this name")
        if count > _MOST_PODS:
            raise _fault(document, f"Jobs.{name}", f"{count} pods, and at most {_MOST_PODS} are allowed")
        pods[name] = (job.gpus,) * count
    return Scenario(file.cycles, file.window_s, file.half_life_s or None, file.k, gpus, claims, pods, departments)


def _fault(document: Document, where: str, message: str) -> FileFault:
    return FileFault([f"{document.place(tuple(where.split('.', 1)))}: {where}: {message}"])


def run(scenario: Scenario, law: str, *, turns: bool = False) -> ReplayRecord:
    """Run a scenario under a law of `LAWS`. Turns need leaves of one parent.

    Raises ValueError for an unknown law, DivisionError for turns among several departments."""
    if law not in LAWS:
        raise ValueError(f"no law {law!r}; one of {', '.join(LAWS)}")
    if scenario.divided and turns:
        raise DivisionError("Queues: leaf queues with different parents can run only without turns")
    queues = scenario.queues
    names = [queue.name for queue in queues]
    rows = [
        (0, gpus, _FOREVER_S, q)
        for q, name in enumerate(names)
        for gpus in scenario.pods.get(name, ())
        if gpus <= max(scenario.gpus)
    ]
    pods = workload_of_rows(names, rows, left_out=sum(map(len, scenario.pods.values())) - len(rows))
    rules = Rules(checkpoint_ms=MS_PER_SECOND, restart_ms=0, min_runtime_ms=0)
    pool = ReplayPool(scenario.capacity, _quotas(scenario), [queue.weight for queue in queues], rules=rules)
    k = scenario.k if law == "kai" else 0.0
    steering = Feedback(_policy(scenario), scheduler_k=k, turns_only=True) if turns else None
    dividing = _level_by_level(scenario, k)
    return replay(pods, pool, scenario.cycles, steering=steering, dividing=dividing, control_s=1, tick_s=1)


def csv_rows(scenario: Scenario, record: ReplayRecord) -> Iterator[tuple[int, str, float, float]]:
    """Yield (Time, QueueID, Allocation, FairShare) of every cycle and queue. A department's figures are the sums over
    its leaf queues."""
    departments = [(department.name, scenario.leaves_of(department.name)) for department in scenario.departments]
    rows = [*departments, *((queue.name, [q]) for q, queue in enumerate(scenario.queues))]
    for cycle, (held, shares) in enumerate(zip(record.held, record.shares, strict=True)):
        if cycle >= scenario.cycles:
            return
        for name, leaves in rows:
            yield cycle, name, float(sum(held[q] for q in leaves)), float(sum(shares[q] for q in leaves))


def entitled(scenario: Scenario) -> dict[str, float]:
    """Return the GPUs that each leaf queue is due in the long run, by quota and weight, but no more than its pods
    request."""
    asked = [float(sum(scenario.pods.get(queue.name, ()))) for queue in scenario.queues]
    if scenario.divided:
        weights = [queue.weight for queue in scenario.queues]
        shares = _level_shares(scenario, float(scenario.capacity), asked, [0.0] * len(asked), 0.0, weights)
    else:
        weights = [q.weight for q in scenario.queues]
        shares = fair_shares(float(scenario.capacity), asked, _quotas(scenario), weights)
    return {queue.name: share for queue, share in zip(scenario.queues, shares, strict=True)}


def second_half(record: ReplayRecord) -> list[float]:
    """Return the mean GPUs held per queue over the second half of the cycles."""
    half = record.held[len(record.held) // 2 :]
    return [sum(row[q] for row in half) / len(half) for q in range(len(record.workload.queues))]


def _level_by_level(scenario: Scenario, k: float) -> Dividing:
    """Return a function that divides the queue tree as KAI does. The usage of a queue is its part of the cluster's GPU
    time in the window."""
    usage = SlidingUsage(len(scenario.queues), scenario.window_s, scenario.half_life_s)

    def dividing(view: ControllerView, weights: Sequence[float]) -> list[float]:
        used, possible = usage.at(view)
        parts = [each / possible if possible > 0 else 0.0 for each in used]
        return _level_shares(scenario, view.capacity, view.asked, parts, k, weights)

    return dividing


def _level_shares(
    scenario: Scenario,
    capacity: float,
    asked: Sequence[float],
    used: Sequence[float],
    k: float,
    weights: Sequence[float],
) -> list[float]:
    """Return the shares of the leaf queues. A department's request and usage are the sums over its leaves.

    asked: the GPUs that each leaf requests. used: its usage as a part of the cluster. weights: its weight now."""
    claims = [
        replace(queue, request=float(asked[q]), usage=used[q], weight=weights[q])
        for q, queue in enumerate(scenario.queues)
    ]
    for department in scenario.departments:
        leaves = scenario.leaves_of(department.name)
        request, usage = float(sum(asked[q] for q in leaves)), sum(used[q] for q in leaves)
        claims.append(replace(department, request=request, usage=usage))
    shares = divide(DivisionProblem("cycle", capacity, k, tuple(claims)), as_source=True).shares
    return [shares[queue.name] for queue in scenario.queues]


def _policy(scenario: Scenario) -> Policy:
    """Return the controller's policy. Times that are hours in a cluster are parts of the scenario's window here."""
    window = WindowSpec(size=scenario.window_s, half_life=scenario.half_life_s)
    queues = tuple(
        QueuePolicy(name=q.name, weight=q.weight, deserved=q.deserved, priority=q.priority) for q in scenario.queues
    )
    turns = TurnPolicy(min_turn=max(1, scenario.window_s // 40))
    return Policy(k=scenario.k, window=window, turns=turns, queues=queues)


def _quotas(scenario: Scenario) -> list[float]:
    """Return the deserved quotas of the leaves. An unlimited quota is the whole cluster."""
    return [float(scenario.capacity) if q.deserved == UNLIMITED else q.deserved for q in scenario.queues]
