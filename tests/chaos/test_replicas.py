"""Two real replicas of the accountant on a real API server: killed, frozen and ended in turn, the ledger is exact."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos.accountant_process import GONE, AccountantProcess, accountant_process, assert_exact, outbox
from tests.deadlines import until
from tests.real.controlplane import ApiServer, api_server

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with api_server(tmp_path_factory.mktemp("api-server")) as running:
        yield running


class Pair:
    """Two replicas, and a node's agent that sends to the one that answers."""

    def __init__(self, replicas: tuple[AccountantProcess, AccountantProcess]) -> None:
        self.replicas = replicas
        self.sender = outbox()
        self.away_s: list[float] = []
        """Seconds from each end of a leader until the other replica served."""

    def leading(self) -> AccountantProcess | None:
        for replica in self.replicas:
            if replica.alive():
                with contextlib.suppress(*GONE):
                    if replica.ask("GET", "/leading", timeout=2)[0] == 200:
                        return replica
        return None

    def leader(self) -> AccountantProcess:
        found: AccountantProcess = until(self.leading, lambda: "no replica leads:\n" + self.replicas[0].words(), 60)
        return found

    def work(self, quarters: int) -> None:
        """Let the agent deliver to the replica that accepts."""
        self.sender.grow(quarters)

        def delivered() -> bool:
            leader = self.leading()
            if leader is not None:
                with contextlib.suppress(*GONE):
                    self.sender.send(leader, 8)
            return self.sender.durable >= self.sender.last

        until(delivered, lambda: "not delivered:\n" + self.replicas[0].words() + self.replicas[1].words(), 60)

    def change(self, end: Callable[[AccountantProcess], None]) -> AccountantProcess:
        """End the leader, wait for the other replica to lead, and return the one that ended."""
        before = self.leader()
        (other,) = (replica for replica in self.replicas if replica is not before)
        began = time.monotonic()
        end(before)
        until(lambda: self.leading() is other, lambda: "the other one does not take over:\n" + other.words(), 90)
        self.away_s.append(time.monotonic() - began)
        return before


@pytest.fixture
def pair(tmp_path: Path, zygote: subprocess.Popen[str], server: ApiServer) -> Iterator[Callable[[bool], Pair]]:
    with contextlib.ExitStack() as stack:

        def start(own_volume: bool) -> Pair:
            off = tmp_path / "off"
            found = []
            for name in ("a", "b"):
                (tmp_path / name).mkdir()
                one = stack.enter_context(accountant_process(tmp_path / name, zygote))
                places = {"archive": {"to": str(off / "archive"), "every": 2}, "backups": {"to": str(off / "backups")}}
                lease = tmp_path.name[:50].replace("_", "-")
                one.settings(
                    kubernetes={"kubeconfig": str(server.kubeconfig)},
                    leader_election={"lease": lease, "namespace": "default", "own_volume": own_volume},
                    **(places if own_volume else {"data": str(tmp_path / "shared")}),
                )
                one.start()
                found.append(one)
            return Pair((found[0], found[1]))

        yield start


def _again(replica: AccountantProcess) -> None:
    replica.end()
    replica.start()


@pytest.mark.parametrize("own_volume", [False, True])
def test_killed_again_and_again_the_other_takes_over_and_the_ledger_is_exact(
    pair: Callable[[bool], Pair], own_volume: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    both = pair(own_volume)
    for _ in range(4):
        both.work(8)
        both.change(AccountantProcess.end).start()
        both.work(3)
    assert_exact(both.sender, both.leader())
    with capsys.disabled():
        print(f"\nown volumes {own_volume}: served again after {', '.join(f'{one:.1f} s' for one in both.away_s)}")


def test_asked_to_end_it_hands_over_at_once(pair: Callable[[bool], Pair]) -> None:
    both = pair(False)
    both.work(4)
    both.change(lambda leader: leader.end(signal.SIGTERM)).start()
    both.work(4)
    assert_exact(both.sender, both.leader())
    assert both.away_s[0] < 30


def test_a_leader_that_was_frozen_commits_nothing_when_it_wakes(pair: Callable[[bool], Pair]) -> None:
    """With separate volumes, only the Lease prevents it."""
    both = pair(True)
    both.work(8)
    frozen = both.change(lambda leader: os.kill(leader.pid or 0, signal.SIGSTOP))
    both.work(8)
    os.kill(frozen.pid or 0, signal.SIGCONT)
    frozen.gone()  # by itself
    assert "holds the Lease" in frozen.words()
    both.work(2)
    assert_exact(both.sender, both.leader())


def test_a_lost_volume_is_rebuilt_by_the_replica_that_takes_over(pair: Callable[[bool], Pair]) -> None:
    both = pair(True)
    both.work(20)
    dead = both.change(AccountantProcess.end)
    shutil.rmtree(dead.folder / "data", ignore_errors=True)
    dead.start()
    both.work(5)
    both.change(AccountantProcess.end)
    both.work(1)  # the agent hears what is not there any more, and sends it again
    assert_exact(both.sender, both.leader())
