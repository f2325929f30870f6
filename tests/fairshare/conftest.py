"""Shared fixtures of the controller's tests: division vectors, a policy, an in-memory cluster and a fake accountant."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from accountant.wire.policy_models import Decision, Measure, Policy, PolicyVersion, UsageWindow, WindowSpec
from accountant.wire.usage_cost_and_job_models import Accounts, BudgetState
from fairshare.controller.control_loop import Controller
from fairshare.controller.cycle_report import CycleReport
from fairshare.core.queues_and_weights import Observation, Pod
from fairshare.targets.weight_plan import Adapter, look_at
from gputally.base.clock import VirtualClock
from gputally.base.errors import AccountantUnavailable
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import Cluster, Object
from tests.fairshare.builders import cluster_of, queue_object, shard_object
from tests.fairshare.real_api_server import Others, served, standing
from tests.fairshare.scheduler_kinds import KINDS
from tests.real.controlplane import ApiServer
from tests.shared_files import shared
from tests.usage_windows import usage_window

GOLDEN = Path(__file__).parents[1] / "golden" / "kai_division.json"
NOW_MS = 1_790_812_800_000
Make = Callable[..., Any]
Capsys = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def as_wide_as_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Print tables as wide as to a file, independent of the COLUMNS of the test runner."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(scope="session")
def golden_text() -> str:
    """275 divisions that KAI's code computed for this project (source and commit are in `meta`)."""
    return GOLDEN.read_text()


@pytest.fixture(scope="session")
def upstream_text() -> str:
    """95 divisions from KAI's test tables, read from the shared folder."""
    return shared("vectors/kai_division_upstream.json").read_text()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A real API server with the CustomResourceDefinitions of all schedulers."""
    with served(tmp_path_factory.mktemp("controlplane")) as running:
        yield running


@pytest.fixture(params=["memory", pytest.param("real", marks=pytest.mark.real)])
def either_of(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Return a function that builds a cluster with given objects: once in memory, once on a real API server."""
    with ExitStack() as after:

        def make(objects: Sequence[Object] = ()) -> Cluster:
            if request.param == "memory":
                return MemoryCluster(KINDS, objects)
            return after.enter_context(standing(request.getfixturevalue("server"), objects, KINDS))

        yield make


@pytest.fixture
def others_of(request: pytest.FixtureRequest) -> Make:
    """Return the other writers of a cluster of `either_of`."""

    def make(cluster: Cluster) -> MemoryCluster | Others:
        return cluster if isinstance(cluster, MemoryCluster) else Others(request.getfixturevalue("server"))

    return make


@pytest.fixture
def seen_of(either_of: Make) -> Make:
    """Return a function that reads these objects with an adapter, from memory and from a real API server."""

    def make(adapter: Adapter, policy: Policy, objects: Sequence[Object], pods: Sequence[Pod] = ()) -> Observation:
        return look_at(adapter, policy, either_of(objects), pods)

    return make


class Accountant:
    """A fake accountant. Its answers are attributes that a test sets. `usage` is in GPU-microseconds of one hour on 16
    GPUs."""

    def __init__(self) -> None:
        self.usage: dict[str, int] = {}
        self.capacity = 16 * 3_600_000_000
        self.coverage = 1.0
        self.age_ms: int | None = 0
        self.down = False
        self.takes_decisions = True
        self.policies: list[Policy] = []
        self.decisions: list[Decision] = []
        self.states: list[BudgetState] = []
        self.lost: dict[str, int] = {}
        self.nodes: set[str] = set()
        self.asked_nodes = 0
        self.used: Callable[[int, int], Mapping[tuple[str, str], Accounts]] = lambda start_ms, end_ms: {}

    def spend(self, **parts: float) -> None:
        """Set the usage as shares of the capacity."""
        self.usage = {queue: round(part * self.capacity) for queue, part in parts.items()}

    def window(self, spec: WindowSpec, measure: Measure, at_ms: int, min_coverage: float) -> UsageWindow:
        self._answer()
        watermark_ms = None if self.age_ms is None else at_ms - self.age_ms
        version = self.policies[-1].version() if self.policies else None
        said = {"kind": spec.kind, "measure": measure, "watermark_ms": watermark_ms, "coverage": self.coverage}
        return usage_window(self.usage, self.capacity, end_ms=at_ms, policy_version=version, **said)

    def policy_in_force(self) -> Policy | None:
        self._answer()
        return self.policies[-1] if self.policies else None

    def put_policy(self, policy: Policy) -> PolicyVersion:
        self._answer()
        self.policies.append(policy)
        return PolicyVersion(version=policy.version(), effective_ms=0, policy=policy)

    def budgets(self) -> Sequence[BudgetState]:
        self._answer()
        return self.states

    def pod_usage(
        self, start_ms: int, end_ms: int, pods: Sequence[tuple[str, str]] = ()
    ) -> Mapping[tuple[str, str], Accounts]:
        self._answer()
        return {key: held for key, held in self.used(start_ms, end_ms).items() if not pods or key in pods}

    def lost_gpus(self, start_ms: int, end_ms: int) -> Mapping[str, int]:
        self._answer()
        return self.lost

    def metered_nodes(self, start_ms: int, end_ms: int) -> Collection[str]:
        self._answer()
        self.asked_nodes += 1
        return self.nodes

    def post_decisions(self, decisions: Sequence[Decision]) -> None:
        self._answer()
        if not self.takes_decisions:
            raise AccountantUnavailable("http://accountant:8080/v1/decisions: 503 Ledger unavailable: disk full")
        self.decisions += decisions

    def _answer(self) -> None:
        if self.down:
            raise AccountantUnavailable("http://accountant:8080: connection refused")


@pytest.fixture
def accountant() -> Accountant:
    return Accountant()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(NOW_MS)


class Stepping(Controller):
    """A controller on a test's virtual clock."""

    def later(self) -> CycleReport:
        """Run the cycle of the next minute."""
        assert isinstance(self._clock, VirtualClock)
        self._clock.advance(60_000)
        return self.cycle()


@pytest.fixture
def controller_of(accountant: Accountant, clock: VirtualClock) -> Make:
    """Return a function that creates a controller of a policy in a cluster, with the fake accountant and the virtual
    clock."""

    def make(policy: Policy, cluster: Cluster, **options: Any) -> Stepping:
        return Stepping(policy, accountant, cluster, clock, **options)

    return make


@pytest.fixture
def file(tmp_path: Path) -> Make:
    """Return a function that writes a file for a command to read."""

    def make(text: str) -> Path:
        path = tmp_path / "input"
        path.write_text(text)
        return path

    return make


@pytest.fixture
def three() -> MemoryCluster:
    """Queues a, b, c with weight 1, and a queue that the policy does not name."""
    cluster: MemoryCluster = cluster_of([*(queue_object(name) for name in "abc"), queue_object("stranger", 5)])
    cluster.load([shard_object(kValue=0)])
    return cluster
