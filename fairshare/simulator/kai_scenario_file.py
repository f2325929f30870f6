"""Reads and runs the scenarios of KAI's own time-based simulator.

Its YAML: `Cycles, WindowSize, HalfLifePeriod` (seconds), `KValue`, `Nodes: [{GPUs, Count}]`,
`Queues: [{Name, Parent, Priority, DeservedGPUs, Weight}]`, `Jobs: {queue: {GPUs (per pod), NumPods,
NumJobs}}`; its CSV: `Time,QueueID,Allocation,FairShare`. So the same scenario runs in both.

A cycle is one second here. Jobs never end and every pod is scheduled on its own, as there. Under the law
`kai` the scheduler has the history itself (its k, its division in whole GPUs); under any other it has
k = 0 and the weights the controller publishes. One pool: nodes decide nothing but the number of GPUs and
the largest pod. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from accountant.wire.policy_models import Bounds, DeficitPolicy, Policy, QueuePolicy, TurnPolicy, WindowSpec
from fairshare.core.model import UNLIMITED, Claim, DivisionProblem
from fairshare.laws.division import divide, fair_shares
from fairshare.simulator.scheduler_engine import replay
from fairshare.simulator.scheduling_policies import Feedback, Usage
from fairshare.simulator.simulation_model import ControllerView, Dividing, Pool, Record, Workload
from gputally.base.errors import DivisionError


def whole_gpus(
    names: Sequence[str], deserved: Sequence[float], priorities: Sequence[int] = (), limits: Sequence[float] = ()
) -> Dividing:
    """KAI's division without history (k = 0), by the weights in force."""

    def dividing(view: ControllerView, weights: Sequence[float]) -> list[float]:
        claims = tuple(
            Claim(
                name,
                view.asked[q],
                deserved[q],
                limits[q] if limits else UNLIMITED,
                weights[q],
                priority=priorities[q] if priorities else 100,
                creation=q,
            )
            for q, name in enumerate(names)
        )
        shares = divide(DivisionProblem("cycle", view.capacity, 0.0, claims), kai_compat=True).shares
        return [shares[name] for name in names]

    return dividing


LAWS = ("static", "kai", "fairtree", "multifactor", "deficit")
_FOREVER_S = 10**9
_NODE = {"GPUs", "Count"}
_QUEUE = {"Name", "Parent", "Priority", "DeservedGPUs", "Weight"}
_JOB = {"GPUs", "NumPods", "NumJobs"}
_MOST_CYCLES = 1_000_000
_MOST_GPUS, _MOST_PODS = 1_000_000, 1_000_000
"""GPUs of all nodes, and pods of one queue: a typing error would fill the memory."""
_TOP = {"Cycles", "WindowSize", "HalfLifePeriod", "KValue", "Nodes", "Queues", "Jobs"}


@dataclass(frozen=True, slots=True)
class Scenario:
    """gpus: of every node. queues: leaves, with their parents. pods: per queue, GPUs of every pod.
    departments: every queue that has children."""

    cycles: int
    window_s: int
    half_life_s: int | None
    k: float
    gpus: tuple[int, ...]
    queues: tuple[Claim, ...]
    pods: Mapping[str, tuple[int, ...]]
    departments: tuple[Claim, ...] = ()

    @property
    def capacity(self) -> int:
        return sum(self.gpus)

    @property
    def divided(self) -> bool:
        """Leaves have more than one parent."""
        return len({queue.parent for queue in self.queues}) > 1

    def leaves_of(self, department: str) -> list[int]:
        """Places in `queues` of the leaves below a department."""
        above = {queue.name: queue.parent for queue in (*self.departments, *self.queues)}
        found = []
        for q, queue in enumerate(self.queues):
            at = queue.parent
            while at is not None and at != department:
                at = above[at]
            if at is not None:
                found.append(q)
        return found


