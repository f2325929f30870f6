"""Short builders of usage rows, price books and policies, and two months of usage of a cluster of 64 GPUs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from accountant.billing.charge import Charge
from accountant.core.errors import LedgerUnavailable
from accountant.core.periods import Month
from accountant.ledger.journal import Act, NewAct
from accountant.prices.price_book import PriceBook
from accountant.wire.policy_models import Policy
from accountant.wire.usage_cost_and_job_models import Accounts
from gputally.base.yaml_file import parse
from gputally.server.config_loading import validate
from tests.fakes.list_ledger import ListLedger, Row


def at(text: str) -> int:
    """UTC milliseconds of an ISO date-time (UTC where it names no zone)."""
    moment = datetime.fromisoformat(text)
    return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def held(start: str | int, end: str | int, gpus: int = 1, busy: float | None = 1.0, **names: str) -> Row:
    """Build a row of whole GPUs that a pod holds over a span. `busy` is the busy share, None if unknown."""
    start_ms = at(start) if isinstance(start, str) else start
    end_ms = at(end) if isinstance(end, str) else end
    total = (end_ms - start_ms) * 1000 * gpus
    used = 0 if busy is None else total * round(busy * 100) // 100
    accounts = Accounts(allocated_unknown=total) if busy is None else Accounts(busy=used, allocated_idle=total - used)
    defaults = {
        "team": "vision", "queue": "vision", "namespace": "vision", "job": "Job/train", "pod": "train-0",
        "gpu_model": "NVIDIA H100 80GB HBM3", "gpu": "GPU-0", "node": "node-0", "pool": "main",
        "region": "eu-1", "capacity_type": "on-demand",
    }  # fmt: skip
    return Row(start_ms, end_ms, accounts, {**defaults, **names})


def unheld(start: str | int, end: str | int, account: str = "unallocated", gpus: int = 1, **names: str) -> Row:
    """Build a row of whole GPUs in `account` that no pod holds."""
    row = held(start, end, gpus, **names)
    of_gpus = ("gpu_model", "gpu", "node", "pool", "region", "capacity_type", "cluster")
    place = {name: row.names[name] for name in of_gpus if name in row.names}
    return replace(row, names=place, accounts=Accounts(**{account: row.accounts.total}))


def ledger_of(*rows: Row) -> ListLedger:
    return ListLedger(rows)


def time_by(found: Iterable[Charge], key: Callable[[Charge], Hashable]) -> Counter[Hashable]:
    """Return the GPU-microseconds of the charges, grouped by `key`."""
    sums = Counter[Hashable]()
    for charge in found:
        sums[key(charge)] += charge.gpu_us
    return sums


def price_book(rows: str, currency: str = "USD", timezone: str = "UTC") -> PriceBook:
    """Parse a book of rows in YAML flow style, one per line; columns that every row needs are added."""
    lines = [line.strip() for line in rows.strip().splitlines()]
    body = "\n".join(
        f"  - {{{line}, per: gpu-hour, source: a test, as_of: 2026-01-01, basis: gpu-only}}" for line in lines
    )
    text = f"schema: 1\ncurrency: {currency}\ntimezone: {timezone}\nrows:\n{body}\n"
    return validate(parse(text, "book.yaml"), PriceBook)


TEAMS = {"vision": 0.81, "language": 0.9, "robotics": 0.55, "genomics": 0.68, "teaching": 0.3}
POOLS = (  # pool, model, capacity type, nodes of 8 GPUs
    ("h100", "NVIDIA H100 80GB HBM3", "on-demand", 4),
    ("a100", "NVIDIA A100-SXM4-40GB", "on-demand", 3),
    ("spot", "NVIDIA A100-SXM4-40GB", "spot", 1),
)
NAMES = ("pretrain", "finetune", "eval", "sweep", "render", "align", "distill", "dock", "policy", "segment")
HOUR_MS = 3_600_000


def busy_month(start: str = "2026-09-01", end: str = "2026-11-01", seed: int = 11) -> list[Row]:
    """A cluster of 64 GPUs over two months: gangs, idle notebooks, a node down, lost records, an unpriced T4."""
    rng = random.Random(seed)
    rows: list[Row] = []
    stop = at(end)
    for pool, model, capacity_type, nodes in POOLS:
        for node in range(nodes):
            now = at(start)
            place = {"gpu_model": model, "pool": pool, "capacity_type": capacity_type, "node": f"{pool}-{node}"}
            while now < stop:
                team = rng.choices(list(TEAMS), weights=[30, 26, 17, 15, 12])[0]
                until = min(stop, now + rng.choice([3, 5, 8, 12, 20, 31, 47]) * HOUR_MS + rng.randrange(HOUR_MS))
                held_gpus = rng.choice([8, 8, 8, 6, 4])
                kind = rng.choice(NAMES)
                used = max(0.0, min(1.0, rng.gauss(TEAMS[team], 0.1)))
                job = {"team": team, "queue": team, "namespace": team, "job": f"Job/{kind}-{rng.randrange(100, 999)}"}
                if (pool, node) == ("h100", 2) and until > at("2026-10-12") and now < at("2026-10-15"):
                    rows.append(unheld(now, until, account="down", gpus=8, **place))
                    now = until
                    continue
                unknown = rng.random() < 0.02
                rows.append(held(now, until, held_gpus, None if unknown else used, **job, **place))
                if held_gpus < 8:
                    account = "unmetered" if rng.random() < 0.03 else "unallocated"
                    rows.append(unheld(now, until, account=account, gpus=8 - held_gpus, **place))
                now = until
    for day in range(2, 28, 3):
        notebook = {"team": "teaching", "queue": "teaching", "namespace": "teaching", "job": "StatefulSet/notebook-ada"}
        rows.append(held(f"2026-10-{day:02d}T08:00", f"2026-10-{day + 1:02d}T20:00", 1, 0.02, **notebook, pool="a100",
                         gpu_model="NVIDIA A100-SXM4-40GB"))  # fmt: skip
    rows.append(
        held("2026-10-06", "2026-10-20", 8, 0.22, team="robotics", namespace="robotics", job="Job/policy-search")
    )
    rows.append(
        held("2026-10-08", "2026-10-11", 1, 0.31, team="vision", job="Deployment/label-ui", gpu_model="Tesla T4")
    )
    return rows


SAMPLE_PRICES = (
    "id: h100, model: H100, capacity_type: on-demand, price: '6.88', valid_from: 2025-06-01, valid_to: 2026-10-16\n"
    "id: h100-oct, model: H100, capacity_type: on-demand, price: '6.45', valid_from: 2026-10-16\n"
    "id: a100, model: A100-40GB, capacity_type: on-demand, price: '2.7447', valid_from: 2026-01-01\n"
    "id: a100-spot, model: A100-40GB, capacity_type: spot, price: '1.293355', valid_from: 2026-01-01"
)


def quota_policy(**deserved: float) -> Policy:
    """Build a policy with a root and one queue per team, with the team's name and this `deserved`."""
    queues = [{"name": "root"}] + [
        {"name": team, "parent": "root", "team": team, "deserved": gpus} for team, gpus in deserved.items()
    ]
    return Policy.model_validate({"schema": 1, "queues": queues})


BOOK = "id: h100, model: H100, price: '2.10', valid_from: 2026-01-01"
SEP, OCT, NOV, DEC = (Month(2026, month) for month in (9, 10, 11, 12))


def october(**names: str) -> list[Row]:
    return [held("2026-10-01", "2026-11-01", 2, 0.5, **names)]


class Breaking:
    """A ledger that cannot record journal entries of one kind."""

    def __init__(self, ledger: Any, kind: str) -> None:
        self._ledger, self._kind = ledger, kind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)

    def record(self, acts: Sequence[NewAct], seen: int) -> list[Act]:
        if any(act.kind == self._kind for act in acts):
            raise LedgerUnavailable("only 1 MiB of disk are free")
        found: list[Act] = self._ledger.record(acts, seen)
        return found
