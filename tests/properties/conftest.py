"""Ledgers for the property tests of windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from accountant.ledger.protocols import Facts
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from accountant.wire.policy_models import Policy
from gputally.base.clock import VirtualClock
from tests.empty_ledger import fresh
from tests.properties.interval_streams import POLICY, SPAN_MS, START_MS


@pytest.fixture
def ledgers(tmp_path: Path) -> Iterator[Callable[..., DuckLedger]]:
    """Creates ledgers with facts of the cluster and a policy, and closes them after the test."""
    opened: list[DuckLedger] = []

    def make(*facts: Facts, policy: Policy | None = POLICY) -> DuckLedger:
        ledger = open_ledger(fresh(tmp_path / f"{len(opened)}.duckdb"), VirtualClock(START_MS + 2 * SPAN_MS))
        opened.append(ledger)
        if policy is not None:
            ledger.put_policy(policy, START_MS)
        for each in facts:
            ledger.observe(each, START_MS)
        return ledger

    yield make
    for ledger in opened:
        ledger.close()
