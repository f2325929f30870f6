"""Queries a Prometheus server for the series of one chunk, the span that an import reads and sends at once.

Every selector has a window that ends at the queried instant (`last_over_time(x[w])`), so the result does not depend on
the server's staleness rules. For series over time, the window is one step, or two scrape intervals if these are longer.
For facts that are read once, such as labels, it is the whole chunk or more. Metrics are queried by their old and new
names; labels are read by `exporter_series`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

from accountant.histories.prometheus.exporter_series import (
    Labels,
    Observed,
    PrometheusSeries,
    device_of,
    of,
    resource,
    unknown_resource,
)
from accountant.histories.prometheus.pod_history import histories
from accountant.history_import.gpu_assignment import NodeHistory, TimeGrid
from accountant.history_import.protocol import Chunk
from gputally.base.errors import AccountantError
from gputally.base.prometheus_api import Prometheus, number
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR, MS_PER_MINUTE, MS_PER_SECOND


class PrometheusFailed(AccountantError):
    """Prometheus gave no usable answer. The message has the address and the reason."""


STEP_MS = MS_PER_MINUTE
_UTIL: Final = ("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_GPU_UTIL_RATIO")
_ENGINE: Final = ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO")
_MEMORY: Final = ("DCGM_FI_DEV_FB_USED",)
_POWER: Final = ("DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_BOARD_POWER_WATTS")
_DCGM: Final = (*_UTIL, *_ENGINE, *_MEMORY, *_POWER)
_REQUESTS: Final = "kube_pod_container_resource_requests"
_KSM: Final = (_REQUESTS, "kube_node_info", "kube_pod_info")
_INIT_REQUESTS: Final = "kube_pod_init_container_resource_requests"
_GPU: Final = 'resource=~"nvidia_com_.+|nvidia[.]com/.+|.*gpu.*"'
_PERCENT, _OVERSHOOT = 100.0, 2.0
_RATE_MS = 10 * MS_PER_MINUTE
_CELLS = 1_000_000
"""Cells of all devices in one chunk, to limit memory."""


class PrometheusHistory:
    """The history in a Prometheus server. match: further label matchers, such as `cluster="prod"`."""

    def __init__(
        self, server: Prometheus, *, match: str = "", scheduler: str = "", team_labels: Sequence[str] = ()
    ) -> None:
        self._server = server
        self._match = match.strip().strip(",")
        self._scheduler = scheduler
        self._team_labels = tuple(team_labels)
        self.unknown: set[str] = set()
        """Resources that pods requested, and of which nothing says whether they are GPUs; they are not imported."""

    @property
    def origin(self) -> str:
        return self._server.origin

    def chunk_ms(self, at_ms: int) -> int:
        """The length of a chunk: shorter with more devices. Raises PrometheusFailed if there are no GPU series in the
        day before `at_ms`."""
        alternatives = " or ".join(
            f"count(last_over_time({self._of(name)}[1d]))" for name in (*_UTIL, *_ENGINE, *_MEMORY)
        )
        asked = read_values(self._server, f"max({alternatives})", at_ms)
        by_resource = f"sum by (resource, exported_resource) (last_over_time({self._of(_REQUESTS, _GPU)}[1d]))"
        requests = read_values(self._server, by_resource, at_ms)
        gpus = sum(value for labels, value in requests if resource(of(labels, "resource")) and value == value)
        count = max([int(value) for _, value in asked if value == value], default=0)
        count = max(count, int(gpus))
        if not count:
            raise PrometheusFailed(
                f"{self.origin}: no GPU series of dcgm-exporter or kube-state-metrics was scraped in the day before "
                "the end of the span: check the address, the label matchers and the span"
            )
        hours = _CELLS * STEP_MS // MS_PER_HOUR // count
        return next((h for h in (24, 12, 8, 6, 4, 3, 2) if h <= hours), 1) * MS_PER_HOUR

    def read(self, chunk: Chunk) -> list[NodeHistory]:
        """The history of one chunk, by node."""
        seen = self.observe(chunk)
        self.unknown |= {name for one in seen.requests if unknown_resource(name := of(one.labels, "resource"))}
        return histories(seen, scheduler=self._scheduler, team_labels=self._team_labels)

    def observe(self, chunk: Chunk) -> Observed:
        """The query results of one chunk."""
        whole = f"{(chunk.end_ms - chunk.start_ms) // MS_PER_SECOND}s"
        grid = TimeGrid(chunk.start_ms, chunk.end_ms, STEP_MS)
        known = self._known(chunk, whole)
        scrape_ms = self._scrape_ms(chunk, known & set(_KSM))
        window_ms = max(STEP_MS, 2 * scrape_ms)
        device_ms = max(STEP_MS, 2 * self._scrape_ms(chunk, known & set(_DCGM)))
        ask = _ChunkQueries(self._server, chunk, self._match)
        return Observed(
            grid=grid,
            window_ms=window_ms,
            scrape_ms=scrape_ms,
            requests=ask.last(_REQUESTS, window_ms, _GPU),
            init_requests=ask.last(_INIT_REQUESTS, window_ms, _GPU),
            over=ask.last("kube_pod_status_phase", window_ms, 'phase=~"Succeeded|Failed"', "== 1"),
            nodes=ask.last("kube_node_info", window_ms),
            unready=ask.last("kube_node_status_condition", window_ms, 'condition="Ready",status="true"', "== 0"),
            busy=_busy(
                [one for name in _UTIL if name in known for one in ask.mean(name, device_ms)],
                [one for name in _ENGINE if name in known for one in ask.mean(name, device_ms)],
            ),
            memory=tuple(one for name in _MEMORY if name in known for one in ask.mean(name, device_ms, MOST_MIB)),
            power=tuple(one for name in _POWER if name in known for one in ask.mean(name, device_ms, MOST_POWER_W)),
            devices=self._devices(chunk),
            allocatable=ask.once("kube_node_status_allocatable", whole, _GPU, "max"),
            starts=ask.once("kube_pod_start_time", whole, most=MOST_EPOCH_S),
            ends=ask.once("kube_pod_completion_time", whole, most=MOST_EPOCH_S),
            pods=ask.names("kube_pod_info", whole),
            owners=ask.names("kube_pod_owner", whole),
            upper_owners=(*ask.names("kube_replicaset_owner", whole), *ask.names("kube_job_owner", whole)),
            schedulers=ask.names("kube_pod_scheduler", whole),
            pod_labels=ask.names("kube_pod_labels", whole),
            node_labels=ask.names("kube_node_labels", whole, 'label_nvidia_com_gpu_product!=""'),
        )

    def _of(self, name: str, matchers: str = "") -> str:
        return selector(name, matchers, self._match)

    def _known(self, chunk: Chunk, whole: str) -> set[str]:
        """The metrics that were scraped in the chunk."""
        names = "|".join((*_DCGM, *_KSM))
        text = selector("", f'__name__=~"{names}"', self._match)
        found = read_values(self._server, f"count by (__name__) (last_over_time({text}[{whole}]))", chunk.end_ms)
        return {labels.get("__name__", "") for labels, _ in found}

    def _scrape_ms(self, chunk: Chunk, names: set[str]) -> int:
        """The scrape interval, from the largest number of samples in ten minutes."""
        every = f"{min(chunk.end_ms - chunk.start_ms, MS_PER_DAY) // MS_PER_SECOND}s:10m"
        for name in sorted(names):
            text = f"max(max_over_time(count_over_time({self._of(name)}[10m])[{every}]))"
            counts = [value for _, value in read_values(self._server, text, chunk.end_ms) if value >= 1]
            if counts:
                return min(_RATE_MS, round(_RATE_MS / max(counts)))
        return STEP_MS // 2

    def _devices(self, chunk: Chunk) -> tuple[Labels, ...]:
        """Devices listed in the chunk or in the day before, because a GPU may exist while its exporter is missing."""
        found: list[Labels] = []
        back = f"{(chunk.end_ms - chunk.start_ms + MS_PER_DAY) // MS_PER_SECOND}s"
        for name in (*_UTIL, *_ENGINE, *_MEMORY):
            found += [
                labels
                for labels, _ in read_values(self._server, f"last_over_time({self._of(name)}[{back}])", chunk.end_ms)
            ]
        return tuple(found)


MOST: Final = 2.0**40
MOST_MIB: Final = 2.0**24
MOST_POWER_W: Final = 1e5
MOST_EPOCH_S: Final = 253_402_300_799
"""The end of the year 9999."""


class _ChunkQueries:
    """The queries of one chunk."""

    def __init__(self, server: Prometheus, chunk: Chunk, match: str) -> None:
        self._server = server
        self._chunk = chunk
        self._match = match

    def last(self, name: str, window_ms: int, matchers: str = "", test: str = "") -> tuple[PrometheusSeries, ...]:
        return self._range(f"last_over_time({selector(name, matchers, self._match)}[{window_ms}ms]) {test}")

    def mean(self, name: str, window_ms: int, most: float = MOST) -> list[PrometheusSeries]:
        """The mean of ratios and gauges; a percentage becomes a ratio. most: as in `read_series`."""
        found = self._range(f"avg_over_time({selector(name, '', self._match)}[{window_ms}ms])", most)
        if name not in (*_UTIL, *_ENGINE):
            return list(found)
        return [PrometheusSeries(one.labels, one.times, _ratios(one.values, percent=name == _UTIL[0])) for one in found]

    def once(
        self, name: str, whole: str, matchers: str = "", kind: str = "last", most: float = MOST
    ) -> tuple[tuple[Labels, float], ...]:
        text = f"{kind}_over_time({selector(name, matchers, self._match)}[{whole}])"
        return tuple(read_values(self._server, text, self._chunk.end_ms, most))

    def names(self, name: str, whole: str, matchers: str = "") -> tuple[Labels, ...]:
        return tuple(labels for labels, _ in self.once(name, whole, matchers))

    def _range(self, query: str, most: float = MOST) -> tuple[PrometheusSeries, ...]:
        chunk = self._chunk
        return tuple(read_series(self._server, query, chunk.start_ms + STEP_MS, chunk.end_ms, STEP_MS, most))


def read_values(server: Prometheus, query: str, at_ms: int, most: float = MOST) -> list[tuple[Labels, float]]:
    """The result of a query at an instant. A negative value, or one above `most`, is NaN. Raises PrometheusFailed."""
    return [(one.metric, number(one.value[1], most)) for one in server.instant(query, at_ms) if one.value is not None]


def read_series(
    server: Prometheus, query: str, start_ms: int, end_ms: int, step_ms: int, most: float = MOST
) -> list[PrometheusSeries]:
    """Values at start, start + step, … up to and including end. Values that are negative or above `most` are NaN.
    Raises PrometheusFailed."""
    found = []
    for one in server.range(query, start_ms, end_ms, step_ms):
        values = [(at, text) for at, text in one.values if 0 <= at <= MOST_EPOCH_S]
        times = array("q", (round(at * MS_PER_SECOND) for at, _ in values))
        found.append(PrometheusSeries(one.metric, times, array("d", (number(text, most) for _, text in values))))
    return found


def selector(name: str, matchers: str, match: str) -> str:
    inside = ",".join(part for part in (matchers, match) if part)
    return f"{name}{{{inside}}}" if inside or not name else name


def _ratios(values: Sequence[float], *, percent: bool) -> list[float]:
    return [value / _PERCENT if percent or value > _OVERSHOOT else value for value in values]


def _busy(util: Sequence[PrometheusSeries], engine: Sequence[PrometheusSeries]) -> tuple[PrometheusSeries, ...]:
    """Time with a running kernel for whole GPUs; engine activity for MIG instances, and if there is nothing else."""
    timed = {place for one in util if (place := device_of(one.labels)) is not None and place[1] is None}
    return (
        *(one for one in util if (place := device_of(one.labels)) is not None and place[1] is None),
        *(one for one in engine if device_of(one.labels) not in timed),
    )
