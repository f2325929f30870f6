"""Asks the accountant for the facts that advice is computed from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

from accountant.core.periods import hours, zone
from accountant.ledger.protocols import JobKey
from accountant.prices.price_book import PriceBook
from accountant.wire.http_client import AccountantClient
from gputally.advise.recommendations import ModelUse, NodeHour, Pool
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR, US_PER_HOUR
from gputally.client import Client

_PLACE = ("cluster", "pool", "gpu_model", "region", "capacity_type")
_US_PER_S = US_PER_HOUR // 3600
_HELD = ("busy_gpu_us", "allocated_idle_gpu_us", "allocated_unknown_gpu_us")
_UP = (*_HELD, "unallocated_gpu_us")


@dataclass(frozen=True, slots=True)
class Window:
    """Whole hours, UTC milliseconds; timezone: of the hours of the week."""

    start_ms: int
    end_ms: int
    timezone: str

    @classmethod
    def before(cls, now_ms: int, days: int, timezone: str) -> Window:
        """The days before the hour that runs. Raises ValueError for an unknown time zone."""
        zone(timezone)
        end = now_ms // MS_PER_HOUR * MS_PER_HOUR
        return cls(end - days * MS_PER_DAY, end, timezone)

    @property
    def zone(self) -> ZoneInfo:
        return zone(self.timezone)

    @property
    def lengths(self) -> dict[str, int]:
        """Of its local hours, in ms."""
        return hours(self.start_ms, self.end_ms, self.zone)


class LedgerQuestions:
    """Every method raises accountant.wire.http_client.Unanswered with one clear line."""

    def __init__(self, remote: AccountantClient, window: Window) -> None:
        self._remote = remote
        self._client = Client(remote)
        self.window = window

    def node_hours(self) -> tuple[list[NodeHour], float]:
        """(every node in every hour, metered share of the capacity). What is not metered is neither up nor idle; a node
        belongs where most of its time did."""
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
        return found, float(frame.attrs["coverage"])

    def prices(self, places: Sequence[Pool]) -> dict[Pool, Decimal | None]:
        """Of a GPU-hour at the window's end; None without one."""
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
        if self._remote.knock("/v1/prices").status == 404:
            return None
        return self._remote.ask(PriceBook, "/v1/prices")

    def report(self) -> Mapping[str, Any]:
        """The window's report as JSON: `summary` and `tables`."""
        query = {"start": str(self.window.start_ms), "end": str(self.window.end_ms), "format": "json"}
        found: Mapping[str, Any] = json.loads(self._remote.get("/v1/report", query))
        return found

    def nodes_of(self, rows: Sequence[Mapping[str, Any]]) -> dict[JobKey, int]:
        """The most nodes of each of these jobs in one hour."""
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
        """On which model each of these jobs ran, and with how much memory; those on one model alone."""
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
