"""A cluster in memory with an Inspector, and doctor's sources over it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from accountant.composition import Service
from accountant.core.settings import Settings
from accountant.wire.typed_accountant_client import AccountantClient
from agent.core.readings import NodeSnapshot
from agent.holders.protocol import SourceCheck
from fairshare.core.scheduler_queue_objects import instant
from gputally.base.clock import Clock, VirtualClock
from gputally.base.errors import ClusterUnavailable
from gputally.doctor.check_inputs import ClusterView, DoctorOptions, Sources
from gputally.doctor.findings import CannotCheck
from gputally.doctor.node_checks import DAEMON_SET, MachineGpus
from gputally.doctor.rbac_checks import SERVICE_ACCOUNT
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import EVENT, GPU, NODE, POD, Kind, Object
from gputally.server.https_server import serve
from tests.fairshare.builders import object_of
from tests.fairshare.scheduler_kinds import KINDS
from tests.fake_scheduler import fake_scheduler as fake_scheduler

NOW_MS = 1_793_534_400_000  # 2026-11-01T12:00:00Z
CORE = ("pods", "nodes", "namespaces", "configmaps", "events")


class MemoryInspector(MemoryCluster):
    """gputally.kubernetes.api_client.Inspector in memory. refused: (group, resource, verb) that no caller may use.
    now_ms: the time of the API server's clock."""

    def __init__(
        self, objects: Iterable[Object] = (), kinds: Iterable[Kind] = (*KINDS, SERVICE_ACCOUNT, DAEMON_SET)
    ) -> None:
        self._all = tuple(kinds)
        super().__init__(self._all, objects)
        self.refused: set[tuple[str, str, str]] = set()
        self.asked: list[tuple[str, Mapping[str, str]]] = []
        self.now_ms = NOW_MS

    def served(self, groups: Iterable[str]) -> dict[tuple[str, str], tuple[str, ...]]:
        wanted, found = set(groups), {("", name): ("v1",) for name in CORE}
        for kind in self._all:
            group, _, version = kind.api_version.rpartition("/")
            if group in wanted:
                found[group, kind.plural] = (*found.get((group, kind.plural), ()), version)
        return found

    def may(self, wanted: Mapping[str, str], user: str = "", groups: Iterable[str] = ()) -> bool:
        self.asked.append((user, wanted))
        return (wanted["group"], wanted["resource"], wanted["verb"]) not in self.refused

    def caller(self) -> str:
        return "somebody"

    def server_ms(self) -> int:
        return self.now_ms


def node(name: str, gpus: int = 8, taints: Sequence[dict[str, str]] = (), **labels: str) -> dict[str, Any]:
    allocatable = {GPU: str(gpus), "cpu": "64", "memory": "64Gi", "pods": "110"}
    status = {"allocatable": allocatable, "conditions": [{"type": "Ready", "status": "True"}]}
    return object_of(NODE, name, {"taints": list(taints)}, status, labels=labels)


def pod(name: str, gpus: int, on: str = "", hours: float = 1.0, **spec: Any) -> dict[str, Any]:
    """Build a pod in the namespace `work` that was created `hours` ago. on: its node; "" for a pod that waits."""
    container = {"name": "c", "image": "none", "resources": {"limits": {GPU: str(gpus)}}}
    body = {"containers": [container], **({"nodeName": on} if on else {}), **spec}
    made = instant(round(NOW_MS - hours * 3_600_000))
    status = {"phase": "Running" if on else "Pending"}
    return object_of(POD, name, body, status, namespace="work", uid=f"uid-{name}", creationTimestamp=made)


def event(reason: str, note: str, at: str, **regarding: str) -> dict[str, Any]:
    """Build an event of a controller or the scheduler on an object."""
    name = f"{regarding['name']}.{at[14:19]}".replace(":", "-")
    head = object_of(EVENT, name, namespace=regarding["namespace"])
    return {**head, "reason": reason, "note": note, "eventTime": at, "regarding": regarding}


def failed(name: str, note: str, at: str = "2026-11-01T11:59:00.000000Z") -> dict[str, Any]:
    """Build an event of the scheduler on a pod in `work`."""
    return event("FailedScheduling", note, at, kind="Pod", namespace="work", name=name, uid=f"uid-{name}")


def nowhere(what: str) -> Callable[[], Any]:
    def refuse() -> Any:
        raise CannotCheck(f"no {what}")

    return refuse


def unavailable() -> ClusterView:
    raise ClusterUnavailable("no cluster: nothing listens")


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(NOW_MS)


@pytest.fixture
def sources_of(clock: VirtualClock) -> Callable[..., Sources]:
    """Return a function that builds sources from its arguments; a source that is not given is unavailable."""

    def make(
        cluster: ClusterView | None = None,
        accountant: AccountantClient | None = None,
        machine: NodeSnapshot | None = None,
        kubelet: SourceCheck | None = None,
        at: Clock = clock,
        **options: Any,
    ) -> Sources:
        return Sources(
            at,
            DoctorOptions(**options),
            machine=(lambda: MachineGpus(machine, len(machine.devices))) if machine is not None else nowhere("driver"),
            kubelet=(lambda: kubelet) if kubelet is not None else nowhere("kubelet"),
            cluster=(lambda: cluster) if cluster is not None else unavailable,
            accountant=(lambda: accountant) if accountant is not None else nowhere("accountant"),
        )

    return make


@pytest.fixture(scope="session")
def accountant_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., tuple[Service, str]]]:
    """Return a function that starts an accountant on a clock of its own and returns it with its address."""
    with ExitStack() as after:

        def make(clock: Clock, **settings: Any) -> tuple[Service, str]:
            chosen = Settings(data=tmp_path_factory.mktemp("data"), **{"auth": "off", **settings})
            service = after.enter_context(Service(chosen, clock))
            return service, after.enter_context(serve(service.app, "127.0.0.1", 0))

        yield make
