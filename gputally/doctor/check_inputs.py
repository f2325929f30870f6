"""Collects the facts for the checks, each once: this machine, the cluster, the accountant.

A source that is not available raises the same exception at every use, either CannotCheck or one of the stages' narrow
exceptions. `check_list.make` turns it into the reason why a check could not run. Modules that only some checks need are
imported by them, so that the doctor runs on a machine with only the agent. Nothing is written."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from agent.devices.driver_lifecycle import Gpus
from agent.devices.nvml_library import Driver, Fault
from agent.holders.kubelet_client import Kubelet, KubeletAnswer, UnaryChannel
from agent.holders.node_snapshot import NodeSource
from agent.holders.process_cgroups import PodLogs, ProcessTable
from gputally.base.clock import Clock
from gputally.doctor.findings import CannotCheck
from gputally.doctor.node_checks import Machine

if TYPE_CHECKING:
    from accountant.wire.http_client import AccountantClient
    from accountant.wire.policy_models import Policy
    from gputally.kubernetes.objects import Kind, Object

T = TypeVar("T")


class ClusterView(Protocol):
    """A cluster whose objects can be read, which is also a gputally.kubernetes.objects.ObjectReader:
    gputally.kubernetes.api_client.Inspector."""

    def list(self, kind: Kind, *, fields: str = "") -> Sequence[Object]: ...

    def get(self, kind: Kind, name: str, namespace: str = "") -> Object: ...

    def scan(self, kind: Kind, take: Callable[[Object], object]) -> str: ...

    def served(self, groups: Iterable[str]) -> Mapping[tuple[str, str], Sequence[str]]: ...

    def may(self, wanted: Mapping[str, str], user: str = "", groups: Iterable[str] = ()) -> bool: ...

    def caller(self) -> str: ...

    def server_ms(self) -> int: ...


class LazySource(Generic[T]):
    """A source that is opened on first use; it returns the same value, or raises the same exception, from then on."""

    def __init__(self, open_: Callable[[], T]) -> None:
        self._open = open_
        self._answer: Future[T] | None = None

    def __call__(self) -> T:
        if self._answer is None:
            self._answer = Future()
            try:
                self._answer.set_result(self._open())
            except Exception as fault:  # noqa: BLE001  # raised at every question, this one included
                self._answer.set_exception(fault)
        return self._answer.result()


@dataclass(frozen=True)
class Options:
    """The user's options.

    namespace: the namespace of the release.
    policy: a file to use instead of the policy in force at the accountant."""

    url: str = "http://127.0.0.1:8080"
    token_file: Path | None = None
    ca_file: Path | None = None
    kubeconfig: Path | None = None
    policy: Path | None = None
    namespace: str = "gputally"
    kubelet_socket: Path = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
    proc: Path = Path("/proc")


class Sources:
    """The facts for all checks. machine, kubelet, ground, remote: each opens one source; see `usual`."""

    def __init__(
        self,
        clock: Clock,
        options: Options,
        *,
        machine: Callable[[], Machine],
        kubelet: Callable[[], KubeletAnswer],
        ground: Callable[[], ClusterView],
        remote: Callable[[], AccountantClient],
    ) -> None:
        self.clock = clock
        self.options = options
        self.machine = LazySource(machine)
        """This machine's GPUs and their holders."""
        self.kubelet = LazySource(kubelet)
        """The answer of this machine's kubelet."""
        self.ground = LazySource(ground)
        """The cluster."""
        self.remote = LazySource(remote)
        """The accountant."""
        self.policy = LazySource(self._find_policy)
        """The policy of the file, or the one in force; None if there is none."""
        self.nodes = LazySource(self._find_nodes)
        """All nodes."""
        self.pods = LazySource(self._find_pods)
        """The pods that request GPUs and are not finished."""

    @cached_property
    def now_ms(self) -> int:
        """Return one time for all checks."""
        return self.clock.wall_ms()

    def _find_policy(self) -> Policy | None:
        from accountant.wire.policy_models import PolicyVersion

        if self.options.policy is not None:
            from fairshare.controller.policy_file import load

            return load(self.options.policy)[0]
        remote = self.remote()
        answer = remote.probe("/v1/policy")
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise CannotCheck(
                f"the policy in force cannot be read: {answer.status} {answer.reason}; give --policy FILE"
            )
        return remote.ask(PolicyVersion, "/v1/policy").policy

    def _find_nodes(self) -> Sequence[Object]:
        from gputally.kubernetes.objects import NODE

        return self.ground().list(NODE)

    def _find_pods(self) -> Sequence[Object]:
        from fairshare.core.pods import read_pod
        from gputally.kubernetes.objects import POD

        found: list[Object] = []
        self.ground().scan(POD, lambda obj: found.append(obj) if read_pod(obj) is not None else None)
        return found


def usual(options: Options, clock: Clock) -> Sources:
    """Return the real sources."""

    def machine() -> Machine:
        return replace(look(options.proc, clock), agents_pod=_AGENTS in os.environ)

    def kubelet() -> KubeletAnswer:
        return ask_kubelet(options.kubelet_socket, clock)

    def ground() -> ClusterView:
        from fairshare.targets import KINDS
        from gputally.kubernetes.api_client import Inspector

        return Inspector.connect(KINDS, options.kubeconfig)

    def remote() -> AccountantClient:
        from accountant.wire.http_client import AccountantClient
        from gputally.base.accountant_connection import Unanswered
        from gputally.base.http_calls import read_token

        token = read_token(options.token_file, Unanswered) if options.token_file is not None else None
        return AccountantClient(options.url, token, options.ca_file)

    return Sources(clock, options, machine=machine, kubelet=kubelet, ground=ground, remote=remote)


_POD_LOGS = Path("/var/log/pods")
_AGENTS = "NVIDIA_VISIBLE_DEVICES"
"""Environment variable that the chart sets in the agent's container."""
_BETWEEN_S = 1.0
"""Time between two readings of the driver, because busy time is a difference."""


def look(proc: Path, clock: Clock) -> Machine:
    """Read GPUs and the processes that hold them. Raises agent.core.errors.DriverReplaced."""
    driver = Driver()
    source = NodeSource(Gpus(driver), ProcessTable(proc), None, PodLogs(_POD_LOGS))
    try:
        snapshot = source.snapshot(clock.wall_ms())
        if snapshot.devices:
            clock.wait(_BETWEEN_S, threading.Event())
            snapshot = source.snapshot(clock.wall_ms())
        return Machine(snapshot, _counted(driver, len(snapshot.devices)))
    finally:
        source.close()


def _counted(driver: Driver, opened: int) -> int:
    try:
        return int(driver.call("nvmlDeviceGetCount"))
    except Fault:  # not started, or lost meanwhile: nothing is known beyond what was opened
        return opened


def ask_kubelet(socket: Path, clock: Clock) -> KubeletAnswer:
    """Return the kubelet's answer, or the reason why there is none. Raises CannotCheck if there is no kubelet."""
    if not socket.exists():
        raise CannotCheck(f"no kubelet here ({socket}); on a node of the cluster there is one")
    channel = UnaryChannel(socket, clock)
    try:
        return Kubelet(socket, clock, channel).poll()
    finally:
        channel.close()
