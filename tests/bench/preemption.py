"""One preemption decision: 1,000 queues, 20,000 pods in 2,500 gangs of 8, of which 2,100 fill the cluster and 400 wait.

Every queue has the same share, and half of the gangs belong to a quarter of the queues, so that the 50 claims of one
cycle find victims. The goal is 0.6 s of CPU time, which keeps the whole cycle below one second.

The second case is the worst of a cluster of one-GPU jobs: 2,000 of them, scattered, and 50 claims for up to 32 GPUs
each, most of them for whole nodes. Each claim examines hundreds of workloads, most of which turn out not to be
needed. The third has 4,500 of them and the default limits, which refuse nearly all of them to most claims. The fourth
is the third in a cluster where every tenth pod is gone already, so that a cycle decides several times."""

from __future__ import annotations

import random
from collections.abc import Mapping

from accountant.wire.policy_models import Policy
from fairshare.core.queues_and_weights import Entitlement, Gang, Pod
from fairshare.preemption.claims_and_placement import preemption_inputs
from fairshare.preemption.preemption_cycle import preempt
from fairshare.preemption.preemption_types import PreemptionInputs
from fairshare.preemption.victim_selection import decide
from fairshare.schedulers.kai.kinds import POD_GROUP
from gputally.base.errors import NotFound
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import GPU, Kind, Object
from tests.bench.figure import Figure, median_cpu_seconds

QUEUES, GANGS, RUNNING, SIZE = 1_000, 2_500, 2_100, 8
NOW_MS = 1_790_812_800_000
SPREAD = 4
"""Every fifth group of this number of gangs is spread over as many nodes."""
GOAL_S = 0.6
SCATTERED_GOAL_S = 1.5
LIMITED_GOAL_S = 0.8
VETOED_GOAL_S = 1.0


def gang(number: int) -> Gang:
    """Build eight pods of one GPU, on one node or across four; the first queues have the most."""
    queue, running = f"q{int((number * 7_919 % RUNNING / RUNNING) ** 2 * QUEUES)}", number < RUNNING
    started_ms = NOW_MS - (number * 7_919_000) % 100_000_000
    group = number // SPREAD
    pods = tuple(
        Pod(
            f"{number}-{i}", f"ns{number}", f"worker-{i}", 1.0,
            f"n{group * SPREAD + (number + i) % SPREAD if group % 5 == 0 else number}" if running else "",
            gang=f"PodGroup/ns{number}/gang", held=running, started_ms=started_ms if running else None,
        )
        for i in range(SIZE)
    )  # fmt: skip
    return Gang(
        queue, POD_GROUP, f"ns{number}", "gang", f"uid-{number}", SIZE, SIZE if running else 0.0,
        SIZE if number % 3 else SIZE // 2, created_ms=started_ms, started_ms=started_ms if running else None, pods=pods,
        priority=100 if number % 2 else 50,
    )  # fmt: skip


def crowded() -> tuple[Policy, PreemptionInputs]:
    policy = Policy.model_validate(
        {
            "queues": [{"name": f"q{i}", "deserved": 4} for i in range(QUEUES)],
            "preemption": {"wait": 0, "per_cluster": 5_000, "lost_gpu_hours": 1e9},
        }
    )
    gangs = [gang(number) for number in range(GANGS)]
    share = RUNNING * SIZE / QUEUES
    due = [Entitlement(queue.name, None, share, share, 0.0, 0.0, 0.0) for queue in policy.queues]
    return policy, inputs(policy, gangs, due, RUNNING)


def inputs(policy: Policy, gangs: list[Gang], due: list[Entitlement], nodes: int) -> PreemptionInputs:
    """Build the inputs on this number of nodes of eight GPUs."""
    conditions = [{"type": "Ready", "status": "True"}]
    there: list[Object] = [
        {"metadata": {"name": f"n{i}"}, "status": {"allocatable": {GPU: str(SIZE)}, "conditions": conditions}}
        for i in range(nodes)
    ]
    return preemption_inputs(policy, "kai", gangs, due, there, [pod for each in gangs for pod in each.pods], NOW_MS)


