"""Reads the facts for the checks, each once: from this machine, the cluster and the accountant.

A source that is not available raises the same exception at every use, either CannotCheck or one of the programs' own
exceptions. `gputally.doctor.__main__.run_check` turns the exception into the reason why a check could not run. A
function that needs the modules of another program imports them itself, so that the doctor runs on a machine with only
the agent. This module writes nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from agent.gpu_readers import protocol as gpu_readers
from agent.gpu_readers.chosen import ChosenReader, GpuReaders
from agent.holders.installed import installed
from agent.holders.process_cgroups import PodLogs, ProcessTable
from agent.holders.protocol import SourceCheck
from agent.node_reader import NodeSource
from gputally.base.clock import Clock
from gputally.base.plugins import usable
from gputally.doctor.findings import CannotCheck
from gputally.doctor.node_checks import MachineGpus

if TYPE_CHECKING:
    from accountant.wire.policy_models import Policy
    from accountant.wire.typed_accountant_client import AccountantClient
    from gputally.kubernetes.objects import Kind, Object

T = TypeVar("T")


class ClusterView(Protocol):
    """The methods of gputally.kubernetes.api_client.Inspector that the checks use."""

    def list(self, kind: Kind, *, fields: str = "") -> Sequence[Object]: ...

    def get(self, kind: Kind, name: str, namespace: str = "") -> Object: ...

    def scan(self, kind: Kind, visit: Callable[[Object], object]) -> str: ...

    def served(self, groups: Iterable[str]) -> Mapping[tuple[str, str], Sequence[str]]: ...

    def may(self, attributes: Mapping[str, str], user: str = "", groups: Iterable[str] = ()) -> bool: ...

    def caller(self) -> str: ...

    def server_ms(self) -> int: ...


class LazySource(Generic[T]):
    """A source that the first call reads. Every call returns the same value or raises the same exception."""

    def __init__(self, read: Callable[[], T]) -> None:
        self._read = read
        self._outcome: Future[T] | None = None

    def __call__(self) -> T:
        if self._outcome is None:
            self._outcome = Future()
            try:
                self._outcome.set_result(self._read())
            except Exception as fault:  # noqa: BLE001  # raised at every call, this one included
                self._outcome.set_exception(fault)
        return self._outcome.result()


@dataclass(frozen=True)
class DoctorOptions:
    """The options of the command.

    policy: a policy file; None uses the accountant's policy in force.
    namespace: the namespace of the release."""

    url: str = "http://127.0.0.1:8080"
    token_file: Path | None = None
    ca_file: Path | None = None
    kubeconfig: Path | None = None
    policy: Path | None = None
    namespace: str = "gputally"
    kubelet_socket: Path = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
    proc: Path = Path("/proc")


class Sources:
    """The facts for all checks. The arguments machine, kubelet, cluster and accountant are functions that read one
    source each."""

    def __init__(
        self,
        clock: Clock,
        options: DoctorOptions,
        *,
        machine: Callable[[], MachineGpus],
        kubelet: Callable[[], SourceCheck],
        cluster: Callable[[], ClusterView],
        accountant: Callable[[], AccountantClient],
    ) -> None:
        self.clock = clock
        self.options = options
        self.machine = LazySource(machine)
        """This machine's GPUs and their holders."""
        self.kubelet = LazySource(kubelet)
        """The answer of this machine's kubelet."""
        self.cluster = LazySource(cluster)
        """The cluster's API server."""
        self.accountant = LazySource(accountant)
        """The accountant."""
        self.policy = LazySource(self._read_policy)
        """The policy of the file, or the one in force; None if there is none."""
        self.ledger_ms = LazySource(self._read_ledger_ms)
        """The time of the accountant's clock, by which windows of the ledger go. A demo's ledger has its own."""
        self.nodes = LazySource(self._read_nodes)
        """All nodes."""
        self.pods = LazySource(self._read_pods)
        """The pods that request GPUs and are not finished."""

    @cached_property
    def now_ms(self) -> int:
        """The time of the first use in UTC milliseconds, which is the same for all checks."""
        return self.clock.wall_ms()

    def _read_policy(self) -> Policy | None:
        from accountant.wire.policy_models import PolicyVersion

        if self.options.policy is not None:
            from fairshare.controller.policy_file import load

            return load(self.options.policy)[0]
        accountant = self.accountant()
        answer = accountant.probe("/v1/policy")
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise CannotCheck(
                f"the policy in force cannot be read: {answer.status} {answer.reason}; give --policy FILE"
            )
        return accountant.ask(PolicyVersion, "/v1/policy").policy

    def _read_ledger_ms(self) -> int:
        return self.accountant().clock_ms(self.now_ms)

    def _read_nodes(self) -> Sequence[Object]:
        from gputally.kubernetes.objects import NODE

        return self.cluster().list(NODE)

    def _read_pods(self) -> Sequence[Object]:
        from fairshare.core.gpu_demand import read_member
        from gputally.kubernetes.objects import POD

        pods: list[Object] = []
        self.cluster().scan(POD, lambda obj: pods.append(obj) if read_member(obj) is not None else None)
        return pods


