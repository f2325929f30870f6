"""Two replicas of the accountant, and a node's agent that sends to the one that serves."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import Popen

from tests.chaos.accountant_process import GONE, AccountantProcess, accountant_process, outbox
from tests.deadlines import until


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

    def words(self) -> str:
        return "".join(replica.words() for replica in self.replicas)

    def leader(self) -> AccountantProcess:
        found: AccountantProcess = until(self.leading, lambda: "no replica leads:\n" + self.words(), 60)
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

        until(delivered, lambda: "not delivered:\n" + self.words(), 60)

    def change(self, end: Callable[[AccountantProcess], None]) -> AccountantProcess:
        """End the leader, wait for the other replica to lead, and return the one that ended."""
        before = self.leader()
        (other,) = (replica for replica in self.replicas if replica is not before)
        began = time.monotonic()
        end(before)
        until(lambda: self.leading() is other, lambda: "the other one does not take over:\n" + other.words(), 90)
        self.away_s.append(time.monotonic() - began)
        return before


@contextlib.contextmanager
def two_accountants(
    folder: Path, zygote: Popen[str], kubeconfig: Path, lease: str, *, own_volume: bool, **settings: str
) -> Iterator[Pair]:
    """Start two replicas that elect a leader at the API server of `kubeconfig`, and kill them when the block ends.

    settings: further settings of both."""
    off = folder / "off"
    found = []
    with contextlib.ExitStack() as stack:
        for name in ("a", "b"):
            (folder / name).mkdir()
            one = stack.enter_context(accountant_process(folder / name, zygote))
            places = {"archive": {"to": str(off / "archive"), "every": 2}, "backups": {"to": str(off / "backups")}}
            one.settings(
                kubernetes={"kubeconfig": str(kubeconfig)},
                leader_election={"lease": lease, "namespace": "default", "own_volume": own_volume},
                **settings,
                **(places if own_volume else {"data": str(folder / "shared")}),
            )
            one.start()
            found.append(one)
        yield Pair((found[0], found[1]))
