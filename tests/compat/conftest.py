"""A ledger with the usage of each queue in a test vector, and KAI's usage source over it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from accountant.compat.kai_usage_api import KaiMetrics, KaiUsageSource
from accountant.core.settings import KaiUsage
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from accountant.wire.policy_models import Policy
from agent.wire import UsageInterval
from gputally.base.clock import VirtualClock
from tests.compat.opencost_day import START_MS
from tests.compat.opencost_listener import Port
from tests.compat.prometheus_sampling import Segment
from tests.empty_ledger import fresh
from tests.shared_files import shared_cases
from tests.usage_records import batch, interval, pod_facts, pod_holder

STEP_S = 30


def vectors() -> list[Any]:
    """The cases of KAI's usage, for `parametrize`."""
    return shared_cases("vectors/kai_usage.json", lambda document: document["vectors"])


@dataclass(frozen=True)
class Site:
    ledger: DuckLedger
    clock: VirtualClock
    source: KaiUsageSource
    registry: CollectorRegistry


def book(ledger: DuckLedger, queues: Mapping[str, Sequence[Segment]], gpus: int, until_s: int) -> None:
    """Give whole GPUs to the queues in order; on a single GPU each queue gets its fraction of it."""
    rows: list[UsageInterval] = []
    facts = [pod_facts(f"pod-{name}", START_MS, namespace=name, node="n1", queue_ref=f"kai:{name}") for name in queues]
    for step in range(0, until_s, STEP_S):
        free = list(range(gpus))
        held: dict[int, list[tuple[str, float]]] = {gpu: [] for gpu in free}
        for name, segments in queues.items():
            value = next((v for start, end, v in segments if start <= step < end), 0)
            if gpus == 1:
                held[0] += [(name, value)] if value else []
            else:
                for gpu in free[: int(value)]:
                    held[gpu].append((name, 1.0))
                free = free[int(value) :]
        for gpu, holders in held.items():
            for name, share in [*holders, ("", 1.0 - sum(share for _, share in holders))]:
                microseconds = round(STEP_S * 1_000_000 * share)
                if not microseconds:
                    continue
                rows.append(
                    interval(
                        START_MS + step * 1000, f"GPU-{gpu}", pod_holder(f"pod-{name}", name) if name else None,
                        span_ms=STEP_S * 1000, gpu_model="H100", capacity_us=microseconds,
                        allocated_us=microseconds if name else 0, busy_us=None, method="allocation",
                    )
                )  # fmt: skip
    one = batch(rows, facts, cluster="prod", node="n1", epoch="0192-a")
    (receipt,) = ledger.append([one], START_MS + until_s * 1000)
    assert not isinstance(receipt, Exception), receipt
    assert receipt.quarantined == 0


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    clock = VirtualClock(START_MS)
    ledger = open_ledger(fresh(tmp_path / "ledger.duckdb"), clock)
    ledger.put_policy(
        Policy.model_validate(
            {"queues": [{"name": "team-a", "refs": ["kai:a"]}, {"name": "team-b", "refs": ["kai:b", "kueue:x/y"]}]}
        ),
        START_MS,
    )
    registry = CollectorRegistry()
    source = KaiUsageSource(ledger, clock, KaiUsage(listen="127.0.0.1:0"), KaiMetrics(registry))
    yield Site(ledger, clock, source, registry)
    ledger.close()


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Port]:
    port = Port(tmp_path_factory.mktemp("opencost"))
    yield port
    port.ledger.close()


@pytest.fixture
def port(filled: Port) -> Iterator[Port]:
    before = filled.book
    yield filled
    filled.book = before
