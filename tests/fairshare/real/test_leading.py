"""Of several replicas one leads: it takes the Lease, keeps it, loses it and gives it back, on a real API server."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fairshare.controller.control_loop import Controller
from fairshare.targets.status_config_map import StatusObject
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import SystemClock, VirtualClock
from gputally.kubernetes.api_client import KubernetesCluster
from gputally.kubernetes.leader_election import Election, LeaseTimes
from tests.fairshare.builders import policy_of
from tests.fairshare.observations import results_of
from tests.fairshare.real.conftest import Request
from tests.fairshare.real.installing import add_queues, weights_of
from tests.patience import until
from tests.real.controlplane import ApiServer, frozen

pytestmark = pytest.mark.real
QUICK = LeaseTimes(lease_s=3, renew_s=2, retry_s=1)
STATUS = StatusObject("gputally", "gputally-fairshare")


class Replica:
    """An election in a thread of its own."""

    def __init__(self, server: ApiServer, identity: str, lease: str, kubeconfig: Path | None = None) -> None:
        path = kubeconfig or server.kubeconfig
        self.election = Election(lease, "gputally", identity, SystemClock(), kubeconfig=path, times=QUICK)
        self.stop = threading.Event()
        tasks = BackgroundTasks(SystemClock())
        self.thread = tasks.start("lease", self.election.run, self.stop, list[Exception]().append)

    def end(self) -> None:
        self.stop.set()
        self.thread.join(10)
        assert not self.thread.is_alive()


@pytest.fixture
def replicas(server: ApiServer, installed: Path) -> Iterator[Callable[[str, str], Replica]]:
    started: list[Replica] = []

    def start(identity: str, lease: str) -> Replica:
        # The chart's role knows one Lease by name.
        started.append(Replica(server, identity, lease, installed if lease == STATUS.name else None))
        return started[-1]

    yield start
    for replica in started:
        replica.end()


def test_of_two_replicas_one_leads_and_the_other_takes_over(replicas: Callable[[str, str], Replica]) -> None:
    one, two = replicas("one", STATUS.name), replicas("two", STATUS.name)

    def leaders() -> list[str]:
        return [name for name, replica in (("one", one), ("two", two)) if replica.election.leading()]

    (first,) = until(leaders, "nobody leads")
    leader, other = (one, two) if first == "one" else (two, one)
    assert not other.election.leading()
    leader.end()  # gives the Lease back
    until(other.election.leading, "nobody takes over", 5)
    assert not leader.election.leading()


def test_who_cannot_renew_does_not_lead(server: ApiServer, replicas: Callable[[str, str], Replica]) -> None:
    only = replicas("only", "frozen")
    until(only.election.leading, "nobody leads")
    with frozen(server):
        until(lambda: not only.election.leading(), "it believes in a lease that has run out", 6)
        until(lambda: only.election.fault, "it does not say why", 10)
    until(only.election.leading, "it does not come back")
    assert only.election.fault == ""


def test_a_standby_writes_nothing_and_goes_on_where_the_leader_stopped(
    real: KubernetesCluster, accountant: Any, clock: VirtualClock
) -> None:
    add_queues(real, "sb-a", "sb-b")
    policy = policy_of([{"name": f"sb-{x}", "refs": [f"kai:sb-{x}"]} for x in "ab"])
    accountant.spend(**{"sb-a": 0.9, "sb-b": 0.1})
    where = StatusObject("default", "standby")
    acting = {"first": True}
    first = Controller(policy, accountant, real, clock, status_object=where, leading=lambda: acting["first"])
    second = Controller(policy, accountant, real, clock, status_object=where, leading=lambda: not acting["first"])
    looking = second.cycle()  # announces no policy: usage is still counted under no policy
    assert (looking.leading, results_of(looking), weights_of(real, "sb-a")) == (False, {}, [0])
    first.cycle()
    published = weights_of(real, "sb-a", "sb-b")
    assert published[0] < published[1]
    acting["first"] = False
    clock.advance(60_000)
    assert results_of(first.cycle()) == {}
    taken_over = second.cycle()
    assert taken_over.leading
    assert not [event for event in taken_over.events if event.name == where.name]  # said already
    assert weights_of(real, "sb-a", "sb-b") == published or set(results_of(taken_over).values()) == {"applied"}


def test_the_program_takes_the_lease_serves_and_gives_it_back_on_sigterm(
    installed: Path, server: ApiServer, real: KubernetesCluster, tmp_path: Path, ask: Request
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("schema: 1\nqueues: [{name: a, refs: ['kai:none']}]\n")
    command = [
        sys.executable, "-m", "fairshare", "run", "--policy", str(policy), "--accountant", "http://127.0.0.1:1",
        "--kubeconfig", str(installed), "--listen", "127.0.0.1:0", "--extender-listen", "127.0.0.1:0",
    ]  # fmt: skip
    names = {"STATUS_NAMESPACE": "gputally", "STATUS_NAME": STATUS.name, "LEASE": STATUS.name, "IDENTITY": "program"}
    environment = {f"GPUTALLY_FAIRSHARE_{key}": value for key, value in names.items()}
    path = f"/apis/coordination.k8s.io/v1/namespaces/gputally/leases/{STATUS.name}"

    def holder() -> str | None:
        found: str | None = ask("GET", path)["spec"].get("holderIdentity")
        return found

    with (tmp_path / "log").open("wb") as output:
        program = subprocess.Popen(command, stderr=output, env={"PATH": "/usr/bin:/bin", **environment})
        try:
            until(lambda: holder() == "program", "it does not take the Lease")
            program.send_signal(signal.SIGTERM)
            assert program.wait(15) == 0
        finally:
            program.kill()
            program.wait()
    assert holder() is None
    text = (tmp_path / "log").read_text()
    assert "Traceback" not in text
    assert '"event": "stopping"' in text
