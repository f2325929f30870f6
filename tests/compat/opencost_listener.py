"""A day of three nodes in a ledger, priced, and OpenCost's API in front of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from accountant.compat.opencost_api import AllocationSource, create_app
from accountant.core.settings import Limits
from accountant.ledger.protocols import Facts, NamespaceFacts
from accountant.prices import price_book as prices
from accountant.prices.price_book import PriceBook
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from agent.wire import Owner, Slice, UsageInterval
from gputally.base.clock import VirtualClock
from tests.compat.opencost_day import START_MS
from tests.moments import present
from tests.price_books import price_book_text
from tests.usage_records import batch, deliver, interval, pod_facts, pod_holder

HOUR_MS = 3_600_000
HOUR_US = HOUR_MS * 1_000
DAY = "2026-10-01T00:00:00Z,2026-10-02T00:00:00Z"


def served(ledger: object, clock: VirtualClock, book: Callable[[], PriceBook | None] = lambda: None) -> TestClient:
    """Return a client of the API over a ledger. A question may cover 400 days."""
    return TestClient(create_app(AllocationSource(ledger, clock, book, "prod", Limits(span_days=400))))  # type: ignore[arg-type]


def hour(hour: int, gpu: str, model: str, pod: str, namespace: str, busy: float | None, part: int = 0) -> UsageInterval:
    """Build an hour of a GPU, or of a MIG instance with `part` of seven slices."""
    capacity = HOUR_US if not part else -(-HOUR_US * part // 7) if part == 3 else HOUR_US * part // 7
    sliced = Slice(f"{part}g.{part * 10}gb", part, 0, part, 7, 1, 8) if part else None
    return interval(
        START_MS + hour * HOUR_MS, gpu, pod_holder(pod, namespace, container="main") if pod else None, span_ms=HOUR_MS,
        slice=sliced, gpu_model=model, capacity_us=capacity, allocated_us=capacity if pod else 0, method="allocation",
        busy_us=round(capacity * busy) if busy is not None else None,
    )  # fmt: skip


H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"


def fill(ledger: DuckLedger) -> None:
    """Book a day. On n1 `train-0` holds two H100 and one GPU is idle; on n2 `serve-abc` holds an A100 for half the day;
    n3 is idle."""
    made = {"created_ms": START_MS, "scheduled_ms": START_MS}
    train = pod_facts(
        "train-0", START_MS, namespace="vision", node="n1", workload="Job/train", owners=(Owner("Job", "train", "1"),),
        labels={"app": "resnet", "env": "prod"}, **made,
    )  # fmt: skip
    serve = pod_facts(
        "serve-abc", START_MS, namespace="nlp", node="n2", workload="Deployment/serve", labels={"app": "bert"},
        owners=(Owner("Deployment", "serve", "2"),), **made,
    )  # fmt: skip
    for node, facts, gpus in (
        ("n1", [train], [("GPU-0", H100, "train-0", "vision", 0.75), ("GPU-1", H100, "train-0", "vision", 0.25),
                         ("GPU-2", H100, "", "", None)]),
        ("n2", [serve], [("GPU-3", A100, "serve-abc", "nlp", None)]),
        ("n3", [], [("GPU-4", H100, "", "", None)]),
    ):  # fmt: skip
        rows = [
            hour(at, gpu, model, pod if not (gpu == "GPU-3" and at >= 12) else "", namespace, busy)
            for at in range(24)
            for gpu, model, pod, namespace, busy in gpus
        ]
        one = batch(rows, facts, cluster="prod", node=node, epoch=f"0192-{node}")
        deliver(ledger, START_MS + 24 * HOUR_MS, one)
    assert present(ledger).quarantined() == []


BOOK = price_book_text(H100=2.5)
WITH_A100 = price_book_text(H100=2.5, A100=1.25)


class Port:
    """The OpenCost API over a filled ledger."""

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
        self.client = served(self.ledger, self.clock, lambda: self.book)

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
