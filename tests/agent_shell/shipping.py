"""An outbox, the scripted accountant that it is sent to, and the uploaders between them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent.metering.meter import ClosedSet
from agent.upload.spool import Outbox
from agent.upload.uploader import ShipResult, Uploader
from agent.wire import Batch, PodFacts
from gputally.base.clock import VirtualClock
from tests.agent_shell.scripted_accountant import Reply, ScriptedAccountant, refuse


class Shipping:
    """Closes the uploaders that it made."""

    def __init__(self, outbox: Outbox, accountant: ScriptedAccountant, clock: VirtualClock) -> None:
        self.outbox = outbox
        self.accountant = accountant
        self.clock = clock
        self._made: list[Uploader] = []

    @property
    def batches(self) -> list[Batch]:
        return self.accountant.batches

    def append(self, *sets: ClosedSet, facts: Sequence[PodFacts] = ()) -> None:
        self.outbox.append(sets, facts, None)

    def reply(self, answer: Reply) -> None:
        """From now on the accountant gives this answer to every batch."""
        self.accountant.script = lambda batch: answer

    def refuse(self, status: int, slug: str, **members: Any) -> None:
        """From now on the accountant answers every batch with a problem of its own."""
        self.reply(refuse(status, slug, **members))

    def uploader(self, token_file: Path | None = None, **options: Any) -> Uploader:
        options = {"timeout_s": 5.0, "jitter": lambda: 1.0, "url": self.accountant.url, **options}
        url = options.pop("url")
        self._made.append(Uploader(self.outbox, url, "c1", "n1", "boot-1", token_file, self.clock, **options))
        return self._made[-1]

    def close(self) -> None:
        for uploader in self._made:
            uploader.close()


def drain(uploader: Uploader, steps: int = 200) -> list[ShipResult]:
    """Ships until nothing more happens at once."""
    results = []
    for _ in range(steps):
        results.append(uploader.ship())
        if not results[-1].progress:
            return results
    raise AssertionError(f"no end after {steps} steps: {results[-3:]}")
