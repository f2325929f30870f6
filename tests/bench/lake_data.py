"""Writes a fleet's lake without its ledgers, as the accountants of many clusters would publish it.

Every cluster has the same price book and policy. One pod holds a node of eight GPUs for a day, which begins and ends
within an hour, then the next pod; every eighth stretch is unheld. Busy time, memory and energy are random numbers,
which compress as badly as measured ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from accountant.bookkeeping.bookkeeper import Bookkeeper
from accountant.core.periods import Month
from accountant.core.settings import Lake, Settings
from accountant.fleet.fleet_ledgers import Fleet
from accountant.inventory.pod_facts import ObservedPod
from accountant.lake import tables
from accountant.lake.duckdb_engine import DuckDbEngine
from accountant.lake.iceberg_catalog import Catalogue
from accountant.lake.publisher import Publisher
from accountant.lake.table_rows import line_rows, statement_row
from accountant.storage.duckdb_ledger import open_ledger
from accountant.wire.policy_models import Policy, QueuePolicy
from gputally.base.clock import VirtualClock
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR
from tests.bench.load import PRICES, price_book
from tests.lake.concurrent_writers import claimed

MONTH: Final = Month(2026, 10)
BEGIN_MS: Final = 1_790_812_800_000  # 2026-10-01T00:00Z
GPUS_A_NODE: Final = 8
IDLE_EVERY: Final = 8
SHIFT_MS: Final = 1_500_000
"""Pods change at 25 minutes past the hour."""
MODELS: Final = ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3")
_DAYS_A_COMMIT: Final = 4


@dataclass(frozen=True, slots=True)
class LakeFleet:
    """The size of the fleet. nodes: of each cluster."""

    clusters: int = 20
    nodes: int = 625
    days: int = 31
    queues: int = 40

    @property
    def gpus(self) -> int:
        return self.clusters * self.nodes * GPUS_A_NODE

    @property
    def gpu_hours(self) -> int:
        return self.gpus * self.days * 24

    @property
    def end_ms(self) -> int:
        return BEGIN_MS + self.days * MS_PER_DAY

    @property
    def names(self) -> list[str]:
        return [f"cluster-{number:02d}" for number in range(self.clusters)]

    def policy(self) -> Policy:
        """A policy with a team for every fourth queue."""
        return Policy(
            queues=tuple(
                QueuePolicy(name=_queue(i), team=_team(i), refs=(f"kai:{_queue(i)}",)) for i in range(self.queues)
            )
        )


def write(lake: Lake, fleet: LakeFleet, told: Callable[[float], None] = lambda _: None) -> None:
    """Publish the lake. told: receives the completed share from time to time."""
    registers = _registers(fleet)
    days = [date(2026, 10, 1) + timedelta(days=number) for number in range(fleet.days)]
    for at, cluster in enumerate(fleet.names):
        totals = []
        with closing(claimed(lake, cluster)) as catalogue:
            for first in range(0, fleet.days, _DAYS_A_COMMIT):
                group = days[first : first + _DAYS_A_COMMIT]
                made = [_day(fleet, at, first + number) for number, _ in enumerate(group)]
                catalogue.replace(tables.USAGE_HOURLY, pa.concat_tables(made), {"day": group})
                totals += [_total(cluster, day, rows) for day, rows in zip(group, made, strict=True)]
                told((at * fleet.days + first + len(group)) / (fleet.clusters * fleet.days))
            catalogue.replace(tables.DAYS, tables.DAYS.of_rows(totals), {})
            catalogue.replace(tables.PODS, _pods(fleet, at), {"month": "2026-10"})
            for table, rows in registers.items():
                own = [{**row, **_own(table, fleet, cluster)} for row in rows]
                catalogue.replace(table, table.of_rows(own), {})
            _publish_statement(catalogue, cluster)


def _registers(fleet: LakeFleet) -> dict[tables.LakeTable, list[dict[str, Any]]]:
    """Return the rows of the small tables, as a ledger without usage publishes them."""
    with TemporaryDirectory() as folder:
        clock = VirtualClock(BEGIN_MS - MS_PER_DAY)
        ledger = open_ledger(Path(folder) / "ledger.duckdb", clock)
        lake = Lake(warehouse=folder, ledger="none")
        books = Bookkeeper(ledger, clock, "UTC")
        try:
            ledger.put_policy(fleet.policy(), clock.wall_ms())
            books.prices.take(price_book(), "put", "bench", "prices", clock.wall_ms())
            with closing(Catalogue.connect(lake)) as found:
                settings = Settings(auth="off", data=Path(folder), lake=lake)
                Publisher(ledger, books, settings, clock, lambda: found).publish()
                asked = (tables.POLICIES, tables.PRICES, tables.ACTS, tables.LEDGERS)
                return {table: found.read(table) for table in asked}
        finally:
            ledger.close()


def _publish_statement(catalogue: Catalogue, cluster: str) -> None:
    """Publish the cluster's statement of the rows written before."""
    engine = DuckDbEngine(catalogue)
    (member,) = Fleet(engine).members([cluster])
    stated = member.books.month(MONTH)
    row = statement_row(cluster, str(MONTH), member.books.status(MONTH), stated)
    catalogue.replace(tables.STATEMENTS, tables.STATEMENTS.of_rows([row]), {})
    lines = tables.STATEMENT_LINES.of_rows(line_rows(cluster, str(MONTH), stated))
    catalogue.replace(tables.STATEMENT_LINES, lines, {"month": str(MONTH)})


