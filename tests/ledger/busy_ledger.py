"""A ledger of some busy hours, booked in random order, with its prices."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

from hypothesis import strategies as st

from accountant.ledger.protocols import Down, Facts, NamespaceFacts, NodeFacts
from accountant.prices.price_book import PriceBook
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from accountant.wire.policy_models import Policy, QueuePolicy
from agent.wire import AgentReport, GpuError, GpuReport, Holder
from gputally.base.clock import VirtualClock
from tests.empty_ledger import fresh
from tests.ledger.conftest import MINUTE, START_MS, Hand, booked

HAND = Hand(now_ms=START_MS + 300 * MINUTE)
MODELS = ("H100", "A100-80GB", "B200")


def book(*rows: tuple[str, str, str | None]) -> PriceBook:
    """Build a price book from (model, price, capacity type). The price of the H100 changes in the second hour."""
    shared = {"per": "gpu-hour", "basis": "gpu-only", "source": "test", "as_of": "2026-01-01"}
    dated = [("H100", "9.999", None, "2026-10-01T01:00:00Z", None)]
    dated += [(*row, "2026-01-01", "2026-10-01T01:00:00Z" if row[0] == "H100" and not row[2] else None) for row in rows]
    listed = [
        {**shared, "id": f"r{n}", "model": model, "price": price, "capacity_type": capacity, "valid_from": since}
        | ({"valid_to": until} if until else {})
        for n, (model, price, capacity, since, until) in enumerate(dated)
    ]
    return PriceBook.model_validate({"schema": 1, "currency": "USD", "timezone": "UTC", "rows": listed})


BOOK = book(("H100", "6.45", None), ("A100-80GB", "2.7401", None), ("A100-80GB", "1.1", "spot"))


Rows: TypeAlias = Sequence[tuple[int, int, int, int, bool]]
"""Quarter-hour, GPU, pod, minutes busy, use unknown."""
ROWS = st.lists(
    st.tuples(st.integers(0, 11), st.integers(0, 3), st.integers(0, 5), st.integers(0, 15), st.booleans()),
    min_size=1,
    max_size=25,
    unique_by=lambda row: row[:2],
)


AGENT = AgentReport(
    version="0.1.0", gpus=(GpuReport(gpu_uuid="gpu-0", errors=(GpuError(kind="xid 79", count=2, last_ms=START_MS),)),)
)
"""What the agent of each node says of itself."""


@contextmanager
def busy_ledger(
    rows: Rows | Mapping[str, Rows],
    order: random.Random,
    place: Path | None = None,
    exported: Sequence[str] = (),
) -> Iterator[DuckLedger]:
    """Open a ledger with these rows, pods of several teams, a node that was down, and changes of policies and
    labels. rows: by cluster, or of the cluster `prod`. place: the folder of its file; None for one of its own.
    exported: the labels of pods that are dimensions."""
    clusters = rows if isinstance(rows, Mapping) else {"prod": rows}
    with (
        TemporaryDirectory() as own,
        closing(
            open_ledger(
                fresh((place or Path(own)) / "ledger.duckdb"), VirtualClock(HAND.now_ms), exported_labels=exported
            )
        ) as ledger,
    ):
        for cluster, of_cluster in clusters.items():
            _book(ledger, cluster, of_cluster)
        _tell(ledger, clusters, START_MS + order.randrange(200) * MINUTE)
        ledger.put_policy(Policy(queues=(QueuePolicy(name="left", team="red"),)), START_MS)
        ledger.put_policy(Policy(queues=(QueuePolicy(name="left", team="lab"),)), START_MS + 100 * MINUTE)
        if order.random() < 0.5:
            ledger.checkpoint()
        yield ledger


def _book(ledger: DuckLedger, cluster: str, rows: Rows) -> None:
    """Book the rows of a cluster, and the facts of its pods."""
    sent = [
        HAND.row(
            seq, 15 * quarter, 15 * quarter + 15, f"gpu-{gpu}", gpu_model=MODELS[gpu % 3],
            busy_us=None if blind else busy * 60_000_000,
            holder=Holder("pod", f"p{pod}", f"ns-{pod % 2}", f"p{pod}"),
        )
        for seq, (quarter, gpu, pod, busy, blind) in enumerate(sorted(rows), 1)
    ]  # fmt: skip
    facts = [
        HAND.fact(
            len(sent) + 1 + pod, f"p{pod}", namespace=f"ns-{pod % 2}", name=f"p{pod}", workload=f"Job/j{pod % 4}",
            queue_ref="policy:left" if pod == 1 else "", created_ms=START_MS,
            labels={"team": "green", "gputally.dev/user": f"u{pod % 3}" if pod < 4 else ""},
        )
        for pod in range(6)
    ]  # fmt: skip
    assert booked(ledger, HAND.now_ms, HAND.batch(*sent, *facts, cluster=cluster, agent=AGENT)).quarantined == 0


def _tell(ledger: DuckLedger, clusters: Iterable[str], told_ms: int) -> None:
    """The node of each cluster is down for a while, and its namespaces change their teams."""
    down = Down(START_MS + 20 * MINUTE, START_MS + 95 * MINUTE, "NotReady")
    nodes = [NodeFacts(name, "n1", pool="a", capacity_type="on-demand", down=(down,)) for name in clusters]
    spaces = [NamespaceFacts(name, "ns-0", "blue", "team", ("green",)) for name in clusters]
    ledger.observe(Facts(nodes=tuple(nodes), namespaces=tuple(spaces)), told_ms)
    spaces = [
        NamespaceFacts(name, space, team) for name in clusters for space, team in (("ns-0", "red"), ("ns-1", "blue"))
    ]
    ledger.observe(Facts(namespaces=tuple(spaces)), START_MS + 200 * MINUTE)
