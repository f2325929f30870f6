"""Records that a test delivers to an accountant: intervals of whole GPUs, facts and batches; and a running
accountant."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from msgspec.structs import replace

from accountant.composition import Service
from accountant.core.settings import Settings
from agent.wire import AgentReport, Batch, Holder, PodFacts, UsageInterval
from gputally.base.clock import VirtualClock
from gputally.server.https_server import serve

QUARTER_MS = 900_000


class BatchWriter(Protocol):
    """The part of a ledger that takes batches."""

    def append(self, batches: Sequence[Batch], now_ms: int) -> Sequence[object]: ...


def pod_holder(name: str, namespace: str = "ns", uid: str = "", container: str = "") -> Holder:
    """Build a holder. uid: by default the name."""
    return Holder(kind="pod", uid=uid or name, namespace=namespace, name=name, container=container)


def interval(
    start_ms: int, gpu_uuid: str, holder: Holder | None = None, *, span_ms: int = QUARTER_MS, **fields: Any
) -> UsageInterval:
    """Build the whole time of a GPU over a span, allocated if it has a holder. `batch` numbers it."""
    whole_us = span_ms * 1000
    given: dict[str, Any] = {
        "gpu_model": "NVIDIA H100 80GB HBM3", "capacity_us": whole_us, "allocated_us": whole_us if holder else 0,
        "busy_us": 0, "method": "simulated", **fields,
    }  # fmt: skip
    return UsageInterval(seq=0, start_ms=start_ms, end_ms=start_ms + span_ms, gpu_uuid=gpu_uuid, holder=holder, **given)


def pod_facts(name: str, observed_ms: int, *, namespace: str = "ns", node: str = "n", **fields: Any) -> PodFacts:
    """Build a pod's facts. `batch` numbers them. The uid is by default the name."""
    return PodFacts(
        seq=0, uid=fields.pop("uid", name), namespace=namespace, name=name, node=node, observed_ms=observed_ms, **fields
    )


def batch(
    rows: Iterable[UsageInterval],
    facts: Iterable[PodFacts] = (),
    *,
    cluster: str = "c",
    node: str = "n",
    epoch: str = "e",
    first_seq: int = 1,
    agent: AgentReport | None = None,
) -> Batch:
    """Build a batch of an outbox that still has all its records: facts, then rows, numbered in this order."""
    numbered = [replace(record, seq=seq) for seq, record in enumerate((*facts, *rows), first_seq)]
    return Batch(
        cluster=cluster, node=node, boot_id="b", epoch=epoch, first_seq=first_seq, oldest_seq=1,
        intervals=tuple(record for record in numbered if isinstance(record, UsageInterval)),
        facts=tuple(record for record in numbered if isinstance(record, PodFacts)), agent=agent,
    )  # fmt: skip


def deliver(ledger: BatchWriter, now_ms: int, *batches: Batch) -> None:
    """Book the batches; none may be refused."""
    for receipt in ledger.append(batches, now_ms):
        assert not isinstance(receipt, Exception), receipt


@contextmanager
def running_accountant(settings: Settings, clock: VirtualClock, *batches: Batch) -> Iterator[tuple[Service, str]]:
    """Run an accountant with these batches in its ledger. Yields its address."""
    with Service(settings, clock) as service:
        deliver(service.ledger, clock.wall_ms(), *batches)
        with serve(service.app, "127.0.0.1", 0) as url:
            yield service, url
