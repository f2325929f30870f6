"""Queries the accountant for the facts, and prints recommendations as tables and records."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from accountant.core.periods import hours, zone
from accountant.ledger.protocols import JobKey
from accountant.prices.price_book import PriceBook
from accountant.reports.report_text import money
from accountant.wire.http_client import AccountantClient
from gputally.advise.autoscaling_spot_and_sharing import (
    DAYS,
    HOURS,
    ModelUse,
    NodeHour,
    Pool,
    PoolAdvice,
    RestartAssumptions,
    SharingAdvice,
    SpotAdvice,
    variables,
)
from gputally.base.money import plain
from gputally.base.number_format import NOTHING, percent
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR, US_PER_HOUR
from gputally.client import Client

_PLACE = ("cluster", "pool", "gpu_model", "region", "capacity_type")
_US_PER_S = US_PER_HOUR // 3600
_HELD = ("busy_gpu_us", "allocated_idle_gpu_us", "allocated_unknown_gpu_us")
_UP = (*_HELD, "unallocated_gpu_us")


@dataclass(frozen=True, slots=True)
class Window:
    """A span of whole hours in UTC milliseconds. timezone: the zone of the hours of the week."""

    start_ms: int
    end_ms: int
    timezone: str

    @classmethod
    def before(cls, now_ms: int, days: int, timezone: str) -> Window:
        """Return the window of `days` that ends with the last full hour. Raises ValueError for an unknown time zone."""
        zone(timezone)
        end = now_ms // MS_PER_HOUR * MS_PER_HOUR
        return cls(end - days * MS_PER_DAY, end, timezone)

    @property
    def zone(self) -> ZoneInfo:
        return zone(self.timezone)

    @property
    def lengths(self) -> dict[str, int]:
        """The lengths of its local hours, in ms."""
        return hours(self.start_ms, self.end_ms, self.zone)


class LedgerQuestions:
    """The queries to the accountant. Every method raises gputally.base.accountant_connection.Unanswered with a one-line
    message."""

    def __init__(self, remote: AccountantClient, window: Window) -> None:
        self._remote = remote
        self._client = Client(remote)
        self.window = window

    def node_hours(self) -> tuple[list[NodeHour], float | None]:
        """Return the hours of every node, and the metered share of the capacity (None if there is no capacity).
        Unmetered time is neither up nor idle; a node belongs to the pool in which it spent most of its time."""
        span = self.window.start_ms, self.window.end_ms
        places = self._client.usage(*span, (*_PLACE, "node"))
        places["all"] = places[list(_UP)].sum(axis=1)
        of_node: dict[tuple[str, str], Pool] = {}
        for row in places.sort_values("all", kind="stable")[[*_PLACE, "node"]].itertuples(index=False, name=None):
            cluster, pool, model, region, capacity, node = map(str, row)
            of_node[cluster, node] = Pool(cluster, pool or model, model, region, capacity, bool(pool))
        frame = self._client.usage(*span, ("cluster", "node", "hour"), timezone=self.window.timezone)
        frame["up"], frame["held"] = frame[list(_UP)].sum(axis=1), frame[list(_HELD)].sum(axis=1)
        hourly = frame[["cluster", "node", "hour", "up", "held"]].itertuples(index=False, name=None)
        found = [
            NodeHour(of_node[str(cluster), str(node)], str(node), str(hour), int(up), int(held))
            for cluster, node, hour, up, held in hourly
        ]
        return found, frame.attrs["coverage"]

    def prices(self, places: Sequence[Pool]) -> dict[Pool, Decimal | None]:
        """Return the price of a GPU-hour at the end of the window for each pool; None if there is no price."""
        book = self._book()
        found: dict[Pool, Decimal | None] = {}
        for place in places:
            named = place.name if place.named else ""
            price = (
                book.unit_price(place.gpu_model, self.window.end_ms - 1, named, place.region, place.capacity_type)
                if book is not None
                else None
            )
            found[place] = price.price if price is not None else None
        return found

    def currency(self) -> str | None:
        book = self._book()
        return book.currency if book is not None else None

    def _book(self) -> PriceBook | None:
        if self._remote.probe("/v1/prices").status == 404:
            return None
        return self._remote.ask(PriceBook, "/v1/prices")

    def report(self) -> Mapping[str, Any]:
        """The window's report as JSON: `summary` and `tables`."""
        query = {"start": str(self.window.start_ms), "end": str(self.window.end_ms), "format": "json"}
        found: Mapping[str, Any] = json.loads(self._remote.get("/v1/report", query))
        return found

    def nodes_of(self, rows: Sequence[Mapping[str, Any]]) -> dict[JobKey, int]:
        """Return the largest number of nodes that each of these jobs had in one hour."""
        jobs = sorted({row["job"] for row in rows})
        if not jobs:
            return {}
        by = (*JobKey._fields, "node", "hour")
        frame = self._client.usage(self.window.start_ms, self.window.end_ms, by, {"job": jobs})
        frame = frame[frame[list(_HELD)].sum(axis=1) > 0]
        job = list(JobKey._fields)
        counts = frame.groupby([*job, "hour"]).node.nunique().groupby(job).max()
        counted = counts.reset_index().itertuples(index=False, name=None)
        return {JobKey(*map(str, key)): int(count) for *key, count in counted}

    def uses_of(self, rows: Sequence[Mapping[str, Any]]) -> dict[JobKey, ModelUse]:
        """Return the GPU model and memory use of each of these jobs that ran on a single model."""
        jobs = sorted({row["job"] for row in rows})
        if not jobs:
            return {}
        by = (*JobKey._fields, "gpu_model")
        frame = self._client.usage(self.window.start_ms, self.window.end_ms, by, {"job": jobs})
        frame["held"] = frame[list(_HELD)].sum(axis=1)
        found: dict[JobKey, ModelUse] = {}
        several: set[JobKey] = set()
        frame["told"] = frame.held - frame.memory_unknown_us
        frame["memory_mib_s"] = frame.memory_mib_s.fillna(0)
        columns = [*by, "told", "memory_mib_s"]
        for *name, model, told, memory in frame[frame.held > 0][columns].itertuples(index=False, name=None):
            key = JobKey(*map(str, name))
            if key in found:
                several.add(key)
            seconds = int(told) / _US_PER_S  # of the time whose memory is known
            found[key] = ModelUse(str(model), int(memory) / seconds if memory else None)
        return {key: use for key, use in found.items() if key not in several}