class Thinned(MemoryCluster):
    """A cluster without disruption budgets, in which every tenth pod is gone. Counts the lists of budgets, of which a
    decision makes one."""

    def __init__(self) -> None:
        super().__init__([])
        self.lists = 0

    def list(self, kind: Kind, *, fields: str = "") -> list[Object]:
        self.lists += 1
        return []

    def get(self, kind: Kind, name: str, namespace: str = "") -> Object:
        if int(name.removeprefix("j").partition("-")[0]) % 10 == 0:
            raise NotFound(name)
        return {"metadata": {"name": name, "namespace": namespace, "uid": name}, "status": {"phase": "Running"}}


UNLIMITED = {"min_runtime": 0, "per_team": 9_999, "per_cluster": 9_999, "lost_gpu_hours": 1e9}


def scattered(
    nodes: int = 250, jobs: int = 2_000, waiting: int = 50, limits: Mapping[str, float] = UNLIMITED
) -> tuple[Policy, PreemptionInputs]:
    """The first of 40 queues hold most of the nodes, one GPU at a time; ten others wait."""
    queues = 40
    due = SIZE * nodes / queues
    policy = Policy.model_validate(
        {
            "queues": [{"name": f"q{i}", "deserved": due // 2} for i in range(queues)],
            "preemption": {"wait": 0, **limits},
        }
    )
    gangs, chance = [], random.Random(1)
    for i in range(jobs + waiting):
        runs, name = i < jobs, f"j{i}"
        queue = f"q{int(queues * chance.random() ** 2)}" if runs else f"q{queues - 1 - i % 10}"
        started_ms = NOW_MS - round(chance.random() * 180_000_000)
        size, count = (1, 1) if runs else (chance.choice((1, 2, 4, 8)), chance.choice((1, 2, 4)))
        node = f"n{i % nodes}" if runs else ""
        pods = tuple(
            Pod(f"{name}-{n}", "ns", f"{name}-{n}", float(size), node, owner=f"Job/ns/{name}",
                gang=f"PodGroup/ns/{name}", held=runs, started_ms=started_ms if runs else None)
            for n in range(count)
        )  # fmt: skip
        asks = float(size * count)
        gangs.append(
            Gang(queue, POD_GROUP, "ns", name, f"uid-{name}", asks, asks if runs else 0.0, asks, created_ms=started_ms,
                 started_ms=started_ms if runs else None, pods=pods)
        )  # fmt: skip
    shares = [Entitlement(queue.name, None, due, due, 0.0, 0.0, 0.0) for queue in policy.queues]
    return policy, inputs(policy, gangs, shares, nodes)


def measure() -> list[Figure]:
    policy, found = crowded()
    victims = sum(len(verdict.victims) for verdict in decide(policy, found))
    assert victims > 50
    spent = median_cpu_seconds(lambda: decide(policy, found), runs=5, warmup=1)
    name = f"preemption, {QUEUES:,} queues x {GANGS * SIZE:,} pods, CPU"
    rules, small = scattered()
    assert sum(len(verdict.victims) for verdict in decide(rules, small)) > 100
    alone = median_cpu_seconds(lambda: decide(rules, small), runs=3, warmup=0)
    usual, many = scattered(563, 4_500, 500, {})
    limited = median_cpu_seconds(lambda: decide(usual, many), runs=3, warmup=0)
    cluster = Thinned()
    vetoed = median_cpu_seconds(lambda: preempt(usual, cluster, many, "dry-run"), runs=3, warmup=0)
    rounds = cluster.lists // 3
    assert rounds > 2
    return [
        Figure(name, spent, "s", "goal", GOAL_S),
        Figure("preemption, 2,000 scattered gangs x 50 claims, CPU", alone, "s", "goal", SCATTERED_GOAL_S),
        Figure("preemption, 4,500 scattered gangs, default limits, CPU", limited, "s", "goal", LIMITED_GOAL_S),
        Figure(f"the same, {rounds} decisions because of vetoes, CPU", vetoed, "s", "goal", VETOED_GOAL_S),
    ]