def parse(data: object) -> Scenario:
    """A scenario from the YAML's data. Raises DivisionError with the key at fault."""
    top = _object(data, "the file", _TOP)
    nodes = [_object(node, f"Nodes[{i}]", _NODE) for i, node in enumerate(_list(top, "Nodes"))]
    sizes = [(_int(node, "GPUs", 1), 1) for node in nodes]  # KAI reads `Count` and makes one node of every entry
    if (total := sum(each * count for each, count in sizes)) > _MOST_GPUS:
        raise DivisionError(f"Nodes: {total} GPUs are more than {_MOST_GPUS}")
    gpus = tuple(each for each, count in sizes for _ in range(count))
    queues = [_object(queue, f"Queues[{i}]", _QUEUE) for i, queue in enumerate(_list(top, "Queues"))]
    _named(queues)
    parents = {str(queue["Parent"]) for queue in queues if queue.get("Parent")}
    leaves = [queue for queue in queues if str(queue.get("Name")) not in parents]
    claims = tuple(_claim(queue, i) for i, queue in enumerate(leaves))
    departments = tuple(_claim(queue, i) for i, queue in enumerate(queues) if str(queue["Name"]) in parents)
    divide(DivisionProblem("tree", 0.0, 0.0, (*departments, *claims)))  # refuses unknown parents and cycles
    jobs = top.get("Jobs") or {}
    if not isinstance(jobs, Mapping):
        raise DivisionError("Jobs: expected an object by queue")
    pods: dict[str, tuple[int, ...]] = {}
    for name, job in jobs.items():
        if str(name) not in {claim.name for claim in claims}:
            raise DivisionError(f"Jobs: {name!r} is no leaf queue")
        given = _object(job, f"Jobs.{name}", _JOB)
        count = _int(given, "NumPods", 0, 1) * _int(given, "NumJobs", 0, 1)
        if count > _MOST_PODS:
            raise DivisionError(f"Jobs.{name}: {count} pods are more than {_MOST_PODS}")
        pods[str(name)] = (_int(given, "GPUs", 1),) * count
    half_life = _int(top, "HalfLifePeriod", 0, 0)
    scenario = Scenario(
        _int(top, "Cycles", 1, 100),
        _int(top, "WindowSize", 1, 5),
        half_life or None,
        _number(top, "KValue", 1.0),
        gpus,
        claims,
        pods,
        departments,
    )
    if scenario.cycles > _MOST_CYCLES:
        raise DivisionError(f"Cycles: {scenario.cycles} are more than {_MOST_CYCLES}")
    if not gpus or not claims:
        raise DivisionError("Nodes and Queues must not be empty")
    return scenario


def _claim(queue: Mapping[str, object], creation: int) -> Claim:
    return Claim(
        str(queue["Name"]),
        0.0,
        _number(queue, "DeservedGPUs", 0.0, unlimited=True),
        weight=_number(queue, "Weight", 1.0),
        priority=_int(queue, "Priority", 0, 100),
        creation=creation,
        parent=str(queue["Parent"]) if queue.get("Parent") else None,
    )


def run(scenario: Scenario, law: str) -> Record:
    """Play it under a law of `LAWS`. Leaves of several departments are divided level by level, by `static` and `kai`
    alone. Raises ValueError for an unknown law, DivisionError for one that cannot divide a tree."""
    if law not in LAWS:
        raise ValueError(f"no law {law!r}; one of {', '.join(LAWS)}")
    if scenario.divided and law not in ("static", "kai"):
        raise DivisionError(f"Queues: leaves of more than one parent are replayed under static and kai, not {law}")
    queues = scenario.queues
    names = [queue.name for queue in queues]
    rows = [(gpus, q) for q, name in enumerate(names) for gpus in scenario.pods.get(name, ())]
    rows = [row for row in rows if row[0] <= max(scenario.gpus)]
    workload = Workload(
        tuple(names),
        [0] * len(rows),
        [gpus for gpus, _ in rows],
        [_FOREVER_S] * len(rows),
        [q for _, q in rows],
        sum(map(len, scenario.pods.values())) - len(rows),
    )
    deserved, priorities = _quotas(scenario), [queue.priority for queue in queues]
    pool = Pool(
        scenario.capacity, deserved, [queue.weight for queue in queues],
        checkpoint_s=1, restart_s=0, min_runtime_s=0,
    )  # fmt: skip
    if law == "kai" or scenario.divided:
        dividing = _level_by_level(scenario, scenario.k if law == "kai" else 0.0)
    else:
        dividing = whole_gpus(names, deserved, priorities)
    steering = None if law in ("static", "kai") else Feedback(_policy(scenario, law), _targets(scenario))
    return replay(workload, pool, scenario.cycles, steering=steering, dividing=dividing, control_s=1, tick_s=1)


def csv_rows(scenario: Scenario, record: Record) -> Iterator[tuple[int, str, float, float]]:
    """(Time, QueueID, Allocation, FairShare) of every cycle and queue. A department has the sum of its leaves."""
    below = [(department.name, scenario.leaves_of(department.name)) for department in scenario.departments]
    rows = [*below, *((queue.name, [q]) for q, queue in enumerate(scenario.queues))]
    for cycle, (held, shares) in enumerate(zip(record.held, record.shares, strict=True)):
        if cycle >= scenario.cycles:
            return
        for name, leaves in rows:
            yield cycle, name, float(sum(held[q] for q in leaves)), float(sum(shares[q] for q in leaves))


def entitled(scenario: Scenario) -> dict[str, float]:
    """GPUs every queue is due on the long run: quota and weight, as far as it has pods."""
    asked = [float(sum(scenario.pods.get(queue.name, ()))) for queue in scenario.queues]
    if scenario.divided:
        shares = _level_shares(scenario, float(scenario.capacity), asked, [0.0] * len(asked), 0.0)
    else:
        weights = [q.weight for q in scenario.queues]
        shares = fair_shares(float(scenario.capacity), asked, _quotas(scenario), weights)
    return {queue.name: share for queue, share in zip(scenario.queues, shares, strict=True)}


