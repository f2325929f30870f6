"""One cycle of the controller with 1,000 KAI queues and 20,000 pods in 2,500 gangs, and the memory of its process.

The usage of every queue changes from cycle to cycle, as it does in life: what a controller does about a change is part
of its cycle. The API server is a stand-in that returns prepared objects, so HTTP is not part of the measurement. The
goals are .5 s of CPU time in each mode, and 200 MiB of resident memory with pods kept as values."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from accountant.wire.policy_models import Decision, Measure, Policy, PolicyVersion, UsageWindow, WindowSpec
from accountant.wire.usage_cost_and_job_models import Accounts, BudgetState
from fairshare.controller.control_loop import Controller
from fairshare.core.gpu_demand import read_pod
from fairshare.core.queues_and_weights import Pod
from fairshare.schedulers.kai.kinds import POD_GROUP, QUEUE, SHARD
from gputally.base.clock import VirtualClock
from gputally.base.errors import NotFound
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import GPU, NODE, Kind, Object
from gputally.testing.fake_accountant import usage_window
from tests.bench.figure import Figure

QUEUES, PODS, GANG = 1_000, 20_000, 8
GOAL_S, GOAL_MIB = 0.5, 200.0
MODES = {
    "dry-run": ("dry-run", "off"),
    "enforce": ("enforce", "off"),
    "enforce with preemption": ("enforce", "enforce"),
}
"""The mode of the weights and of preemption."""
START_MS = 1_790_812_800_000


class Shelf(MemoryCluster):
    """Returns the same objects again and again, and accepts every write."""

    def __init__(self, objects: dict[Kind, list[Object]]) -> None:
        super().__init__([])
        self._objects = objects

    def list(self, kind: Kind, *, fields: str = "") -> list[Object]:
        if kind not in self._objects:
            raise NotFound(kind.kind)
        return self._objects[kind]

    def apply(self, obj: Object, *, field_manager: str, dry_run: bool = False, subresource: str = "") -> Object:
        return obj


class Ledger:
    """Half of the cluster is used, in unequal parts that differ in each window."""

    def __init__(self, policy: Policy) -> None:
        self._version = policy.version()
        self._queues = [queue.name for queue in policy.queues]
        self._asked = 0

    def window(self, spec: WindowSpec, measure: Measure, at_ms: int, min_coverage: float) -> UsageWindow:
        self._asked += 1
        moved = ((self._asked * 7919 + i * 104_729) % 997 for i in range(QUEUES))
        usage = {
            queue: (i % 7) * 10**9 + part * 10**7
            for i, (queue, part) in enumerate(zip(self._queues, moved, strict=True))
        }
        return usage_window(
            usage, 6 * QUEUES * 10**9, end_ms=at_ms, kind=spec.kind, measure=measure, policy_version=self._version
        )

    def policy_in_force(self) -> Policy | None:
        return None

    def put_policy(self, policy: Policy) -> PolicyVersion:
        return PolicyVersion(version=self._version, effective_ms=0, policy=policy)

    def budgets(self) -> Sequence[BudgetState]:
        return ()

    def pod_usage(
        self, start_ms: int, end_ms: int, pods: Sequence[tuple[str, str]] = ()
    ) -> Mapping[tuple[str, str], Accounts]:
        return {}

    def metered_nodes(self, start_ms: int, end_ms: int) -> frozenset[str]:
        return frozenset()

    def lost_gpus(self, start_ms: int, end_ms: int) -> Mapping[str, int]:
        return {}

    def post_decisions(self, decisions: Sequence[Decision]) -> None:
        return


def pod(number: int) -> Object:
    """Build a pod as the API server returns it, with the fields that the controller reads."""
    gang, queue = number // GANG, number // GANG % QUEUES
    return {
        "metadata": {
            "name": f"worker-{number}", "namespace": f"team-{queue}", "uid": f"uid-{number}",
            "labels": {"kai.scheduler/queue": f"q{queue}"}, "annotations": {"pod-group-name": f"gang-{gang}"},
            "creationTimestamp": "2026-10-01T00:00:00Z",
        },
        "spec": {
            "nodeName": f"n{number % 500}" if number % 2 else "", "schedulerName": "kai-scheduler",
            "containers": [{"name": "c", "resources": {"limits": {GPU: "1"}}}],
        },
        "status": {"phase": "Running"},
    }  # fmt: skip


def controller(mode: str = "enforce") -> Controller:
    """Build the controller as the service does, with pods already parsed. mode: one of `MODES`."""
    weights, preemption = MODES[mode]
    queues = [{"name": f"q{i}", "deserved": 2, "refs": [f"kai:q{i}"]} for i in range(QUEUES)]
    policy = Policy.model_validate(
        {"queues": queues, "targets": {"kai": {"apply": weights}}, "preemption": {"mode": preemption}}
    )
    conditions = [{"type": "Ready", "status": "True"}]
    objects: dict[Kind, list[Object]] = {
        QUEUE: [
            {
                "apiVersion": QUEUE.api_version, "kind": "Queue", "metadata": {"name": f"q{i}"},
                "spec": {"resources": {"gpu": {"quota": 2, "limit": -1, "overQuotaWeight": 1}}},
                "status": {"requested": {GPU: "24"}, "allocated": {GPU: "8"}},
            }
            for i in range(QUEUES)
        ],
        POD_GROUP: [
            {
                "apiVersion": POD_GROUP.api_version, "kind": "PodGroup",
                "metadata": {"name": f"gang-{i}", "namespace": f"team-{i % QUEUES}"},
                "spec": {"queue": f"q{i % QUEUES}", "minMember": GANG},
            }
            for i in range(PODS // GANG)
        ],
        SHARD: [{"metadata": {"name": "default"}, "spec": {"kValue": 0}}],
        NODE: [
            {"metadata": {"name": f"n{i}"}, "status": {"allocatable": {GPU: "8"}, "conditions": conditions}}
            for i in range(750)
        ],
    }  # fmt: skip
    pods: tuple[Pod, ...] = tuple(found for i in range(PODS) if (found := read_pod(pod(i))) is not None)
    clock = VirtualClock(START_MS)
    return Controller(policy, Ledger(policy), Shelf(objects), clock, pods=lambda: pods)


def measure() -> list[Figure]:
    figures = []
    for mode in MODES:
        made = controller(mode)
        spent = []
        for _ in range(6):
            started = time.process_time()
            report = made.cycle()
            spent.append(time.process_time() - started)
        assert len(report.targets[0].weights) == QUEUES
        name = f"cycle, {QUEUES} queues x {PODS} pods, usage changes, {mode}, CPU"
        figures.append(Figure(name, statistics.median(spent[1:]), "s", "goal", GOAL_S))
    code = (
        "from tests.bench.cycle import controller; c = controller(); c.cycle(); c.cycle(); import gputally.kubernetes;"
        "print([l.split()[1] for l in open('/proc/self/status') if l.startswith('VmHWM')][0])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [*figures, Figure("peak resident memory, client loaded", int(answer.stdout) / 1024, "MiB", "goal", GOAL_MIB)]
