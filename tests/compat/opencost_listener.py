"""A day of two nodes in a ledger, priced, and OpenCost's API in front of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from accountant.compat.opencost_api import AllocationSource, create_app
from accountant.core.settings import Limits
from accountant.ledger.protocols import Facts, NamespaceFacts
from accountant.prices import price_book as prices
from accountant.prices.price_book import PriceBook
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from agent.wire import Batch, Holder, Owner, PodFacts, Slice, UsageInterval
from gputally.base.clock import VirtualClock
from tests.compat.opencost_day import START_MS
from tests.price_books import price_book_text

HOUR_MS = 3_600_000
HOUR_US = HOUR_MS * 1_000
DAY = "2026-10-01T00:00:00Z,2026-10-02T00:00:00Z"


def fact(seq: int, namespace: str, name: str, node: str, owner: str, **labels: str) -> PodFacts:
    kind, _, owned = owner.partition("/")
    owners = (Owner(kind=kind, name=owned, uid=owner),) if owner else ()
    return PodFacts(
        seq=seq, uid=name, namespace=namespace, name=name, node=node, labels=labels, owners=owners, workload=owner,
        created_ms=START_MS, scheduled_ms=START_MS, observed_ms=START_MS, ended_ms=None,
    )  # fmt: skip


def row(
    seq: int, hour: int, gpu: str, model: str, pod: str, namespace: str, busy: float | None, part: int = 0
) -> UsageInterval:
    """An hour of a GPU; part: of a MIG instance with that many of seven slices."""
    capacity = HOUR_US if not part else -(-HOUR_US * part // 7) if part == 3 else HOUR_US * part // 7
    return UsageInterval(
        seq=seq,
        start_ms=START_MS + hour * HOUR_MS,
        end_ms=START_MS + (hour + 1) * HOUR_MS,
        gpu_uuid=gpu,
        gpu_model=model,
        slice=Slice(
            profile=f"{part}g.{part * 10}gb", gi=part, ci=0, compute=part, compute_of=7, memory_mib=1, memory_of_mib=8
        )
        if part
        else None,
        holder=Holder(kind="pod", uid=pod, namespace=namespace, name=pod, container="main") if pod else None,
        capacity_us=capacity,
        allocated_us=capacity if pod else 0,
        busy_us=round(capacity * busy) if busy is not None else None,
        method="allocation",
    )


H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"


def fill(ledger: DuckLedger) -> None:
    """A day. n1: two H100 held by train-0, one idle GPU. n2: an A100, half of the day serving. n3: nobody."""
    for node, facts, gpus in (
        ("n1", [("vision", "train-0", "Job/train", {"app": "resnet", "env": "prod"})],
         [("GPU-0", H100, "train-0", "vision", 0.75), ("GPU-1", H100, "train-0", "vision", 0.25),
          ("GPU-2", H100, "", "", None)]),
        ("n2", [("nlp", "serve-abc", "Deployment/serve", {"app": "bert"})],
         [("GPU-3", A100, "serve-abc", "nlp", None)]),
        ("n3", [], [("GPU-4", H100, "", "", None)]),
    ):  # fmt: skip
        told = [fact(i + 1, ns, name, node, owner, **labels) for i, (ns, name, owner, labels) in enumerate(facts)]
        rows: list[UsageInterval] = []
        for hour in range(24):
            for gpu, model, pod, namespace, busy in gpus:
                held = pod if not (gpu == "GPU-3" and hour >= 12) else ""
                rows.append(row(len(told) + len(rows) + 1, hour, gpu, model, held, namespace, busy if held else None))
        batch = Batch(
            cluster="prod", node=node, boot_id="b", epoch=f"0192-{node}", first_seq=1, oldest_seq=1,
            intervals=tuple(rows), facts=tuple(told),
        )  # fmt: skip
        (receipt,) = ledger.append([batch], START_MS + 24 * HOUR_MS)
        assert not isinstance(receipt, Exception), receipt
        assert receipt.quarantined == 0


BOOK = price_book_text(H100=2.5)
WITH_A100 = price_book_text(H100=2.5, A100=1.25)


class Port:
    """The listener over a filled ledger."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = VirtualClock(START_MS)
        self.ledger = open_ledger(folder / "ledger.duckdb", self.clock)
        fill(self.ledger)
        self.ledger.observe(
            Facts(namespaces=(NamespaceFacts("prod", "vision", "seeing", since_ms=START_MS),)), START_MS
        )
        self.clock.advance(36 * HOUR_MS)
        self.book: PriceBook | None = self.priced(WITH_A100)
        source = AllocationSource(self.ledger, self.clock, lambda: self.book, "prod", Limits(span_days=400))
        self.client = TestClient(create_app(source))

    def priced(self, text: str) -> PriceBook:
        (self.folder / "prices.yaml").write_text(text)
        return prices.load(self.folder / "prices.yaml")

    def get(self, path: str = "/allocation/compute", **asked: str) -> Any:
        answer = self.client.get(path, params={"window": DAY, **asked})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "application/json"
        body = answer.json()
        assert (body["code"], body["status"]) == (200, "success")
        return body

    def costs(self, **asked: str) -> list[dict[str, float]]:
        return [{name: one["totalCost"] for name, one in found.items()} for found in self.get(**asked)["data"]]