def real_sources(options: DoctorOptions, clock: Clock) -> Sources:
    """Return the sources that read this machine, the cluster and the accountant."""

    def cluster() -> ClusterView:
        from fairshare.targets.installed import kinds
        from gputally.kubernetes.api_client import Inspector

        return Inspector.connect(kinds(), options.kubeconfig)

    def accountant() -> AccountantClient:
        from accountant.wire.typed_accountant_client import AccountantClient
        from gputally.base.accountant_connection import Unanswered
        from gputally.base.http_calls import read_token

        token = read_token(options.token_file, Unanswered) if options.token_file is not None else None
        return AccountantClient(options.url, token, options.ca_file)

    return Sources(
        clock,
        options,
        machine=lambda: read_machine(options.proc, clock),
        kubelet=lambda: ask_kubelet(options.kubelet_socket, clock),
        cluster=cluster,
        accountant=accountant,
    )


_POD_LOGS = Path("/var/log/pods")
_AGENT_VARIABLE = "NVIDIA_VISIBLE_DEVICES"
"""Environment variable that the chart sets in the agent's container."""
_BETWEEN_S = 1.0
"""Time between two readings of the driver, because busy time is a difference."""


def read_machine(proc: Path, clock: Clock) -> MachineGpus:
    """Read this machine's GPUs and the processes that hold them. proc: the host's process table.

    Raises CannotCheck if no installed reader has a driver, and agent.core.readings.DriverReplaced."""
    readers = usable(gpu_readers.SEAM, gpu_readers.GpuReaderPlugin).values()
    found = next(((one.name, one.check) for one in readers if one.check is not None), None)
    if found is None:
        raise CannotCheck("no reader of GPUs that is installed here has a driver to examine (gputally plugins)")
    name, check = found
    driver = check()
    source = NodeSource(GpuReaders((ChosenReader(name, driver.reader),)), ProcessTable(proc), None, PodLogs(_POD_LOGS))
    try:
        snapshot = source.snapshot(clock.wall_ms())
        if snapshot.devices:
            clock.wait(_BETWEEN_S, threading.Event())
            snapshot = source.snapshot(clock.wall_ms())
        count = driver.count()
        failure = dict(snapshot.sources).get(name, "")
        return MachineGpus(
            snapshot,
            len(snapshot.devices) if count is None else count,
            failure,
            driver.remedy(failure) if failure else driver.no_gpus,
            agents_pod=_AGENT_VARIABLE in os.environ,
        )
    finally:
        source.close()


def ask_kubelet(socket: Path, clock: Clock) -> SourceCheck:
    """Ask the kubelet once. If it does not answer, `failure` of the result is the reason. Raises CannotCheck if this
    machine has no kubelet, or no installed source of holders asks one."""
    if not socket.exists():
        raise CannotCheck(f"this machine has no kubelet ({socket}); run the check on a node of the cluster")
    check = next((one.check for one in installed().values() if one.check is not None), None)
    if check is None:
        raise CannotCheck("no source of holders that is installed here asks the kubelet (gputally plugins)")
    return check(socket, clock)
