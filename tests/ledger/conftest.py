"""A ledger on a virtual clock, a builder of records, and functions that book records and open ledgers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from accountant.ledger.protocols import Receipt
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from agent.wire import Batch, Holder, PodFacts, Skipped, UsageInterval
from gputally.base.clock import VirtualClock
from tests.empty_ledger import fresh
from tests.moments import present

START_MS = 1_790_812_800_000
MINUTE = 60_000
NOW_MS = START_MS + 60 * MINUTE


@dataclass
class Hand:
    """Builds intervals, facts and batches with defaults. Times are minutes after `start_ms`."""

    start_ms: int = START_MS
    now_ms: int = NOW_MS
    pod: Holder = field(default_factory=lambda: Holder(kind="pod", uid="pod-1", namespace="vision", name="train-0"))

    def row(self, seq: int, start: float = 0, end: float = 1, gpu: str = "gpu-1", **changes: Any) -> UsageInterval:
        begin, stop = self.start_ms + round(start * MINUTE), self.start_ms + round(end * MINUTE)
        whole = (stop - begin) * 1000
        holder = changes.get("holder", self.pod)
        given: dict[str, Any] = {
            "capacity_us": whole,
            "allocated_us": whole if holder else 0,
            "busy_us": whole // 2 if holder else None,
            "method": "device",
            "gpu_model": "H100",
            "holder": holder,
        }
        return UsageInterval(seq=seq, start_ms=begin, end_ms=stop, gpu_uuid=gpu, **{**given, **changes})

    def fact(self, seq: int, uid: str = "pod-1", **changes: Any) -> PodFacts:
        given: dict[str, Any] = {"namespace": "vision", "name": "train-0", "node": "n1", "observed_ms": self.start_ms}
        return PodFacts(seq=seq, uid=uid, **{**given, **changes})

    def batch(self, *records: UsageInterval | PodFacts | Skipped, **changes: Any) -> Batch:
        first = min(record.seq for record in records) if records else 1
        given: dict[str, Any] = {
            "cluster": "prod", "node": "n1", "boot_id": "boot", "epoch": "0192-a", "first_seq": first, "oldest_seq": 1,
            "intervals": tuple(r for r in records if isinstance(r, UsageInterval)),
            "facts": tuple(r for r in records if isinstance(r, PodFacts)),
            "skipped": tuple(r for r in records if isinstance(r, Skipped)),
        }  # fmt: skip
        return Batch(**{**given, **changes})


@pytest.fixture
def hand() -> Hand:
    return Hand()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(NOW_MS)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.duckdb"


Opener = Callable[..., DuckLedger]


@pytest.fixture
def opened(path: Path, clock: VirtualClock) -> Iterator[Opener]:
    """Return a function that opens the ledger at a path (by default `path`) with options of `open_ledger`. Each is
    closed after the test."""
    with ExitStack() as closed_after:

        def open_at(place: Path = path, clock: VirtualClock = clock, **options: Any) -> DuckLedger:
            return closed_after.enter_context(closing(open_ledger(place, clock, **options)))

        yield open_at


@pytest.fixture
def ledger(opened: Opener, path: Path) -> DuckLedger:
    return opened(fresh(path))


def booked(ledger: DuckLedger, now_ms: int, batch: Batch) -> Receipt:
    """Return the receipt of a batch, which the ledger has to accept."""
    (receipt,) = ledger.append([batch], now_ms)
    assert isinstance(receipt, Receipt), receipt
    return receipt


Send = Callable[..., Receipt]


@pytest.fixture
def send(ledger: DuckLedger, hand: Hand) -> Send:
    """Return a function that books a batch of the given records at `now_ms`, or else at the builder's time."""

    def send_batch(*records: Any, now_ms: int | None = None, **changes: Any) -> Receipt:
        return booked(ledger, hand.now_ms if now_ms is None else now_ms, hand.batch(*records, **changes))

    return send_batch


Accounts = Callable[..., dict[str, int]]


@pytest.fixture
def accounts(ledger: DuckLedger) -> Accounts:
    """Return the non-zero accounts over minutes after the start, of everything or of one group."""

    def ask(start: float, end: float, **where: str) -> dict[str, int]:
        chosen: Any = {dimension: {value} for dimension, value in where.items()}
        span = (START_MS + round(start * MINUTE), START_MS + round(end * MINUTE))
        lines = present(ledger).usage(span, (), chosen).lines()
        return {k: v for line in lines for k, v in line.accounts_gpu_us.model_dump().items() if v}

    return ask
