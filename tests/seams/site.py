"""An accountant on a real ledger, reached as its users reach it: over HTTP, through its files, through its lake."""

from __future__ import annotations

import csv
import io
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from httpx2 import Response
from starlette.testclient import TestClient

from accountant.composition import Service
from accountant.core.settings import Settings
from accountant.ledger.protocols import Inventory
from agent.wire import PodFacts, UsageInterval
from gputally.base.clock import VirtualClock
from tests import empty_ledger
from tests.plugin_cases import need
from tests.usage_records import batch, interval, pod_holder

HOUR_MS = 3_600_000
HOUR_US = HOUR_MS * 1_000
MINUTE_MS = 60_000
H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"
HERE = "http://127.0.0.1"
Cells = dict[str, str]


def uid_of(pod: str) -> str:
    """Return the uid of a pod, given as `namespace/name`."""
    return f"uid-{pod.replace('/', '-')}"


def hours_of(
    gpu: str, begin_ms: int, hours: int, pod: str = "", busy: float | None = 0, **fields: Any
) -> list[UsageInterval]:
    """Build whole hours of a GPU. pod: `namespace/name` of its holder; "" for none. busy: its busy share; None if
    unknown."""
    namespace, _, name = pod.partition("/")
    fields = {"busy_us": round(HOUR_US * busy) if busy is not None else None, **fields}
    return [
        interval(
            begin_ms + hour * HOUR_MS, gpu, pod_holder(name, namespace, uid_of(pod)) if pod else None, span_ms=HOUR_MS,
            **{"gpu_model": H100, **fields},
        )
        for hour in range(hours)
    ]  # fmt: skip


class Site:
    """One accountant without authentication, and its clients."""

    def __init__(self, service: Service, clock: VirtualClock) -> None:
        self.service, self.clock = service, clock
        self.client = TestClient(service.app, base_url=HERE)
        self._sent: dict[tuple[str, str, str], int] = {}

    def send(
        self,
        rows: Iterable[UsageInterval],
        facts: Sequence[PodFacts] = (),
        *,
        node: str = "n1",
        cluster: str = "prod",
        epoch: str = "e",
    ) -> None:
        """Report records as an agent does. The records of one outbox are numbered one after the other."""
        outbox = (cluster, node, epoch)
        one = batch(rows, facts, cluster=cluster, node=node, epoch=epoch, first_seq=self._sent.get(outbox, 0) + 1)
        self._sent[outbox] = one.first_seq - 1 + len(one.intervals) + len(one.facts)
        answer = self.client.post("/v1/usage", content=msgspec.json.encode(one))
        assert answer.status_code == 200, answer.text
        assert answer.json()["durable_seq"] == self._sent[outbox]

    def resend(self, rows: Sequence[UsageInterval], *, cluster: str, epoch: str) -> Response:
        """Report records again as the first ones of an outbox."""
        return self.client.post(
            "/v1/usage", content=msgspec.json.encode(batch(rows, cluster=cluster, node="n1", epoch=epoch))
        )

    def get(self, path: str, **query: Any) -> Any:
        """Return the JSON of an answer. Underscores of the parameters' names are dots where that is their name."""
        answer = self.client.get(path, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(self, path: str, body: Any = None, **query: Any) -> Any:
        """Return the JSON of the answer. body: JSON, or the text of a YAML file."""
        sent = {"content": body} if isinstance(body, str) else {"json": body or {}}
        answer = self.client.post(path, params=query, **sent)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def listener(self, name: str) -> TestClient:
        """Return a client of a compatibility API."""
        (app,) = [one.app for one in self.service.listeners if one.what == name]
        return TestClient(app, base_url=HERE)

    def lines(self, **query: Any) -> list[tuple[Any, ...]]:
        """Return the lines of a statement as (team, account, detail, model, hours, unit price, cost)."""
        names = ("team", "account", "detail", "gpu_model", "gpu_hours", "unit_price", "cost")
        return [tuple(line[name] for name in names) for line in self.get("/v1/statement", **query)["lines"]]

    def tables(self, **query: Any) -> Any:
        """Return the tables of a report, with its summary among them."""
        need("exports.json")
        found = self.get("/v1/report", format="json", **query)
        return {**found["tables"], "summary": found["summary"]}

    def focus(self, month: str) -> list[Cells]:
        """Return the charges of a month's FOCUS file."""
        need("exports.focus")
        answer = self.client.get("/v1/report", params={"month": month, "format": "focus"})
        assert answer.status_code == 200, answer.text
        with zipfile.ZipFile(io.BytesIO(answer.content)) as files:
            return list(csv.DictReader(io.StringIO(files.read("cost_and_usage.csv").decode())))

    def usage(self, *by: str, **query: Any) -> dict[str, dict[str, float]]:
        """Return the GPU-hours of each account that has any, by the values of the dimensions, joined by slashes."""
        found = self.get("/v1/usage", by=",".join(by), **query)["lines"]
        return {
            "/".join(line["key"].values()): {
                name: gpu_us / HOUR_US for name, gpu_us in line["accounts_gpu_us"].items() if gpu_us
            }
            for line in found
        }


@contextmanager
def site(
    folder: Path, clock: VirtualClock, *, inventory_source: Inventory | None = None, **given: Any
) -> Iterator[Site]:
    """Run an accountant with its data in `folder`. Files that settings name are given as their text."""
    for name in given.keys() & {"prices", "policy", "inventory"}:
        (folder / f"{name}.yaml").write_text(given[name])
        given[name] = folder / f"{name}.yaml"
    settings = Settings(data=empty_ledger.data(folder / "data"), linger_ms=0, auth="off", **given)
    with Service(settings, clock, inventory_source) as service:
        yield Site(service, clock)


def book(*rows: str, currency: str = "EUR", timezone: str = "UTC", more: str = "") -> str:
    """Write a price book. rows: as `id: a, model: H100, price: 2`. more: further top-level keys."""
    dated = "per: gpu-hour, source: contract, as_of: 2026-01-01, basis: gpu-only"
    listed = "".join(
        f"  - {{{row}, {dated}{'' if 'valid_from' in row else ', valid_from: 2026-01-01'}}}\n" for row in rows
    )
    return f"schema: 1\ncurrency: {currency}\ntimezone: {timezone}\nrows:\n{listed}{more}"