TRUSTED = 0.98


def span(window: Window) -> str:
    """`2026-10-04 12:00 to 2026-11-01 12:00 UTC`."""
    ends = (datetime.fromtimestamp(ms / 1000, window.zone) for ms in (window.start_ms, window.end_ms))
    return " to ".join(f"{end:%Y-%m-%d %H:%M}" for end in ends) + f" {window.timezone}"


def pools(
    found: Sequence[PoolAdvice], window: Window, threshold: float, coverage: float | None, currency: str | None
) -> RenderableType:
    """Render one line per pool, then the week of each pool."""
    table = _table(f"Nodes by pool, {span(window)}; a node is due at {threshold:.0%} of its GPUs held")
    table.add_column("pool", overflow="fold")
    for name in ("GPUs", "nodes", "min", "max", "held", "peak", "idle node-h", "of", "surplus"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(f"saving {currency or ''}".strip(), justify="right", style="bold")
    for one in found:
        table.add_row(
            one.pool.name, str(one.gpus_per_node), str(one.nodes_now), str(one.min_nodes), str(one.max_nodes),
            f"{one.mean_gpus:,.1f}", f"{one.peak_gpus:,.1f}", f"{one.idle_node_hours:,}", f"{one.node_hours:,.0f}",
            f"{one.surplus_node_hours:,.0f}", money(one.saving, currency),
        )  # fmt: skip
    weeks = (_week(one) for one in found)
    return Group(table, *weeks, Text(), *(Text(f"· {note}") for note in notes(found, window, coverage)))


def notes(found: Sequence[PoolAdvice], window: Window, coverage: float | None) -> Iterator[str]:
    """Yield the limits of the figures, as sentences."""
    yield "GPUs: of a node; held, peak: mean and most of an hour, in GPUs; idle: nothing held"
    yield "surplus: node-hours up beyond the need of their hour of the week; saving: where those can be given back"
    if found and max(one.hours for one in found) < 2 * len(DAYS) * HOURS:
        yield "less than two weeks are on record: the week's pattern rests on one of each hour"
    if coverage is None:
        yield "no node is on record in that time: nothing is known of it"
    elif coverage < TRUSTED:
        yield f"{percent(coverage)} of the capacity is metered: the rest counts as neither up nor idle"
    for one in found:
        if one.hours < len(window.lengths):
            hours = f"{one.hours:,} of the {len(window.lengths):,} hours"
            yield f"{one.pool.name}: on record in {hours}; the counts are of those alone"
        if one.full_hours:
            hours = f"{one.full_hours} of {one.hours} hours"
            yield f"{one.pool.name}: everything was held in {hours}; what waited then is not counted"
        if len(one.shapes) > 1:
            yield f"{one.pool.name}: nodes of {', '.join(map(str, one.shapes))} GPUs; counted in the largest"
        if one.unit_price is None:
            yield f"{one.pool.name}: no price, no saving"


def _week(one: PoolAdvice) -> RenderableType:
    """Render the needed nodes by weekday and hour, in one line if all hours are alike; · stands for an hour that the
    window does not contain."""
    if set(one.weekly) == {one.max_nodes}:
        return Text(
            f"{one.pool.name}: {one.max_nodes} {'node' if one.max_nodes == 1 else 'nodes'} needed at every hour"
        )
    width = max(2, len(str(one.max_nodes)))
    lines = [
        f"{one.pool.name}: nodes needed by hour of the week",
        "     " + " ".join(f"{h:>{width}}" for h in range(24)),
    ]
    for at, day in enumerate(DAYS):
        cells = one.weekly[at * HOURS : (at + 1) * HOURS]
        lines.append(f"{day}  " + " ".join(f"{'·' if count is None else count:>{width}}" for count in cells))
    return Text("\n".join(lines))


def pools_document(
    found: Sequence[PoolAdvice], window: Window, threshold: float, coverage: float | None, currency: str | None
) -> dict[str, Any]:
    """Return all figures of the pools. weekly: 168 counts from Monday 00:00."""
    return {
        "schema": 1, **_window(window), "threshold": threshold, "coverage": coverage, "currency": currency,
        "notes": list(notes(found, window, coverage)), "pools": list(pool_records(found)),
        "variables": variables(found, threshold),
    }  # fmt: skip


def pool_records(found: Sequence[PoolAdvice]) -> Iterator[dict[str, Any]]:
    for one in found:
        yield {
            "cluster": one.pool.cluster, "pool": one.pool.name, "gpu_model": one.pool.gpu_model,
            "region": one.pool.region, "capacity_type": one.pool.capacity_type, "gpus_per_node": one.gpus_per_node,
            "nodes_now": one.nodes_now, "min_nodes": one.min_nodes, "max_nodes": one.max_nodes,
            "mean_gpus_held": round(one.mean_gpus, 3), "peak_gpus_held": round(one.peak_gpus, 3), "hours": one.hours,
            "full_hours": one.full_hours, "node_hours": round(one.node_hours, 3),
            "idle_node_hours": one.idle_node_hours, "surplus_node_hours": round(one.surplus_node_hours, 3),
            "unit_price": _plain(one.unit_price), "saving": _plain(one.saving), "weekly": list(one.weekly),
        }  # fmt: skip


def spots(
    found: Sequence[SpotAdvice], window: Window, assumed: RestartAssumptions, currency: str | None
) -> RenderableType:
    """Render one line per job, the largest saving first."""
    table = _table(f"Spot candidates, {span(window)}")
    for name in ("job", "team"):
        table.add_column(name, overflow="fold")
    heads = ("nodes", "GPU-hours", f"cost {currency or ''}", "on spot", "checkpoint every", "longer by", "saving")
    for name in heads:
        table.add_column(name.strip(), justify="right")
    job = _names(found)
    for one in found:
        table.add_row(
            job(one), one.team, str(one.nodes), f"{one.gpu_hours:,.1f}", money(one.cost, currency),
            money(one.spot_cost, currency), _minutes(one.interval_s),
            NOTHING if one.stretch is None else percent(one.stretch - 1), money(one.saving, currency),
        )  # fmt: skip
    shown = table if found else Text(f"No spot candidates, {span(window)}")
    return Group(shown, *(Text(f"· {note}") for note in spot_notes(assumed)))


def _names(found: Sequence[SpotAdvice] | Sequence[SharingAdvice]) -> Callable[[SpotAdvice | SharingAdvice], str]:
    """Return a function that names a job in a table, with its cluster if there are several."""
    several = len({one.cluster for one in found}) > 1
    return lambda one: "/".join([one.cluster, one.namespace, one.job][0 if several else 1 :])


def spot_notes(assumed: RestartAssumptions) -> Iterator[str]:
    yield (
        f"assumed: a checkpoint takes {_minutes(assumed.checkpoint_s)}, a restart {_minutes(assumed.restart_s)}, "
        f"a node is taken away every {assumed.between_s / 3600:g} h on average: say your own"
    )
    yield "candidates: batch jobs with a cheaper spot row in the price book; whether they keep checkpoints is not known"


def spots_document(
    found: Sequence[SpotAdvice], window: Window, assumed: RestartAssumptions, currency: str | None
) -> dict[str, Any]:
    """Return the advice with its assumptions, in seconds."""
    return {
        "schema": 1, **_window(window), "currency": currency, "checkpoint_s": assumed.checkpoint_s,
        "restart_s": assumed.restart_s, "interruption_every_s": assumed.between_s, "jobs": list(spot_records(found)),
    }  # fmt: skip


def spot_records(found: Sequence[SpotAdvice]) -> Iterator[dict[str, Any]]:
    for one in found:
        yield {
            "team": one.team, "cluster": one.cluster, "namespace": one.namespace, "job": one.job, "nodes": one.nodes,
            "gpu_hours": _plain(one.gpu_hours), "cost": _plain(one.cost), "spot_cost": _plain(one.spot_cost),
            "checkpoint_interval_s": round(one.interval_s, 1),
            "stretch": None if one.stretch is None else round(one.stretch, 6), "saving": _plain(one.saving),
        }  # fmt: skip


def sharings(found: Sequence[SharingAdvice], window: Window, currency: str | None) -> RenderableType:
    """Render one line per job, the largest saving first."""
    table = _table(f"Jobs that a part of a GPU would do for, {span(window)}")
    for name in ("job", "GPU", "how"):
        table.add_column(name, overflow="fold")
    for name in ("busiest hour", "mean memory", f"saving {currency or ''}".strip()):
        table.add_column(name, justify="right", no_wrap=True)
    reasons: dict[str, None] = {}
    job = _names(found)
    for one in found:
        how = {"mig": f"MIG {one.profile}", "time-slicing": f"{one.replicas} in turns", "none": NOTHING}
        memory = NOTHING if one.memory_mib is None else f"{one.memory_mib:,.0f} MiB"
        table.add_row(
            job(one), one.gpu_model, how[one.way], percent(one.peak), memory,
            money(one.saving, currency),
        )  # fmt: skip
        reasons[f"· {how[one.way]}: {one.reason}"] = None
    if not found:
        return Text(f"No job that a part of a GPU would do for, {span(window)}")
    return Group(table, *map(Text, reasons))


def sharing_records(found: Sequence[SharingAdvice]) -> Iterator[dict[str, Any]]:
    for one in found:
        yield {
            "team": one.team, "cluster": one.cluster, "namespace": one.namespace, "job": one.job,
            "gpu_model": one.gpu_model, "way": one.way, "profile": one.profile or None,
            "replicas": one.replicas or None, "peak_busy": round(one.peak, 4),
            "memory_mib": None if one.memory_mib is None else round(one.memory_mib), "saving": _plain(one.saving),
            "reason": one.reason,
        }  # fmt: skip


def sharings_document(found: Sequence[SharingAdvice], window: Window, currency: str | None) -> dict[str, Any]:
    return {"schema": 1, **_window(window), "currency": currency, "jobs": list(sharing_records(found))}


def _window(window: Window) -> dict[str, str]:
    ends = (
        datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") for ms in (window.start_ms, window.end_ms)
    )
    return dict(zip(("start", "end"), ends, strict=True)) | {"timezone": window.timezone}


def _plain(amount: Decimal | None) -> str | None:
    return None if amount is None else plain(amount.normalize())


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:,.0f} min" if seconds >= 60 else f"{seconds:,.0f} s"


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
