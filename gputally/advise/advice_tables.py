"""Queries the accountant for the facts of an advice, and shows the advice as tables and records."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from functools import cached_property
from typing import Any, TypeAlias
from zoneinfo import ZoneInfo

from rich.console import Group, RenderableType
from rich.table import Column
from rich.text import Text

from accountant.core.periods import hours, zone
from accountant.ledger.protocols import JobKey
from accountant.prices.price_book import PriceBook
from accountant.reports.figure_formatting import money
from accountant.wire.typed_accountant_client import AccountantClient
from gputally.advise.activity import ActivityAdvice, JobActivity
from gputally.advise.autoscaling_spot_and_sharing import (
    DAYS,
    HOURS,
    ModelUse,
    NodeHour,
    NodePool,
    PoolAdvice,
    RestartAssumptions,
    SharingAdvice,
    SpotAdvice,
    variables,
)
from gputally.base.errors import AccountantError
from gputally.base.money import plain
from gputally.base.number_format import NOTHING, percent
from gputally.base.terminal import figures, table
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR, US_PER_S
from gputally.client import Client

_PLACE = ("cluster", "pool", "gpu_model", "region", "capacity_type")


_ACTIVITY = [
    "busy_gpu_us", "allocated_idle_gpu_us", "allocated_unknown_gpu_us", "sm_active_us", "sm_unknown_us",
    "tensor_active_us", "tensor_unknown_us",
]  # fmt: skip
"""In the order of JobActivity."""


_HELD = ("busy_gpu_us", "allocated_idle_gpu_us", "allocated_unknown_gpu_us")


_UP = (*_HELD, "unallocated_gpu_us")


@dataclass(frozen=True, slots=True)
class Window:
    """The span of whole hours on which the advice is based, in UTC milliseconds.

    timezone: the time zone of the hours of the week."""

    start_ms: int
    end_ms: int
    timezone: str

    @classmethod
    def whole_hours(cls, start_ms: int, end_ms: int, timezone: str) -> Window:
        """Return the window of the whole hours of a span. Raises ValueError for one without any, for one of more than
        a year, and for an unknown time zone."""
        zone(timezone)
        begin, end = (at_ms // MS_PER_HOUR * MS_PER_HOUR for at_ms in (start_ms, end_ms))
        if not begin < end <= begin + 366 * MS_PER_DAY:
            raise ValueError("the window has no full hour, or more than 366 days: give another --start")
        return cls(begin, end, timezone)

    @property
    def zone(self) -> ZoneInfo:
        return zone(self.timezone)

    @property
    def lengths(self) -> dict[str, int]:
        """The length of each local hour of the window in milliseconds, by hour (`2026-10-05T14`)."""
        return hours(self.start_ms, self.end_ms, self.zone)


class NothingRecorded(AccountantError):
    """Nothing of the window is metered, so there is no advice: not even that nothing can be saved."""


class AdviceQueries:
    """Queries the accountant for the facts of a window. Every method raises
    gputally.base.accountant_connection.Unanswered with a one-line message."""

    def __init__(self, accountant: AccountantClient, window: Window) -> None:
        self._accountant = accountant
        self._client = Client(accountant)
        self.window = window

    def _known(self, coverage: float | None) -> float:
        if not coverage:
            raise NothingRecorded(
                f"{self._accountant.url}: the ledger has no record from {span_text(self.window)}, so there is nothing "
                "to advise on: give another --end, or run gputally doctor --only freshness"
            )
        return coverage

    def node_hours(self) -> tuple[list[NodeHour], float]:
        """Return the hours of every node, and the coverage: the metered fraction of the capacity. Raises
        NothingRecorded.

        A node belongs to the pool in which it spent most of its time. Unmetered time counts as neither up nor idle."""
        span = self.window.start_ms, self.window.end_ms
        places = self._client.usage(*span, (*_PLACE, "node"))
        places["all"] = places[list(_UP)].sum(axis=1)
        of_node: dict[tuple[str, str], NodePool] = {}
        for row in places.sort_values("all", kind="stable")[[*_PLACE, "node"]].itertuples(index=False, name=None):
            cluster, pool, model, region, capacity, node = map(str, row)
            of_node[cluster, node] = NodePool(cluster, pool or model, model, region, capacity, bool(pool))
        frame = self._client.usage(*span, ("cluster", "node", "hour"), timezone=self.window.timezone)
        frame["up"], frame["held"] = frame[list(_UP)].sum(axis=1), frame[list(_HELD)].sum(axis=1)
        hourly = frame[["cluster", "node", "hour", "up", "held"]].itertuples(index=False, name=None)
        node_hours = [
            NodeHour(of_node[str(cluster), str(node)], str(node), str(hour), int(up), int(held))
            for cluster, node, hour, up, held in hourly
        ]
        return node_hours, self._known(frame.attrs["coverage"])

    def prices(self, pools: Sequence[NodePool]) -> dict[NodePool, Decimal | None]:
        """Return the price of a GPU-hour at the end of the window for each pool; None if there is no price."""
        book = self._price_book
        prices: dict[NodePool, Decimal | None] = {}
        for pool in pools:
            name = pool.name if pool.named else ""
            row = (
                book.unit_price(pool.gpu_model, self.window.end_ms - 1, name, pool.region, pool.capacity_type)
                if book is not None
                else None
            )
            prices[pool] = row.price if row is not None else None
        return prices

    def currency(self) -> str | None:
        """Return the price book's currency; None without a price book."""
        return self._price_book.currency if self._price_book is not None else None

    @cached_property
    def _price_book(self) -> PriceBook | None:
        if self._accountant.probe("/v1/prices").status == 404:
            return None
        return self._accountant.ask(PriceBook, "/v1/prices")

    def report(self) -> Mapping[str, Any]:
        """Return the accountant's report of the window as JSON-like data. Raises NothingRecorded."""
        query = {"start": str(self.window.start_ms), "end": str(self.window.end_ms), "format": "json"}
        report: Mapping[str, Any] = json.loads(self._accountant.get("/v1/report", query))
        self._known(report["summary"]["coverage"])
        return report

    def nodes_of(self, rows: Sequence[Mapping[str, Any]]) -> dict[JobKey, int]:
        """Return the largest number of nodes that each of the jobs in `rows` had in one hour."""
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

    def activity(self) -> tuple[list[JobActivity], float]:
        """Return what each job did with the GPUs that it held, and the coverage. Raises NothingRecorded."""
        by = ("team", *JobKey._fields)
        frame = self._client.usage(self.window.start_ms, self.window.end_ms, by)
        known = frame[_ACTIVITY].astype(object).where(frame[_ACTIVITY].notna(), None)
        jobs = [
            JobActivity(team, JobKey(*key), *figures_of_job)
            for team, *key, figures_of_job in zip(*(frame[name] for name in by), known.to_numpy(), strict=True)
            if key[-1]
        ]
        return jobs, self._known(frame.attrs["coverage"])

    def uses_of(self, rows: Sequence[Mapping[str, Any]]) -> dict[JobKey, ModelUse]:
        """Return the GPU model and the mean memory use of each of the jobs in `rows` that ran on a single model."""
        jobs = sorted({row["job"] for row in rows})
        if not jobs:
            return {}
        by = (*JobKey._fields, "gpu_model")
        frame = self._client.usage(self.window.start_ms, self.window.end_ms, by, {"job": jobs})
        frame["held"] = frame[list(_HELD)].sum(axis=1)
        uses: dict[JobKey, ModelUse] = {}
        on_several_models: set[JobKey] = set()
        frame["memory_known_us"] = frame.held - frame.memory_unknown_us
        frame["memory_mib_s"] = frame.memory_mib_s.fillna(0)
        columns = [*by, "memory_known_us", "memory_mib_s"]
        for *name, model, known_us, memory in frame[frame.held > 0][columns].itertuples(index=False, name=None):
            key = JobKey(*map(str, name))
            if key in uses:
                on_several_models.add(key)
            seconds = int(known_us) / US_PER_S
            uses[key] = ModelUse(str(model), int(memory) / seconds if memory else None)
        return {key: use for key, use in uses.items() if key not in on_several_models}