def second_half(record: Record) -> list[float]:
    """Mean GPUs held per queue over the second half of the cycles."""
    half = record.held[len(record.held) // 2 :]
    return [sum(row[q] for row in half) / len(half) for q in range(len(record.workload.queues))]


def _level_by_level(scenario: Scenario, k: float) -> Dividing:
    """KAI's own division of the queue tree; usage over its window is a part of the cluster on every level."""
    usage = Usage(len(scenario.queues), scenario.window_s, scenario.half_life_s)

    def dividing(view: ControllerView, _weights: Sequence[float]) -> list[float]:
        used, possible = usage.at(view)
        parts = [each / possible if possible > 0 else 0.0 for each in used]
        return _level_shares(scenario, view.capacity, view.asked, parts, k)

    return dividing


def _level_shares(
    scenario: Scenario, capacity: float, asked: Sequence[float], used: Sequence[float], k: float
) -> list[float]:
    """Shares of the leaves. A department asks for and has used what its leaves have."""
    claims = [replace(queue, request=float(asked[q]), usage=used[q]) for q, queue in enumerate(scenario.queues)]
    for department in scenario.departments:
        below = scenario.leaves_of(department.name)
        claims.append(
            replace(department, request=float(sum(asked[q] for q in below)), usage=sum(used[q] for q in below))
        )
    shares = divide(DivisionProblem("cycle", capacity, k, tuple(claims)), kai_compat=True).shares
    return [shares[queue.name] for queue in scenario.queues]


def _policy(scenario: Scenario, law: str) -> Policy:
    """Our law at the scenario's pace: everything that is hours in a cluster is a part of its window."""
    window = WindowSpec(size=scenario.window_s, half_life=scenario.half_life_s)
    pace = max(1, scenario.window_s // 10)
    return Policy.model_validate(
        {
            "law": law, "k": scenario.k, "window": window, "bounds": Bounds(max_step=1e6, deadband=0),
            "deficit": DeficitPolicy(repay=pace, horizon=pace, smoothing=pace),
            "turns": TurnPolicy(min_turn=max(1, scenario.window_s // 40)),
            "queues": tuple(
                QueuePolicy(name=q.name, weight=q.weight, deserved=q.deserved, priority=q.priority)
                for q in scenario.queues
            ),
        }
    )  # fmt: skip


def _quotas(scenario: Scenario) -> list[float]:
    """An unlimited quota is all there is."""
    return [float(scenario.capacity) if q.deserved == UNLIMITED else q.deserved for q in scenario.queues]


def _targets(scenario: Scenario) -> dict[str, float]:
    everything = [float(scenario.capacity)] * len(scenario.queues)
    shares = fair_shares(float(scenario.capacity), everything, _quotas(scenario), [q.weight for q in scenario.queues])
    return {queue.name: share / scenario.capacity for queue, share in zip(scenario.queues, shares, strict=True)}


def _object(value: object, where: str, known: set[str]) -> Mapping[str, object]:
    """An object by its known keys: KAI reads them in any case, and null as if the key were missing."""
    if not isinstance(value, Mapping):
        raise DivisionError(f"{where}: expected an object")
    spelt = {key.lower(): key for key in known}
    unknown = sorted(str(key) for key in value if str(key).lower() not in spelt)
    if unknown:
        raise DivisionError(f"{where}: {unknown[0]}: unknown key")
    return {spelt[str(key).lower()]: each for key, each in value.items() if each is not None}


def _named(queues: Sequence[Mapping[str, object]]) -> None:
    """Raise DivisionError for a queue without a name, or with another's."""
    seen: set[str] = set()
    for i, queue in enumerate(queues):
        name = queue.get("Name")
        if name is None or name == "":
            raise DivisionError(f"Queues[{i}]: Name: missing")
        if str(name) in seen:
            raise DivisionError(f"Queues[{i}]: Name: queue {str(name)!r} stands there twice")
        seen.add(str(name))


def _list(top: Mapping[str, object], key: str) -> Sequence[object]:
    value = top.get(key)
    if not isinstance(value, list):
        raise DivisionError(f"{key}: expected a list")
    return value


def _number(at: Mapping[str, object], key: str, default: float, *, unlimited: bool = False) -> float:
    value = at.get(key, default)
    if unlimited and not isinstance(value, bool) and value == UNLIMITED:
        return UNLIMITED
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise DivisionError(f"{key}: expected a number from 0 on, found {value!r}")
    return float(value)


def _int(at: Mapping[str, object], key: str, least: int, default: int | None = None) -> int:
    value = at.get(key, default)
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if not isinstance(value, int | float) or isinstance(value, bool) or not whole or value < least:
        raise DivisionError(f"{key}: expected a whole number from {least} on, found {value!r}")
    return int(value)
