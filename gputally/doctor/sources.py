"""Where a check's facts come from, each asked at most once: this machine, the cluster, the accountant.

A source that cannot be had raises, the same at every question, one of the stages' narrow exceptions or CannotCheck;
`checks.make` turns that into the reason why a check was not made. What only some checks need is imported by them, so
that a machine with the agent alone can be looked at. Nothing is written anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from agent.clock import Clock
from gputally.doctor.model import CannotCheck

if TYPE_CHECKING:
    from accountant.remote import Remote
    from accountant.wire import Policy
    from agent.kubelet import Given
    from fairshare.kube.kinds import Kind, Object
    from gputally.doctor.machine import Machine

T = TypeVar("T")


class Ground(Protocol):
    """A cluster to look at, which is also fairshare.kube.ports.Readable: fairshare.cluster.inspecting.Inspector."""

    def list(self, kind: Kind, *, fields: str = "") -> Sequence[Object]: ...

    def get(self, kind: Kind, name: str, namespace: str = "") -> Object: ...

    def scan(self, kind: Kind, take: Callable[[Object], object]) -> str: ...

    def served(self, groups: Iterable[str]) -> Mapping[tuple[str, str], Sequence[str]]: ...

    def may(self, wanted: Mapping[str, str], user: str = "", groups: Iterable[str] = ()) -> bool: ...

    def caller(self) -> str: ...

    def server_ms(self) -> int: ...


class Once:
    """A source that is opened at the first question; the same value, or the same exception, from then on."""

    def __init__(self, open_: Callable[[], T]) -> None:
        self._open: Callable[[], Any] = open_
        self._value: Any = None
        self._fault: Exception | None = None
        self._asked = False

    def __call__(self) -> Any:
        if not self._asked:
            self._asked = True
            try:
                self._value = self._open()
            except Exception as fault:
                self._fault = fault
                raise
        if self._fault is not None:
            raise self._fault
        return self._value


@dataclass(frozen=True)
class Options:
    """namespace: of the release. policy: a file instead of the one in force at the accountant."""

    url: str = "http://127.0.0.1:8080"
    token_file: Path | None = None
    ca_file: Path | None = None
    kubeconfig: Path | None = None
    policy: Path | None = None
    namespace: str = "gputally-system"
    kubelet_socket: Path = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
    proc: Path = Path("/proc")


class Sources:
    """Everything the checks look at. machine, kubelet, ground, remote: open the one source each; see `usual`."""

    def __init__(
        self,
        clock: Clock,
        options: Options,
        *,
        machine: Callable[[], Machine],
        kubelet: Callable[[], Given],
        ground: Callable[[], Ground],
        remote: Callable[[], Remote],
    ) -> None:
        self.clock = clock
        self.options = options
        self._machine, self._kubelet = Once(machine), Once(kubelet)
        self._ground, self._remote = Once(ground), Once(remote)
        self._policy = Once(self._find_policy)
        self._nodes = Once(self._find_nodes)
        self._pods = Once(self._find_pods)

    def machine(self) -> Machine:
        """This machine's GPUs and who holds them."""
        found: Machine = self._machine()
        return found

    def kubelet(self) -> Given:
        """What this machine's kubelet says."""
        found: Given = self._kubelet()
        return found

    def ground(self) -> Ground:
        """The cluster."""
        found: Ground = self._ground()
        return found

    def remote(self) -> Remote:
        """The accountant."""
        found: Remote = self._remote()
        return found

    def policy(self) -> Policy | None:
        """The policy of the file, else the one in force; None where there is none."""
        found: Policy | None = self._policy()
        return found

    def nodes(self) -> Sequence[Object]:
        """All nodes."""
        found: Sequence[Object] = self._nodes()
        return found

    def pods(self) -> Sequence[Object]:
        """Pods that ask for GPUs and are not finished."""
        found: Sequence[Object] = self._pods()
        return found

    @cached_property
    def now_ms(self) -> int:
        """One instant for all checks."""
        return self.clock.wall_ms()

    def _find_policy(self) -> Policy | None:
        from accountant.wire import PolicyVersion

        if self.options.policy is not None:
            from fairshare.policy import load

            return load(self.options.policy)[0]
        remote = self.remote()
        answer = remote.knock("/v1/policy")
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise CannotCheck(
                f"the policy in force cannot be read: {answer.status} {answer.reason}; give --policy FILE"
            )
        return remote.ask(PolicyVersion, "/v1/policy").policy

    def _find_nodes(self) -> Sequence[Object]:
        from fairshare.kube.kinds import NODE

        return self.ground().list(NODE)

    def _find_pods(self) -> Sequence[Object]:
        from fairshare.kube.kinds import POD
        from fairshare.kube.pods import read_pod

        found: list[Object] = []
        self.ground().scan(POD, lambda obj: found.append(obj) if read_pod(obj) is not None else None)
        return found


def usual(options: Options, clock: Clock) -> Sources:
    """The real sources."""

    def machine() -> Machine:
        from gputally.doctor.host import look

        return look(options.proc, clock)

    def kubelet() -> Given:
        from gputally.doctor.host import ask_kubelet

        return ask_kubelet(options.kubelet_socket, clock)

    def ground() -> Ground:
        from fairshare.cluster.inspecting import Inspector
        from fairshare.targets import KINDS

        return Inspector.connect(KINDS, options.kubeconfig)

    def remote() -> Remote:
        from accountant.remote import Remote, read_token

        token = read_token(options.token_file) if options.token_file is not None else None
        return Remote(options.url, token, options.ca_file)

    return Sources(clock, options, machine=machine, kubelet=kubelet, ground=ground, remote=remote)