SUFFICIENT_COVERAGE = 0.98
"""Coverage from which the output has no note about unmetered time."""


def span_text(window: Window) -> str:
    """Return the window as text: `2026-10-04 12:00 to 2026-11-01 12:00 UTC`."""
    ends = (datetime.fromtimestamp(ms / 1000, window.zone) for ms in (window.start_ms, window.end_ms))
    return " to ".join(f"{end:%Y-%m-%d %H:%M}" for end in ends) + f" {window.timezone}"


def pools_table(
    advised: Sequence[PoolAdvice], window: Window, threshold: float, coverage: float, currency: str | None
) -> RenderableType:
    """Render one line per pool, and below the table the needed nodes by hour of the week and the notes."""
    rows = (
        (
            one.pool.name, str(one.gpus_per_node), str(one.nodes_now), str(one.min_nodes), str(one.max_nodes),
            f"{one.mean_gpus:,.1f}", f"{one.peak_gpus:,.1f}", f"{one.idle_node_hours:,}", f"{one.node_hours:,.0f}",
            f"{one.surplus_node_hours:,.0f}", money(one.saving, currency),
        )
        for one in advised
    )  # fmt: skip
    columns = [
        Column("pool", overflow="fold"),
        *figures("GPUs", "nodes", "min", "max", "held", "peak", "idle node-h", "of", "surplus", no_wrap=True),
        *figures(f"saving {currency or ''}", style="bold"),
    ]
    title = f"Nodes by pool, {span_text(window)}; a node is due at {threshold:.0%} of its GPUs held"
    weeks = (_week(one) for one in advised)
    notes = (Text(f"· {note}") for note in pool_notes(advised, window, coverage))
    return Group(table(title, columns, rows), *weeks, Text(), *notes)


