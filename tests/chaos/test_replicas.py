"""Two real replicas of the accountant on a real API server: killed, frozen and ended in turn, the ledger is exact."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos.accountant_process import AccountantProcess, assert_exact
from tests.chaos.replica_pair import Pair, two_accountants
from tests.deadlines import patience_s
from tests.real.controlplane import ApiServer, api_server

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with api_server(tmp_path_factory.mktemp("api-server")) as running:
        yield running


@pytest.fixture
def pair(tmp_path: Path, zygote: subprocess.Popen[str], server: ApiServer) -> Iterator[Callable[[bool], Pair]]:
    with contextlib.ExitStack() as stack:

        def start(own_volume: bool) -> Pair:
            lease = tmp_path.name[:50].replace("_", "-")
            return stack.enter_context(
                two_accountants(tmp_path, zygote, server.kubeconfig, lease, own_volume=own_volume)
            )

        yield start


def _again(replica: AccountantProcess) -> None:
    replica.end()
    replica.start()


@pytest.mark.parametrize("own_volume", [False, True])
def test_killed_again_and_again_the_other_takes_over_and_the_ledger_is_exact(
    pair: Callable[[bool], Pair], own_volume: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    both = pair(own_volume)
    for _ in range(2):  # each replica leads, dies and comes back once
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
    assert both.away_s[0] < patience_s(15)


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
