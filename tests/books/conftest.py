"""A small ledger that keeps plain rows and scans them all: what money and reports are tested against."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from accountant.books.held import Held, Hours, JobName, Peak
from accountant.books.tabled import Tabled
from accountant.ledger import Facts, IdlePhases, Lent, Receipt
from accountant.prices.book import PriceBook
from accountant.progress import EpochReport
from accountant.store.checks import Quarantined
from accountant.wire import (
    IDLE,
    Accounts,
    Decision,
    Dimension,
    Measure,
    Policy,
    PolicyVersion,
    UsageLine,
    UsageWindow,
    WindowSpec,
)
from accountant.work.waits import KnownPod
from accountant.yamlfile import validate
from agent.units import prorate
from agent.wire import Ack, Batch
from agent.yamlfile import parse
from tests.fakes.holdings import hours_of_lines, of_lines, peaks_of_lines, tabled_of_lines
from tests.fakes.journal import MemoryJournal
from tests.shelf import shared

ACCOUNTS = ("busy", "allocated_idle", "allocated_unknown", "unallocated", "unmetered", "down")


TIMES = {"day": "%Y-%m-%d", "hour": "%Y-%m-%dT%H"}


@cache
def _local(dimension: Dimension, at_ms: int, tz: ZoneInfo) -> str:
    return datetime.fromtimestamp(at_ms / 1000, tz).strftime(TIMES[dimension])


@dataclass(frozen=True)
class Row:
    """One holder's (or nobody's) part of a GPU over a span, already split into accounts."""

    start_ms: int
    end_ms: int
    accounts: Accounts
    names: Mapping[str, str] = field(default_factory=dict)
    energy_uj: int = 0

    def value(self, dimension: Dimension, at_ms: int, tz: ZoneInfo) -> str:
        if dimension in TIMES:
            return _local(dimension, at_ms, tz)
        default = IDLE if dimension in ("team", "queue") else ""
        return self.names.get(dimension, default)

    def pieces(self, start_ms: int, end_ms: int, step_ms: int | None) -> Iterable[tuple[int, int]]:
        start, end = max(start_ms, self.start_ms), min(end_ms, self.end_ms)
        while start < end:
            stop = end if step_ms is None else min(end, (start // step_ms + 1) * step_ms)
            yield start, stop
            start = stop


class ListLedger(MemoryJournal):
    """Obeys the protocol for everything money asks; writing goes through `rows`."""

    def __init__(self, rows: Iterable[Row] = (), refused: Iterable[Quarantined] = ()) -> None:
        super().__init__()
        self.rows = list(rows)
        self.refused = list(refused)
        self.known_pods: list[KnownPod] = []
        self.reported: list[EpochReport] = []
        self._versions: list[PolicyVersion] = []

    def add(self, row: Row) -> None:
        self.rows.append(row)

    def usage(
        self,
        start_ms: int,
        end_ms: int,
        by: Sequence[Dimension],
        where: Mapping[Dimension, Collection[str]] | None = None,
        timezone: str = "UTC",
    ) -> list[UsageLine]:
        tz = ZoneInfo(timezone)
        step = None
        if {"day", "hour"} & {*by, *(where or {})}:
            offset = datetime.fromtimestamp(start_ms / 1000, tz).utcoffset()
            step = 900_000 if offset is not None and offset.total_seconds() % 3600 else 3_600_000
        sums: dict[tuple[str, ...], dict[str, int]] = {}
        timed = {name: values for name, values in (where or {}).items() if name in TIMES}
        named = {name: values for name, values in (where or {}).items() if name not in TIMES}
        for row in self.rows:
            if any(row.value(name, start_ms, tz) not in values for name, values in named.items()):
                continue
            span = row.end_ms - row.start_ms
            amounts = {name: amount for name in ACCOUNTS if (amount := getattr(row.accounts, name))}
            amounts["energy_uj"] = row.energy_uj
            told = [None if name in TIMES else row.value(name, start_ms, tz) for name in by]
            for start, end in row.pieces(start_ms, end_ms, step):
                if any(row.value(name, start, tz) not in values for name, values in timed.items()):
                    continue
                key = tuple(row.value(n, start, tz) if t is None else t for n, t in zip(by, told, strict=True))
                group = sums.setdefault(key, dict.fromkeys((*ACCOUNTS, "energy_uj"), 0))
                for name, amount in amounts.items():
                    group[name] += prorate(amount, span, start - row.start_ms, end - row.start_ms)
        return [
            UsageLine(
                key=dict(zip(by, key, strict=True)),
                accounts_gpu_us=Accounts(**{name: sums[key][name] for name in ACCOUNTS}),
                energy_uj=sums[key]["energy_uj"],
            )
            for key in sorted(sums)
        ]

    def held(self, edges: Sequence[int], timezone: str = "UTC") -> Held:
        return of_lines(self.usage, edges, timezone)

    def hours(self, start_ms: int, end_ms: int, timezone: str = "UTC") -> Hours:
        return hours_of_lines(self.usage, start_ms, end_ms, timezone)

    def peaks(
        self, start_ms: int, end_ms: int, jobs: Collection[tuple[str, str]], timezone: str = "UTC"
    ) -> dict[JobName, Peak]:
        return peaks_of_lines(self.usage, start_ms, end_ms, jobs, timezone)

    def tabled(self, edges: Sequence[int], cuts: Sequence[Sequence[Dimension]], timezone: str = "UTC") -> list[Tabled]:
        return tabled_of_lines(self.usage, self.idle_phases, edges, cuts, timezone)

    def coverage(self, start_ms: int, end_ms: int) -> float:
        total = Accounts(**self._total(start_ms, end_ms))
        capacity = total.total - total.down
        return 1.0 if capacity == 0 else (capacity - total.unmetered) / capacity

    def extent(self) -> tuple[int, int]:
        return (min(row.start_ms for row in self.rows), max(row.end_ms for row in self.rows)) if self.rows else (0, 0)

    def quarantined(self, limit: int = 1000) -> list[Quarantined]:
        return self.refused[:limit]

    def _total(self, start_ms: int, end_ms: int) -> dict[str, int]:
        lines = self.usage(start_ms, end_ms, ())
        return {name: sum(getattr(line.accounts_gpu_us, name) for line in lines) for name in ACCOUNTS}

    def put_policy(self, policy: Policy, now_ms: int) -> PolicyVersion:
        self._versions.append(PolicyVersion(version=policy.version(), effective_ms=now_ms, policy=policy))
        return self._versions[-1]

    def policies(self, start_ms: int, end_ms: int) -> list[PolicyVersion]:
        before = [version for version in self._versions if version.effective_ms <= start_ms]
        inside = [version for version in self._versions if start_ms < version.effective_ms < end_ms]
        return [*before[-1:], *inside]

    def append(self, batches: Sequence[Batch], now_ms: int) -> list[Receipt | Exception]:
        raise NotImplementedError("rows are added directly")

    def acks(self, node: str, cluster: str) -> Mapping[str, Ack]:
        return {}

    def observe(self, facts: Facts, now_ms: int) -> None:
        raise NotImplementedError("rows carry their names")

    def idle_phases(
        self, start_ms: int, end_ms: int, by: Sequence[Dimension], timezone: str = "UTC"
    ) -> list[IdlePhases]:
        return []

    def lent(self, start_ms: int, end_ms: int, by: Sequence[Dimension], timezone: str = "UTC") -> list[Lent]:
        return []

    def window(
        self,
        spec: WindowSpec,
        at_ms: int,
        measure: Measure,
        min_coverage: float,
        *,
        book: PriceBook | None = None,
        shard: str | None = None,
        cluster: str | None = None,
    ) -> UsageWindow:
        raise NotImplementedError("money asks no windows")

    def record_decisions(self, decisions: Sequence[Decision], now_ms: int) -> int:
        raise NotImplementedError("money records no decisions")

    def decisions(self, start_ms: int, end_ms: int, limit: int = 1000) -> list[Decision]:
        return []

    def pods(self, start_ms: int, end_ms: int, **_: Any) -> list[KnownPod]:
        return self.known_pods

    def usage_between(
        self,
        edges: Sequence[int],
        by: Sequence[Dimension],
        where: Mapping[Dimension, Collection[str]] | None = None,
        timezone: str = "UTC",
    ) -> list[list[UsageLine]]:
        return [self.usage(start, end, by, where, timezone) for start, end in pairwise(edges)]

    def epochs_between(self, start_ms: int, end_ms: int) -> list[EpochReport]:
        return [one for one in self.reported if start_ms <= one.at_ms < end_ms]

    def checkpoint(self) -> None: ...

    def close(self) -> None: ...


class MomentLedger(ListLedger):
    """Plain rows, all of one moment."""

    @contextmanager
    def moment(self, start_ms: int = 0, end_ms: int = 0) -> Iterator[ListLedger]:
        yield self


def at(text: str) -> int:
    """UTC milliseconds of an ISO date-time (UTC where it names no zone)."""
    moment = datetime.fromisoformat(text)
    return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def held(start: str | int, end: str | int, gpus: int = 1, busy: float | None = 1.0, **names: str) -> Row:
    """A row of whole GPUs held over a span; `busy` is the busy share in percent steps, None = unknown."""
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
    """GPUs nobody held over a span, in the account named."""
    row = held(start, end, gpus, **names)
    of_gpus = ("gpu_model", "gpu", "node", "pool", "region", "capacity_type", "cluster")
    place = {name: row.names[name] for name in of_gpus if name in row.names}
    return replace(row, names=place, accounts=Accounts(**{account: row.accounts.total}))


def price_book(rows: str, currency: str = "USD", timezone: str = "UTC") -> PriceBook:
    """A book of rows written as YAML flow mappings, one per line, without what every row needs."""
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
    """One queue per team of that name under one root, with these deserved GPUs."""
    queues = [{"name": "root"}] + [
        {"name": team, "parent": "root", "team": team, "deserved": gpus} for team, gpus in deserved.items()
    ]
    return Policy.model_validate({"schema": 1, "queues": queues})


@dataclass(frozen=True)
class Books:
    """The helpers above, as one fixture."""

    ledger = ListLedger
    row = Row
    at = staticmethod(at)
    held = staticmethod(held)
    unheld = staticmethod(unheld)
    price_book = staticmethod(price_book)
    busy_month = staticmethod(busy_month)
    quota_policy = staticmethod(quota_policy)
    sample_prices = SAMPLE_PRICES


@pytest.fixture(scope="session")
def books() -> Books:
    return Books()


@pytest.fixture(scope="session")
def vectors():
    """Cost vectors read in place, never copied."""
    path = shared("vectors/cost.json")
    return {case["id"]: case for case in json.loads(path.read_text())["cases"]}