def coverage_notes(coverage: float) -> Iterator[str]:
    """Yield a note if the window is not metered as a whole."""
    if coverage < SUFFICIENT_COVERAGE:
        yield f"{percent(coverage)} of the capacity is metered: the rest counts as neither up nor idle"


def pool_notes(advised: Sequence[PoolAdvice], window: Window, coverage: float) -> Iterator[str]:
    """Yield notes about the meaning and the limits of the figures."""
    yield "GPUs: per node; held, peak: GPUs held on average and in the busiest hour; idle node-h: without a held GPU"
    yield "surplus: node-hours beyond the need of their hour of the week; saving: their cost, if nodes can be removed"
    if advised and max(one.hours for one in advised) < 2 * len(DAYS) * HOURS:
        yield "the window has less than two weeks of usage: the need of an hour of the week is that of a single hour"
    yield from coverage_notes(coverage)
    for one in advised:
        if one.hours < len(window.lengths):
            hours = f"{one.hours:,} of the {len(window.lengths):,} hours"
            yield f"{one.pool.name}: the ledger has usage of {hours}; only these are counted"
        if one.full_hours:
            hours = f"{one.full_hours} of {one.hours} hours"
            yield f"{one.pool.name}: all GPUs were held in {hours}; demand that waited then is not counted"
        if len(one.shapes) > 1:
            yield f"{one.pool.name}: nodes have {', '.join(map(str, one.shapes))} GPUs; the counts are of the largest"
        if one.unit_price is None:
            yield f"{one.pool.name}: there is no price, so the saving is unknown"


def _week(one: PoolAdvice) -> RenderableType:
    """Render the needed nodes of a pool by weekday and hour, or one line if all hours need the same number. The sign ·
    marks an hour that the window does not contain."""
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
    advised: Sequence[PoolAdvice], window: Window, threshold: float, coverage: float, currency: str | None
) -> dict[str, Any]:
    """Return the advice for all pools as JSON-like data."""
    return {
        "schema": 1, **_window_fields(window), "threshold": threshold, "coverage": coverage, "currency": currency,
        "notes": list(pool_notes(advised, window, coverage)), "pools": list(pool_records(advised)),
        "variables": variables(advised, threshold),
    }  # fmt: skip


def pool_records(advised: Sequence[PoolAdvice]) -> Iterator[dict[str, Any]]:
    """Yield one record per pool, for CSV and JSON."""
    for one in advised:
        yield {
            "cluster": one.pool.cluster, "pool": one.pool.name, "gpu_model": one.pool.gpu_model,
            "region": one.pool.region, "capacity_type": one.pool.capacity_type, "gpus_per_node": one.gpus_per_node,
            "nodes_now": one.nodes_now, "min_nodes": one.min_nodes, "max_nodes": one.max_nodes,
            "mean_gpus_held": round(one.mean_gpus, 3), "peak_gpus_held": round(one.peak_gpus, 3), "hours": one.hours,
            "full_hours": one.full_hours, "node_hours": round(one.node_hours, 3),
            "idle_node_hours": one.idle_node_hours, "surplus_node_hours": round(one.surplus_node_hours, 3),
            "unit_price": _plain(one.unit_price), "saving": _plain(one.saving), "weekly": list(one.weekly),
        }  # fmt: skip


