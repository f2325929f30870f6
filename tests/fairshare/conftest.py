"""Shared fixtures of the controller's tests: division vectors, a policy, an in-memory cluster and a fake accountant."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from accountant.wire.policy_models import Policy
from fairshare.controller.control_loop import Controller
from fairshare.controller.cycle_report import CycleReport
from fairshare.core.queues_and_weights import Observation, Pod
from fairshare.targets.weight_plan import Adapter, look_at
from gputally.base.clock import VirtualClock
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import Cluster, Object
from gputally.testing.fake_accountant import Accountant
from gputally.testing.fake_scheduler import queue_object, setup_object
from tests.fairshare.builders import cluster_of
from tests.fairshare.real_api_server import Others, served, standing
from tests.fairshare.scheduler_kinds import KINDS
from tests.fake_scheduler import fake_scheduler as fake_scheduler
from tests.real.controlplane import ApiServer
from tests.shared_files import shared

GOLDEN = Path(__file__).parents[1] / "golden" / "kai_division.json"
NOW_MS = 1_790_812_800_000
Make = Callable[..., Any]
Capsys = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def as_wide_as_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Print tables as wide as to a file, independent of the COLUMNS of the test runner."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True, scope="module")
def _some_scheduler(fake_scheduler: None) -> None:
    """Where a test needs any scheduler, it is the fake one."""


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
    cluster.load([setup_object()])
    return cluster
