"""After a start the accountant queries the policy's window once, so that later queries are answered from the cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from accountant.runtime.background_tasks import in_force, warm
from accountant.storage.duckdb_engine import Cursor
from accountant.storage.duckdb_ledger import DuckLedger
from accountant.storage.ledger_state import State
from accountant.wire.policy_models import Policy, QueuePolicy, WindowSpec
from gputally.base.clock import VirtualClock
from tests.ledger.conftest import NOW_MS, START_MS, Hand


class Counting(DuckLedger):
    """Counts the snapshots that were opened."""

    read = 0

    @contextmanager
    def _snapshot(self, start_ms: int = 0, end_ms: int = 0) -> Iterator[tuple[Cursor, State]]:
        self.read += 1
        with super()._snapshot(start_ms, end_ms) as found:
            yield found


@pytest.fixture
def counting(path: Path, clock: VirtualClock, hand: Hand) -> Iterator[Counting]:
    """An hour of one-minute rows and a policy with a half-life, in a ledger with an empty cache."""
    ledger = Counting(path, clock)
    ledger.append([hand.batch(*(hand.row(i + 1, i, i + 1) for i in range(58)))], NOW_MS)
    spec = WindowSpec(size=3_600, half_life=1_800)
    ledger.put_policy(Policy(window=spec, queues=(QueuePolicy(name="q"),)), START_MS)
    ledger.close()
    ledger = Counting(path, clock)
    yield ledger
    ledger.close()


def test_the_next_window_needs_no_table(counting: Counting, path: Path, clock: VirtualClock) -> None:
    spec = WindowSpec(size=3_600, half_life=1_800)
    version = in_force(counting, NOW_MS)
    assert version is not None
    warm(counting, version.policy, None, NOW_MS)
    read = counting.read
    assert read
    warmed = counting.window(spec, NOW_MS, "allocated", 0.98)
    assert warmed.watermark_ms is not None
    assert warmed.watermark_ms < NOW_MS
    counting.window(spec, warmed.watermark_ms, "allocated", 0.98)
    assert counting.read == read
    counting.close()
    cold = Counting(path, clock)
    assert cold.window(spec, NOW_MS, "allocated", 0.98) == warmed
    assert cold.read == 1
    cold.close()


def test_nor_does_one_of_a_cluster_of_several(counting: Counting, hand: Hand) -> None:
    counting.append([hand.batch(*(hand.row(i + 1, i, i + 1) for i in range(50)), cluster="staging")], NOW_MS)
    version = in_force(counting, NOW_MS)
    assert version is not None
    warm(counting, version.policy, None, NOW_MS)
    read = counting.read
    for cluster in ("prod", "staging", None):
        assert counting.window(version.policy.window, NOW_MS, "allocated", 0.98, cluster=cluster).capacity > 0
    assert counting.read == read


def test_without_a_policy_nothing_is_asked(ledger: DuckLedger) -> None:
    assert in_force(ledger, NOW_MS) is None