def spots_table(
    advised: Sequence[SpotAdvice], window: Window, assumed: RestartAssumptions, coverage: float, currency: str | None
) -> RenderableType:
    """Render one line per job, and below the table the notes."""
    several = _several_clusters(advised)
    rows = (
        (
            _job_name(one, several), one.team, str(one.nodes), f"{one.gpu_hours:,.1f}", money(one.cost, currency),
            money(one.spot_cost, currency), _minutes(one.interval_s),
            NOTHING if one.stretch is None else percent(one.stretch - 1), money(one.saving, currency),
        )
        for one in advised
    )  # fmt: skip
    columns = [
        Column("job", overflow="fold"),
        Column("team", overflow="fold"),
        *figures("nodes", "GPU-hours", f"cost {currency or ''}", "on spot", "checkpoint every", "longer by", "saving"),
    ]
    title = f"Spot candidates, {span_text(window)}"
    candidates = table(title, columns, rows) if advised else Text(f"No spot candidates, {span_text(window)}")
    notes = (*spot_notes(assumed), *coverage_notes(coverage))
    return Group(candidates, *(Text(f"· {note}") for note in notes))


OfJob: TypeAlias = SpotAdvice | SharingAdvice | ActivityAdvice


def _several_clusters(advised: Sequence[OfJob]) -> bool:
    return len({one.cluster for one in advised}) > 1


def _job_name(one: OfJob, with_cluster: bool) -> str:
    return "/".join([one.cluster, one.namespace, one.job][0 if with_cluster else 1 :])


def spot_notes(assumed: RestartAssumptions) -> Iterator[str]:
    """Yield notes about the assumptions and the limits of the figures."""
    yield (
        f"assumed: a checkpoint takes {_minutes(assumed.checkpoint_s)}, a restart {_minutes(assumed.restart_s)}, "
        f"and a node is interrupted every {assumed.between_s / 3600:g} h on average; the options set other values"
    )
    yield "candidates: batch jobs with a cheaper spot row in the price book; whether they write checkpoints is unknown"


def spots_document(
    advised: Sequence[SpotAdvice], window: Window, assumed: RestartAssumptions, coverage: float, currency: str | None
) -> dict[str, Any]:
    """Return the advice for all jobs, with its assumptions, as JSON-like data."""
    return {
        "schema": 1, **_window_fields(window), "coverage": coverage, "currency": currency,
        "checkpoint_s": assumed.checkpoint_s,
        "restart_s": assumed.restart_s, "interruption_every_s": assumed.between_s, "jobs": list(spot_records(advised)),
    }  # fmt: skip


def spot_records(advised: Sequence[SpotAdvice]) -> Iterator[dict[str, Any]]:
    """Yield one record per job, for CSV and JSON."""
    for one in advised:
        yield {
            "team": one.team, "cluster": one.cluster, "namespace": one.namespace, "job": one.job, "nodes": one.nodes,
            "gpu_hours": _plain(one.gpu_hours), "cost": _plain(one.cost), "spot_cost": _plain(one.spot_cost),
            "checkpoint_interval_s": round(one.interval_s, 1),
            "stretch": None if one.stretch is None else round(one.stretch, 6), "saving": _plain(one.saving),
        }  # fmt: skip


def activity_table(advised: Sequence[ActivityAdvice], window: Window, coverage: float) -> RenderableType:
    """Render one line per job, and below the table what to check and the notes."""
    notes = [Text(f"· {note}") for note in coverage_notes(coverage)]
    if not advised:
        return Group(Text(f"No job that is busy and uses little of its GPUs, {span_text(window)}"), *notes)
    several = _several_clusters(advised)
    rows = [
        (
            _job_name(one, several), one.team, f"{one.gpu_hours:,.1f}", percent(one.busy, 0), percent(one.sm, 0),
            percent(one.tensor, 0), f"{one.inactive_gpu_hours:,.1f}",
        )
        for one in advised[:MOST_ROWS]
    ]  # fmt: skip
    columns = [
        *(Column(heading, overflow="fold") for heading in ("job", "team")),
        *figures("GPU-h busy", "busy", "SM of busy", "tensor of busy", "inactive GPU-h", no_wrap=True),
    ]
    more = [Text(f"· {len(advised) - MOST_ROWS:,} more; --output csv has all")] if len(advised) > MOST_ROWS else []
    reasons = dict.fromkeys(f"· {one.finding}: {one.advice}" for one in advised)
    title = f"Jobs that are busy and use little of their GPUs, {span_text(window)}"
    return Group(table(title, columns, rows), *more, *map(Text, reasons), *notes)