def _own(table: tables.LakeTable, fleet: LakeFleet, cluster: str) -> dict[str, Any]:
    """Return a cluster's own rows of a small table."""
    if table is not tables.LEDGERS:
        return {"ledger": cluster}
    return {
        "ledger": cluster, "id": cluster, "first_ms": BEGIN_MS, "newest_ms": fleet.end_ms, "until_ms": fleet.end_ms,
        "clusters": json.dumps({cluster: fleet.end_ms}),
        "teams": json.dumps(sorted({_team(queue) for queue in range(fleet.queues)})),
    }  # fmt: skip


def _queue(number: int) -> str:
    return f"queue-{number:03d}"


def _team(queue: int) -> str:
    return f"team-{queue // 4:03d}"


def _slots(fleet: LakeFleet) -> int:
    return fleet.days + 1


def _queue_of(fleet: LakeFleet, cluster: int, node: Any, slot: Any) -> Any:
    """Return the number of the queue whose pod holds a node in a slot; -1 if it is unheld."""
    held = (node * 7 + slot + cluster) % IDLE_EVERY != 0
    return np.where(held, (node * 13 + slot * 7 + cluster) % fleet.queues, -1)


def _day(fleet: LakeFleet, cluster: int, day: int) -> pa.Table:
    """Return the rows of a cluster's day, sorted."""
    begin_ms, name = BEGIN_MS + day * MS_PER_DAY, fleet.names[cluster]
    cut_ms = begin_ms + 9 * MS_PER_HOUR + SHIFT_MS  # where the day's second pod begins
    hours = [begin_ms + hour * MS_PER_HOUR for hour in range(24)]
    parts = [(at, at, at + MS_PER_HOUR, 0) for at in hours if at + MS_PER_HOUR <= cut_ms]
    parts += [(hours[9], hours[9], cut_ms, 0), (hours[9], cut_ms, hours[10], 1)]
    parts += [(at, at, at + MS_PER_HOUR, 1) for at in hours[10:]]
    hour, start, end, later = (np.array(column, dtype=np.int64) for column in zip(*parts, strict=True))
    # A part of an hour is no stretch of its own: its row has the hour's bounds, as the publisher's rows have.
    length_us, start, end = (end - start) * 1_000, hour, hour + MS_PER_HOUR
    gpus = fleet.nodes * GPUS_A_NODE
    gpu = np.repeat(np.arange(gpus, dtype=np.int64), len(parts))
    part = np.tile(np.arange(len(parts), dtype=np.int64), gpus)
    node, slot = gpu // GPUS_A_NODE, day + later[part]
    queue = _queue_of(fleet, cluster, node, slot)
    order = np.lexsort((hour[part], gpu, slot, node, queue + (queue < 0) * -1))
    gpu, part, node, slot, queue = gpu[order], part[order], node[order], slot[order], queue[order]
    held, whole_us = queue >= 0, length_us[part]
    chance = np.random.default_rng((cluster, day))
    busy = np.where(held, (whole_us * chance.random(len(gpu))).astype(np.int64), 0)
    zeros = np.zeros(len(gpu), dtype=np.int64)
    queues = range(fleet.queues)
    model = pa.array(MODELS).take(pa.array(node % len(MODELS)))
    prices = np.array([int(float(price) * 100) for price in PRICES.values()], dtype=np.int64)
    cost = _decimals(prices[node % len(MODELS)] * (whole_us // 1_000_000) * 10_000_000 // 3_600)
    pods = np.where(held, node * _slots(fleet) + slot, -1)
    columns: dict[str, Any] = {
        "ledger": pa.repeat(name, len(gpu)),
        "day": pa.repeat(pa.scalar(date(2026, 10, 1) + timedelta(days=day)), len(gpu)),
        "hour": pa.array(hour[part] * 1_000, pa.timestamp("us", tz="UTC")),
        "start_ms": start[part],
        "end_ms": end[part],
        "team": _named([_team(number) for number in queues], queue, "__idle__"),
        "queue": _named([_queue(number) for number in queues], queue, "__idle__"),
        "namespace": _named([f"ns-{number:03d}" for number in queues], queue, "__idle__"),
        "job": _numbered("Job/train-", pods, "__idle__"),
        "kind": np.where(held, "batch", ""),
        "pod": _numbered("train-", pods, "__idle__"),
        "container": np.where(held, "main", ""),
        "labels": pa.nulls(len(gpu), pa.string()),
        "user_name": _named([f"user-{number:03d}" for number in queues], queue, ""),
        "cluster": pa.repeat(name, len(gpu)),
        "node": _numbered(f"{name}-node-", node, ""),
        "gpu": _numbered(f"GPU-{cluster:02d}-", gpu, ""),
        "mig_profile": pa.repeat("", len(gpu)),
        "zone": _named(["eu-1a", "eu-1b", "eu-1c"], node % 3, ""),
        "instance_type": _named(["p4d.24xlarge", "p5.48xlarge"], node % 2, ""),
        "gpu_model": model,
        "pool": pa.repeat("train", len(gpu)),
        "region": pa.repeat("eu-1", len(gpu)),
        "capacity_type": pa.repeat("on-demand", len(gpu)),
        **dict.fromkeys((*tables.ACCOUNT_COLUMNS, *tables.MEASURE_COLUMNS), zeros),
        "busy_us": busy,
        "allocated_idle_us": np.where(held, whole_us - busy, 0),
        "unallocated_us": np.where(held, 0, whole_us),
        "memory_mib_s": np.where(held, (chance.random(len(gpu)) * 80_000 * 3_600).astype(np.int64), 0),
        "energy_uj": (whole_us * (100 + 600 * chance.random(len(gpu)))).astype(np.int64),
        "currency": pa.repeat("USD", len(gpu)),
        "price_book": pa.repeat(price_book().version, len(gpu)),
        "price_row": pa.array(list(PRICES)).take(pa.array(node % len(MODELS))),
        "unit_price": _decimals(prices * 10_000_000).take(pa.array(node % len(MODELS))),
        "cost": cost,
        "unpriced_us": zeros,
    }
    return pa.table({column.name: columns[column.name] for column in tables.USAGE_HOURLY.columns}).cast(
        tables.USAGE_HOURLY.arrow
    )


def _named(names: list[str], number: Any, otherwise: str) -> pa.Array:
    """Return the names of these numbers, and `otherwise` for -1."""
    return pa.array([*names, otherwise]).take(pa.array(np.where(number < 0, len(names), number)))


def _numbered(prefix: str, number: Any, otherwise: str) -> pa.Array:
    known, at = np.unique(number, return_inverse=True)
    return pa.array([f"{prefix}{one:06d}" if one >= 0 else otherwise for one in known.tolist()]).take(pa.array(at))


def _decimals(nano: Any) -> pa.Array:
    """Return decimal(38, 9) values from units of 1e-9."""
    words = np.zeros((len(nano), 2), dtype=np.int64)
    words[:, 0] = nano
    return pa.Array.from_buffers(pa.decimal128(38, 9), len(nano), [None, pa.py_buffer(words.tobytes())])


def _total(cluster: str, day: date, rows: pa.Table) -> dict[str, Any]:
    begin_ms = BEGIN_MS + (day - date(2026, 10, 1)).days * MS_PER_DAY
    return {
        "ledger": cluster, "day": day, "start_ms": begin_ms, "end_ms": begin_ms + MS_PER_DAY, "sealed": True,
        "rows": rows.num_rows,
        **{name: pa.compute.sum(rows[name]).as_py() for name in tables.ACCOUNT_COLUMNS[:6]},
        "currency": "USD", "cost": pa.compute.sum(rows["cost"]).as_py(), "unpriced_us": 0, "digest": "",
        "timezone": "UTC", "published": datetime(2026, 11, 1, tzinfo=UTC),
    }  # fmt: skip


def _pods(fleet: LakeFleet, cluster: int) -> pa.Table:
    return tables.PODS.of_rows(list(_pod_rows(fleet, cluster)))


def _pod_rows(fleet: LakeFleet, cluster: int) -> Iterator[dict[str, Any]]:
    name = fleet.names[cluster]
    for node in range(fleet.nodes):
        queues = _queue_of(fleet, cluster, node, np.arange(_slots(fleet))).tolist()
        for slot, queue in enumerate(queues):
            if queue < 0:
                continue
            number = node * _slots(fleet) + slot
            since_ms = max(BEGIN_MS, BEGIN_MS + (slot - 1) * MS_PER_DAY + 9 * MS_PER_HOUR + SHIFT_MS)
            facts = ObservedPod(
                seq=0, uid=f"{name}-{number}", namespace=f"ns-{queue:03d}", name=f"train-{number:06d}",
                node=f"{name}-node-{node:06d}", workload=f"Job/train-{number:06d}", queue_ref=f"kai:{_queue(queue)}",
                created_ms=since_ms - 90_000, scheduled_ms=since_ms - 30_000, started_ms=since_ms,
                observed_ms=since_ms, queue_ms=since_ms,
            )  # fmt: skip
            instants = (
                datetime.fromtimestamp(at / 1_000, UTC) for at in (since_ms - 90_000, since_ms - 30_000, since_ms)
            )
            created, scheduled, started = instants
            yield {
                "ledger": name, "month": "2026-10", "cluster": name, "uid": facts.uid, "namespace": facts.namespace,
                "pod": facts.name, "job": facts.workload, "team": _team(queue), "queue": _queue(queue),
                "created": created, "scheduled": scheduled, "started": started, "ended": None,
                "facts": msgspec.json.encode(facts).decode(),
            }  # fmt: skip
