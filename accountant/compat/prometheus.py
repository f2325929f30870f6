"""Prometheus' HTTP API, as much of it as KAI-Scheduler's usage client asks of it.

KAI's `connectionString` can then point here: exact, without duplicate series, with MIG and shared GPUs, and
with a word about staleness that KAI itself only logs. Nothing else of PromQL is answered. GET and POST
/api/v1/query; what Prometheus' operators look for first (/-/healthy, /-/ready, /api/v1/status/config).

Every scheduling shard sends the same text, so each has an address of its own, `/shards/NAME` in front of the path:
its usage and its capacity are those of its nodes. NAME is the shard's partition label value; `/shards` alone is the
shard of nodes without one. The bare address is the whole cluster, for a KAI with one shard. Where several clusters
share the ledger, `/clusters/NAME` goes in front.

The window ends at the watermark, not at the present: a query that counted the last minute's capacity but not
yet its usage would show every queue as frugal. Answers of one fetch come from one window.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from urllib.parse import parse_qs

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CollectorRegistry, Counter, Gauge

from accountant import question_cost
from accountant.compat.kai import State, rows, state_at
from accountant.compat.promql import MAX_QUERY_CHARACTERS, UnknownQuery, UsageQuestion, parse
from accountant.errors import AccountantError
from accountant.inventory.nodes import SHARD
from accountant.ledger import Ledger
from accountant.prices.book import PriceBook
from accountant.settings import KaiUsage, Limits
from accountant.wire import Policy, UsageWindow, WindowSpec
from agent.clock import Clock
from agent.units import MS_PER_SECOND

_MAX_BODY_BYTES = 4 * MAX_QUERY_CHARACTERS
_REMEMBERED = 64
_LIMITS = Limits()
OF_SHARDS = "/shards"
"""In front of the path of who asks for one shard: `/shards/NAME`, `/shards` for the one without a label."""
OF_CLUSTERS = "/clusters"
"""In front of that, of who asks for one cluster of several in the ledger: `/clusters/NAME`."""
_GRAIN_MS = 15 * MS_PER_SECOND
"""Questions of one fetch, a few milliseconds apart, see the same window."""
_MS_PER_YEAR = 366 * 86_400 * MS_PER_SECOND


class Refused(Exception):
    """status and errorType as in Prometheus' own answers; the text is the reason."""

    def __init__(self, status: int, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.kind = kind


class KaiMetrics:
    """What KAI was told, for Prometheus. One per registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.answers = Counter(
            "gputally_kai_usage_answers",
            "Answers to KAI's usage queries: usage; stale (an error: KAI keeps its last usage); "
            "plain (capacity without usage); refused.",
            ["result"],
            registry=registry,
        )
        self.age = Gauge(
            "gputally_kai_usage_age_seconds",
            "Age of the usage in the last answer to KAI: from the end of what is metered to the instant asked for.",
            registry=registry,
        )
        for result in ("usage", "stale", "plain", "refused"):
            self.answers.labels(result)


@dataclass(frozen=True, slots=True)
class _Known:
    window: UsageWindow
    policy: Policy
    state: State
    age_s: float


class KaiUsageSource:
    """Answers KAI's questions. Thread-safe."""

    def __init__(
        self,
        ledger: Ledger,
        clock: Clock,
        settings: KaiUsage,
        metrics: KaiMetrics,
        book: Callable[[], PriceBook | None] = lambda: None,
        limits: Limits = _LIMITS,
    ) -> None:
        """book: the price book in force, for measure cost."""
        self._most = limits.question_gpu_hours
        self._ledger = ledger
        self._book = book
        self._clock = clock
        self._settings = settings
        self._metrics = metrics
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str | None, str | None, int, int | None, int], _Known] = OrderedDict()

    def answer(
        self, query: str, time: str | None, shard: str | None = None, cluster: str | None = None
    ) -> Mapping[str, object]:
        """The body of a successful answer. shard: to which one, None: of the whole cluster. cluster: None: of all there
        are. Raises Refused."""
        try:
            found = self._answer(query, time, shard, cluster)
        except Refused as refused:
            self._metrics.answers.labels("stale" if refused.kind == "stale" else "refused").inc()
            raise
        return found

    def _answer(self, query: str, time: str | None, shard: str | None, cluster: str | None) -> Mapping[str, object]:
        try:
            question = parse(query)
        except UnknownQuery as error:
            raise Refused(400, "bad_data", str(error)) from error
        at_ms = self._instant(time)
        if cluster is not None and cluster not in self._ledger.clusters():
            raise Refused(404, "not_found", f"nothing was metered of a cluster {cluster[:200]!r}")
        nodes = (node for node in self._ledger.nodes() if cluster in (None, node.cluster))
        if shard is not None and all(node.shard != shard for node in nodes):
            raise Refused(404, "not_found", f"no node belongs to shard {shard[:200]!r} (label {SHARD})")
        known = self._read(question, at_ms, shard, cluster)
        self._metrics.age.set(known.age_s)
        if known.state == "stale":
            raise Refused(
                503,
                "stale",
                f"usage is {known.age_s:.0f} s old, more than {self._settings.stale_after} s: keep the usage you have",
            )
        self._metrics.answers.labels(known.state).inc()
        vector = [
            {"metric": dict(row.labels), "value": [at_ms / MS_PER_SECOND, repr(row.value)]}
            for row in rows(question, known.window, known.policy, known.state)
        ]
        return {"status": "success", "data": {"resultType": "vector", "result": vector}}

    def _instant(self, time: str | None) -> int:
        now = self._clock.wall_ms()
        if time is None:
            return now
        try:
            at_ms = round(float(time) * MS_PER_SECOND)
        except (ValueError, OverflowError) as error:
            raise Refused(400, "bad_data", f"time {time[:40]!r}: expected seconds since 1970") from error
        if not 0 < at_ms <= now + _MS_PER_YEAR:
            raise Refused(400, "bad_data", f"time {time[:40]!r} is not an instant to ask for")
        return at_ms

    def _read(self, question: UsageQuestion, at_ms: int, shard: str | None, cluster: str | None) -> _Known:
        key = (shard, cluster, question.window_s, question.half_life_s, at_ms // _GRAIN_MS)
        with self._lock:  # one fetch asks six times: the first reads, the others wait for it
            known = self._known.get(key)
            if known is None:
                known = self._known[key] = self._fresh(question, at_ms, shard, cluster)
                while len(self._known) > _REMEMBERED:
                    self._known.popitem(last=False)
            return known

    def _fresh(self, question: UsageQuestion, at_ms: int, shard: str | None, cluster: str | None) -> _Known:
        settings = self._settings
        spec = WindowSpec(kind="sliding", size=question.window_s, half_life=question.half_life_s)
        try:
            policies = self._ledger.policies(at_ms, at_ms + 1)
            if not policies:
                raise Refused(503, "unavailable", "no policy yet: nothing says which queues there are")
            watermark = self._ledger.watermark(at_ms, settings.min_coverage, shard, cluster)
            state = state_at(at_ms, watermark, settings.stale_after, settings.plain_after)
            # A window up to the present would end, and so begin, in the middle of rows.
            end_ms = watermark if state == "usage" and watermark is not None else at_ms
            begin_ms, clusters = end_ms - question.window_s * MS_PER_SECOND, () if cluster is None else (cluster,)
            if reason := question_cost.refusal(self._ledger, self._most, begin_ms, end_ms, clusters=clusters):
                raise Refused(422, "bad_data", f"the window has {reason}")
            asked = (settings.measure, settings.min_coverage)
            window = self._ledger.window(spec, end_ms, *asked, book=self._book(), shard=shard, cluster=cluster)
        except AccountantError as error:
            raise Refused(503, "unavailable", str(error)) from error
        age_s = (at_ms - watermark) / MS_PER_SECOND if watermark is not None else float("inf")
        return _Known(window, policies[-1].policy, state, age_s)


def create_app(source: KaiUsageSource) -> FastAPI:
    """The listener's application: no credentials, nothing to write, small bodies only."""

    async def query(request: Request, nameless: str | None) -> Response:
        try:
            given = parse_qs(request.url.query, max_num_fields=8)
            if request.method == "POST":
                given |= parse_qs((await _body(request)).decode("ascii"), max_num_fields=8)
            text = given.get("query", [""])[-1]
            time = given.get("time", [None])[-1]
            cluster = request.path_params.get("cluster")
            shard = request.path_params.get("shard", nameless)
            return JSONResponse(await asyncio.to_thread(source.answer, text, time, shard, cluster))
        except Refused as refused:
            return _refusal(refused)
        except (UnicodeDecodeError, ValueError) as error:
            return _refusal(Refused(400, "bad_data", f"the form cannot be read: {error}"))

    async def matrix(_: Request) -> Response:
        text = (
            "query_range: KAI asks for a range with windows of type tumbling or cron, which no Prometheus answers:"
            " set usageParams.windowType: sliding"
        )
        return _refusal(Refused(400, "bad_data", text))

    async def well(_: Request) -> Response:
        return PlainTextResponse("gputally answers KAI's usage queries here.\n")

    async def config(_: Request) -> Response:
        return JSONResponse({"status": "success", "data": {"yaml": ""}})

    app = FastAPI(title="gputally usage source for KAI-Scheduler", openapi_url=None)
    of_shards: dict[str, str | None] = {"": None, OF_SHARDS: "", OF_SHARDS + "/{shard}": None}
    of_clusters = {OF_CLUSTERS + "/{cluster}" + of: nameless for of, nameless in of_shards.items()}
    for base, nameless in (of_shards | of_clusters).items():
        app.add_route(f"{base}/api/v1/query", partial(query, nameless=nameless), methods=["GET", "POST"])
        app.add_route(f"{base}/api/v1/query_range", matrix, methods=["GET", "POST"])
        app.add_route(f"{base}/api/v1/status/config", config)
        app.add_route(f"{base}/-/healthy", well)
        app.add_route(f"{base}/-/ready", well)
    return app


async def _body(request: Request) -> bytes:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY_BYTES:
            raise Refused(413, "bad_data", f"a form of more than {_MAX_BODY_BYTES} bytes")
    return body


def _refusal(refused: Refused) -> Response:
    body = {"status": "error", "errorType": refused.kind, "error": str(refused)}
    return JSONResponse(body, status_code=refused.status)