MOST_ROWS = 50


def activity_records(advised: Sequence[ActivityAdvice]) -> Iterator[dict[str, Any]]:
    """Yield one record per job, for CSV and JSON."""
    for one in advised:
        yield {
            "team": one.team, "cluster": one.cluster, "namespace": one.namespace, "job": one.job,
            "busy_gpu_hours": round(one.gpu_hours, 4), "busy": round(one.busy, 4),
            "sm": None if one.sm is None else round(one.sm, 4),
            "tensor": None if one.tensor is None else round(one.tensor, 4),
            "inactive_gpu_hours": round(one.inactive_gpu_hours, 4), "finding": one.finding, "advice": one.advice,
        }  # fmt: skip


def activity_document(advised: Sequence[ActivityAdvice], window: Window, coverage: float) -> dict[str, Any]:
    """Return the advice for all jobs as JSON-like data."""
    return {"schema": 1, **_window_fields(window), "coverage": coverage, "jobs": list(activity_records(advised))}


def sharing_table(
    advised: Sequence[SharingAdvice], window: Window, coverage: float, currency: str | None
) -> RenderableType:
    """Render one line per job, and below the table the reason for each kind of sharing and the notes."""
    notes = [Text(f"· {note}") for note in coverage_notes(coverage)]
    if not advised:
        return Group(Text(f"No job for which a part of a GPU is enough, {span_text(window)}"), *notes)
    several = _several_clusters(advised)
    rows: list[tuple[str, ...]] = []
    reasons: dict[str, None] = {}
    for one in advised:
        ways = {"mig": f"MIG {one.profile}", "time-slicing": f"{one.replicas} replicas", "none": NOTHING}
        memory = NOTHING if one.memory_mib is None else f"{one.memory_mib / 1024:,.1f} GiB"
        name, saving = _job_name(one, several), money(one.saving, currency)
        rows.append((name, one.gpu_model, ways[one.way], percent(one.peak), memory, saving))
        reasons[f"· {ways[one.way]}: {one.reason}"] = None
    columns = [
        *(Column(heading, overflow="fold") for heading in ("job", "GPU", "sharing")),
        *figures("busiest hour", "mean memory", f"saving {currency or ''}", no_wrap=True),
    ]
    title = f"Jobs for which a part of a GPU is enough, {span_text(window)}"
    return Group(table(title, columns, rows), *map(Text, reasons), *notes)


def sharing_records(advised: Sequence[SharingAdvice]) -> Iterator[dict[str, Any]]:
    """Yield one record per job, for CSV and JSON."""
    for one in advised:
        yield {
            "team": one.team, "cluster": one.cluster, "namespace": one.namespace, "job": one.job,
            "gpu_model": one.gpu_model, "way": one.way, "profile": one.profile or None,
            "replicas": one.replicas or None, "peak_busy": round(one.peak, 4),
            "memory_mib": None if one.memory_mib is None else round(one.memory_mib), "saving": _plain(one.saving),
            "reason": one.reason,
        }  # fmt: skip


def sharing_document(
    advised: Sequence[SharingAdvice], window: Window, coverage: float, currency: str | None
) -> dict[str, Any]:
    """Return the advice for all jobs as JSON-like data."""
    return {
        "schema": 1,
        **_window_fields(window),
        "coverage": coverage,
        "currency": currency,
        "jobs": list(sharing_records(advised)),
    }


def _window_fields(window: Window) -> dict[str, str]:
    ends = (
        datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") for ms in (window.start_ms, window.end_ms)
    )
    return dict(zip(("start", "end"), ends, strict=True)) | {"timezone": window.timezone}


def _plain(amount: Decimal | None) -> str | None:
    return None if amount is None else plain(amount.normalize())


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:,.0f} min" if seconds >= 60 else f"{seconds:,.0f} s"
