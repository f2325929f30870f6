"""Serves the Prometheus queries that KAI-Scheduler's usage client sends.

KAI's `connectionString` can point here instead of to Prometheus. The usage is exact, without duplicate series, and
includes MIG and shared GPUs. Usage older than `stale_after` is refused, so KAI keeps its previous usage. Beyond
`plain_after` the answer is capacity without usage, so the configured weights apply. No other PromQL is supported.
Paths: GET and POST /api/v1/query, and the paths that Prometheus clients check first (/-/healthy, /-/ready,
/api/v1/status/config).

The queries of all scheduling shards have the same text, so each shard has a path prefix, `/shards/NAME`. Its usage and
capacity are those of its nodes. NAME is the shard's partition label value, and `/shards` alone is the shard of nodes
without one. Without the prefix the answer covers the whole cluster, for a KAI with one shard. If several clusters share
the ledger, `/clusters/NAME` comes first.

The window of usage ends at the watermark (the instant up to which enough GPUs have records), not at the present.
Otherwise the capacity of the last minute would already count, but its usage would not, and every queue would seem to
use less than it does. All answers of one fetch use the same window.

The query is parsed, not compared as text. Parentheses and aggregations such as `max by (queue_name) (...)` are accepted
and have no effect, since there is one row per queue. A query that is not one of the six supported ones is refused with
its unsupported part.

Source of the queries: KAI-Scheduler pkg/scheduler/cache/usagedb/prometheus/prometheus.go at v0.17:
`sum_over_time((METRIC)[WINDOW:RESOLUTION])`, with a half-life `sum_over_time((((METRIC) * (0.5^((NOW - time()) /
HALF_LIFE))))[WINDOW:RESOLUTION])`.

KAI divides usage of a queue by capacity. Both are the exact integral of GPUs over the window, in the unit of the query
(GPUs times steps of its resolution), so that they can be compared with Prometheus. There is exactly one row per queue,
because KAI keeps only the last of several rows.

CPU and memory are not metered. Their capacity is a positive constant and their usage empty, so the usage of every queue
is 0. A capacity of 0 would make it NaN, and no queue would get an over-quota share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Literal
from urllib.parse import parse_qs

import promql_parser as promql
from cachetools import LRUCache
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CollectorRegistry, Counter, Gauge
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from accountant.api import query_parameters
from accountant.api.query_parameters import bounded
from accountant.core.settings import KaiUsage, Limits
from accountant.core.window_decay import age_weight
from accountant.ledger.protocols import ReadableLedger, policy_at
from accountant.prices.price_book import PriceBook
from accountant.wire.policy_models import Policy, QueuePolicy, UsageWindow, WindowSpec
from gputally.base.called_off import CalledOff
from gputally.base.clock import Clock
from gputally.base.errors import AccountantError
from gputally.base.units import MS_PER_SECOND, US_PER_MS
from gputally.kubernetes.pod_queue_labels import shard_labels
from gputally.server.request_handling import read_body
from gputally.server.turns import GONE, Busy, TurnLimits, Turns

Resource = Literal["gpu", "cpu", "memory"]
MAX_QUERY_CHARACTERS = 4_096
ALLOCATIONS: Mapping[str, Resource] = {
    "kai_queue_allocated_gpus": "gpu",
    "kai_queue_allocated_cpu_cores": "cpu",
    "kai_queue_allocated_memory_bytes": "memory",
}
"""Metrics of KAI's queue controller that its default settings sum."""
CAPACITIES: Mapping[str, Resource] = {"nvidia_com_gpu": "gpu", "cpu": "cpu", "memory": "memory"}
"""Values of the label `resource` of kube_node_status_capacity, and of resources_per_nodepool."""
POOL_LABEL = "nodepool"
_OPERATORS = {
    "MatchOp.Equal": "=",
    "MatchOp.NotEqual": "!=",
    "MatchOp.Re": "=~",
    "MatchOp.NotRe": "!~",
}


class UnknownQuery(ValueError):
    """A query that KAI's usage client does not send. The message names the unsupported part and what was expected."""


@dataclass(frozen=True, slots=True)
class KaiUsageQuestion:
    """One of the six queries: allocation per queue, or capacity, of one resource over a sliding window.

    window_s, resolution_s, half_life_s: durations in seconds.
    reference_s: the instant (seconds since 1970) at which decayed samples count fully; None without a half-life.
    pool: the node pool of a capacity, if it is restricted to one."""

    resource: Resource
    of: Literal["allocation", "capacity"]
    window_s: int
    resolution_s: float
    half_life_s: int | None
    reference_s: float | None
    pool: str | None = None


def parse(text: str) -> KaiUsageQuestion:
    """Parses a query. Raises UnknownQuery."""
    if len(text) > MAX_QUERY_CHARACTERS:
        raise UnknownQuery(f"the query has more than {MAX_QUERY_CHARACTERS} characters")
    try:
        outer = _bare(promql.parse(text))
    except ValueError as error:
        raise UnknownQuery(f"not PromQL: {error}") from error
    if not isinstance(outer, promql.Call) or outer.func.name != "sum_over_time":
        raise UnknownQuery("expected sum_over_time(...), as KAI's sliding windows send it")
    inner = _bare(outer.args[0])
    if not isinstance(inner, promql.SubqueryExpr) or inner.offset is not None or inner.at is not None:
        raise UnknownQuery("expected a subquery [window:resolution] in sum_over_time, without offset or @")
    if inner.step is None:
        raise UnknownQuery("the subquery has no resolution")
    metric, reference, half_life = _decayed(_bare(inner.expr))
    resource, kind, pool = _metric(metric)
    window = _whole_seconds(inner.range, "the window")
    return KaiUsageQuestion(resource, kind, window, inner.step.total_seconds(), half_life, reference, pool)


def _decayed(expression: promql.Expr) -> tuple[promql.Expr, float | None, int | None]:
    """The metric, the reference and the half-life of METRIC * 0.5^((reference - time()) / half-life). For a plain
    METRIC the other two are None. Raises UnknownQuery."""
    if not isinstance(expression, promql.BinaryExpr):
        return expression, None, None
    power = _operands(expression, "*")
    base, exponent = _operands(power[1], "^")
    age, half_life = _operands(exponent, "/")
    reference, now = _operands(age, "-")
    if _number(base) != 0.5 or not isinstance(now, promql.Call) or now.func.name != "time":
        raise UnknownQuery("expected a decay of the form 0.5^((now - time()) / half_life)")
    try:
        duration = timedelta(seconds=_number(half_life))
    except (OverflowError, ValueError) as error:
        raise UnknownQuery("the half-life is not a duration") from error
    return power[0], _number(reference), _whole_seconds(duration, "the half-life")


def _operands(expression: promql.Expr, operator: str) -> tuple[promql.Expr, promql.Expr]:
    if not isinstance(expression, promql.BinaryExpr) or str(expression.op) != operator:
        raise UnknownQuery("expected METRIC * (0.5^((now - time()) / half_life))")
    return _bare(expression.lhs), _bare(expression.rhs)


def _number(expression: promql.Expr) -> float:
    if not isinstance(expression, promql.NumberLiteral):
        raise UnknownQuery("expected a number in the decay")
    return expression.val


def _whole_seconds(duration: timedelta | None, what: str) -> int:
    seconds = duration.total_seconds() if duration is not None else 0.0
    if seconds < 1 or seconds != int(seconds):
        raise UnknownQuery(f"{what} is not a whole number of seconds above 0: {seconds:g} s")
    return int(seconds)


def _metric(expression: promql.Expr) -> tuple[Resource, Literal["allocation", "capacity"], str | None]:
    while isinstance(expression, promql.AggregateExpr):
        expression = _bare(expression.expr)
    if not isinstance(expression, promql.VectorSelector) or expression.offset is not None:
        raise UnknownQuery("expected one metric, possibly aggregated")
    name = expression.name or ""
    if name in ALLOCATIONS:  # labels of the scrape restrict nothing here: there is one row per queue
        return ALLOCATIONS[name], "allocation", None
    matchers = expression.matchers.matchers
    labels = {matcher.name: matcher.value for matcher in matchers if matcher.op == promql.MatchOp.Equal}
    resource = CAPACITIES.get(labels.get("resource", ""))
    if resource is None:
        raise UnknownQuery(
            f"unknown metric {name!r}: expected one of {', '.join(ALLOCATIONS)}, or a capacity with the label "
            f"resource ({', '.join(CAPACITIES)}) and possibly {POOL_LABEL}"
        )
    for matcher in matchers:
        if matcher.name not in ("resource", POOL_LABEL) or matcher.op != promql.MatchOp.Equal:
            raise UnknownQuery(
                f"unknown selector {matcher.name}{_OPERATORS.get(str(matcher.op), '')}{matcher.value!r} of {name}: a"
                f' capacity is selected by resource="..." and {POOL_LABEL}="..." alone'
            )
    return resource, "capacity", labels.get(POOL_LABEL)


def _bare(expression: promql.Expr) -> promql.Expr:
    while isinstance(expression, promql.ParenExpr):
        expression = expression.expr
    return expression


State = Literal["usage", "stale", "plain"]
"""usage: the usage is current. stale: the answer is an error, so KAI keeps its previous usage. plain: the usage is too
old to be useful, so the answer is capacity without usage, and the configured weights apply."""
QUEUE_LABEL = "queue_name"
REF_PREFIX = "kai:"


@dataclass(frozen=True, slots=True)
class VectorSample:
    """One sample of the instant vector."""

    labels: Mapping[str, str]
    value: float


def state_at(at_ms: int, watermark_ms: int | None, stale_after_s: int, plain_after_s: int) -> State:
    """How recent the usage is for a window that ends at `at_ms`. watermark_ms: the instant up to which it is complete;
    None: unknown."""
    if watermark_ms is None or at_ms - watermark_ms > plain_after_s * MS_PER_SECOND:
        return "plain"
    return "stale" if at_ms - watermark_ms > stale_after_s * MS_PER_SECOND else "usage"


def rows(question: KaiUsageQuestion, window: UsageWindow, policy: Policy, state: State) -> Sequence[VectorSample]:
    """The samples of the answer, sorted by queue name. Raises UnknownQuery.

    state: as `state_at` returns it; the caller refuses `stale` before.

    A policy's queue with several KAI queues (refs) gives each of them its whole usage, since the policy treats them as
    one queue. Usage of a queue includes that of its descendants, as in KAI."""
    if question.of == "capacity":
        has_capacity = question.resource == "gpu" and window.capacity > 0
        value = _steps(question, window, window.capacity) if has_capacity else question.window_s / question.resolution_s
        return [VectorSample({}, value)]
    if question.resource != "gpu" or state == "plain" or window.capacity <= 0:
        return []
    return [
        VectorSample({QUEUE_LABEL: name}, _steps(question, window, window.usage.get(queue.name, 0)))
        for name, queue in sorted(_named(policy).items())
    ]


def _named(policy: Policy) -> Mapping[str, QueuePolicy]:
    """The policy's queues by their names in KAI."""
    refs = [(ref, queue) for queue in policy.queues for ref in queue.refs if ref.startswith(REF_PREFIX)]
    return {ref.removeprefix(REF_PREFIX): queue for ref, queue in refs}


def _steps(question: KaiUsageQuestion, window: UsageWindow, quantity: int) -> float:
    """A quantity of the window in GPUs times steps, decayed to the reference of the query. Raises UnknownQuery for a
    reference that is too far away."""
    value = quantity / (question.resolution_s * MS_PER_SECOND * US_PER_MS)
    if question.half_life_s is None or question.reference_s is None:
        return value
    try:
        reference_ms = round(question.reference_s * MS_PER_SECOND)
        return value * age_weight(window.end_ms, reference_ms, question.half_life_s)
    except (OverflowError, ValueError) as error:
        raise UnknownQuery(
            f"the decay refers to {question.reference_s:g} s since 1970: expected the present"
        ) from error


_MAX_BODY_BYTES = 4 * MAX_QUERY_CHARACTERS
_BODY_S = 5.0
"""Time within which a form must arrive."""
_TURNS = TurnLimits(running=4, running_by_caller=4, waiting=64, waiting_by_caller=64, patience_s=30)
"""A query that has waited for half a minute is refused, and KAI keeps its usage."""
_REMEMBERED = 64
_LIMITS = Limits()
OF_SHARDS = "/shards"
"""Path prefix for one shard: `/shards/NAME`, `/shards` for nodes without the label."""
OF_CLUSTERS = "/clusters"
"""Path prefix, before that of a shard, for one of several clusters in the ledger: `/clusters/NAME`."""
_GRAIN_MS = 15 * MS_PER_SECOND
"""Queries of one fetch, a few milliseconds apart, get the same window."""
_MS_PER_YEAR = 366 * 86_400 * MS_PER_SECOND


class QueryRefused(Exception):
    """An error answer. status: HTTP status; kind: the `errorType`, as in Prometheus; reason: the `error`."""

    def __init__(self, status: int, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.kind = kind


class KaiMetrics:
    """Metrics about the answers to KAI. One per registry."""

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
            "Age of the usage in the last answer to KAI: from the end of the metered time to the requested instant.",
            registry=registry,
        )
        for result in ("usage", "stale", "plain", "refused"):
            self.answers.labels(result)


@dataclass(frozen=True, slots=True)
class _CachedWindow:
    window: UsageWindow
    policy: Policy
    state: State
    age_s: float


class KaiUsageSource:
    """Answers KAI's queries. Thread-safe."""

    def __init__(
        self,
        ledger: ReadableLedger,
        clock: Clock,
        settings: KaiUsage,
        metrics: KaiMetrics,
        book: Callable[[], PriceBook | None] = lambda: None,
        limits: Limits = _LIMITS,
    ) -> None:
        """book: returns the price book in force, for measure cost."""
        self._limits = limits
        self._ledger = ledger
        self._book = book
        self._clock = clock
        self._settings = settings
        self._metrics = metrics
        self._lock = threading.Lock()
        self._known: LRUCache[tuple[str | None, str | None, int, int | None, int], _CachedWindow] = LRUCache(
            _REMEMBERED
        )

    def answer(
        self, query: str, time: str | None, shard: str | None = None, cluster: str | None = None
    ) -> Mapping[str, object]:
        """The body of a successful answer.

        time: the instant of the query in seconds since 1970; None: now.
        shard: the scheduling shard, "" for nodes without one; None: all nodes.
        cluster: None: all clusters of the ledger.

        Raises QueryRefused."""
        try:
            body = self._answer(query, time, shard, cluster)
        except QueryRefused as refused:
            self._metrics.answers.labels("stale" if refused.kind == "stale" else "refused").inc()
            raise
        return body

    def _answer(self, query: str, time: str | None, shard: str | None, cluster: str | None) -> Mapping[str, object]:
        try:
            question = parse(query)
        except UnknownQuery as error:
            raise QueryRefused(400, "bad_data", str(error)) from error
        at_ms = self._instant(time)
        status = self._ledger.status()
        if cluster is not None and cluster not in status.clusters:
            raise QueryRefused(
                404,
                "not_found",
                f"the ledger has no cluster {cluster[:200]!r}: check the name after {OF_CLUSTERS}/ in the URL",
            )
        nodes = (node for node in status.nodes if cluster in (None, node.cluster))
        if shard is not None and all(node.shard != shard for node in nodes):
            labels = ", ".join(shard_labels())
            raise QueryRefused(404, "not_found", f"no node belongs to shard {shard[:200]!r} (label {labels})")
        cached = self._read(question, at_ms, shard, cluster)
        self._metrics.age.set(cached.age_s)
        if cached.state == "stale":
            raise QueryRefused(
                503,
                "stale",
                f"usage is {cached.age_s:.0f} s old, more than {self._settings.stale_after} s: keep the usage you have",
            )
        try:
            samples = rows(question, cached.window, cached.policy, cached.state)
        except UnknownQuery as error:
            raise QueryRefused(400, "bad_data", str(error)) from error
        self._metrics.answers.labels(cached.state).inc()
        vector = [{"metric": dict(row.labels), "value": [at_ms / MS_PER_SECOND, repr(row.value)]} for row in samples]
        return {"status": "success", "data": {"resultType": "vector", "result": vector}}

    def _instant(self, time: str | None) -> int:
        now = self._clock.wall_ms()
        if time is None:
            return now
        try:
            at_ms = round(float(time) * MS_PER_SECOND)
        except (ValueError, OverflowError) as error:
            raise QueryRefused(400, "bad_data", f"time {time[:40]!r}: expected seconds since 1970") from error
        if not 0 < at_ms <= now + _MS_PER_YEAR:
            raise QueryRefused(400, "bad_data", f"time {time[:40]!r} is before 1970 or more than a year ahead")
        return at_ms

    def _read(self, question: KaiUsageQuestion, at_ms: int, shard: str | None, cluster: str | None) -> _CachedWindow:
        key = (shard, cluster, question.window_s, question.half_life_s, at_ms // _GRAIN_MS)
        with self._lock:  # one fetch sends six queries: the first reads, the others wait for it
            cached = self._known.get(key)
            if cached is None:
                cached = self._known[key] = self._fresh(question, at_ms, shard, cluster)
            return cached

    def _fresh(self, question: KaiUsageQuestion, at_ms: int, shard: str | None, cluster: str | None) -> _CachedWindow:
        settings = self._settings
        spec = WindowSpec(kind="sliding", size=question.window_s, half_life=question.half_life_s)
        try:
            status = self._ledger.status()
            version = policy_at(status, at_ms)
            if version is None:
                raise QueryRefused(
                    503,
                    "unavailable",
                    "no policy yet: the queues are unknown until the controller or the operator sends one",
                )
            watermark = status.watermark(at_ms, settings.min_coverage, shard, cluster)
            state = state_at(at_ms, watermark, settings.stale_after, settings.plain_after)
            # A window up to the present would end, and so begin, in the middle of rows.
            end_ms = watermark if state == "usage" and watermark is not None else at_ms
            try:
                span = bounded(end_ms - question.window_s * MS_PER_SECOND, end_ms, self._limits)
            except ValueError as error:
                raise QueryRefused(422, "bad_data", f"the window: {error}") from error
            clusters, most = () if cluster is None else (cluster,), self._limits.question_gpu_hours
            if reason := query_parameters.refusal(self._ledger, most, span, clusters=clusters):
                raise QueryRefused(422, "bad_data", f"the window has {reason}")
            asked = spec, end_ms, settings.measure, settings.min_coverage
            book = self._book()
            window = status.window(*asked, book=book, shard=shard, cluster=cluster)
            if window is None:
                with self._ledger.moment() as moment:
                    window = moment.window(*asked, book=book, shard=shard, cluster=cluster)
        except AccountantError as error:
            raise QueryRefused(503, "unavailable", str(error)) from error
        age_s = (at_ms - watermark) / MS_PER_SECOND if watermark is not None else float("inf")
        return _CachedWindow(window, version.policy, state, age_s)


def create_app(source: KaiUsageSource) -> FastAPI:
    """The listener's application. It needs no credentials, only reads, and accepts only small bodies. It answers four
    queries at a time, and the work on a query ends when its client goes."""
    turns = Turns("queries", _TURNS)

    async def query(request: Request, nameless: str | None) -> Response:
        try:
            form = parse_qs(request.url.query, max_num_fields=8)
            if request.method == "POST":
                form |= parse_qs((await _body(request)).decode("ascii"), max_num_fields=8)
            query_text = form.get("query", [""])[-1]
            time = form.get("time", [None])[-1]
            cluster = request.path_params.get("cluster")
            shard = request.path_params.get("shard", nameless)
            return JSONResponse(await turns.run(request, source.answer, query_text, time, shard, cluster))
        except QueryRefused as refused:
            return _refusal(refused)
        except Busy as busy:
            return _refusal(QueryRefused(503, "unavailable", str(busy)))
        except (CalledOff, ClientDisconnect):
            return GONE
        except (UnicodeDecodeError, ValueError) as error:
            return _refusal(QueryRefused(400, "bad_data", f"the form cannot be read: {error}"))

    async def matrix(_: Request) -> Response:
        text = (
            "query_range is not supported: KAI sends it for windows of type tumbling or cron. Set"
            " usageParams.windowType: sliding"
        )
        return _refusal(QueryRefused(400, "bad_data", text))

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
    try:
        return await read_body(request, _MAX_BODY_BYTES, _BODY_S)
    except HTTPException as error:
        raise QueryRefused(error.status_code, "bad_data", str(error.detail)) from error


def _refusal(refused: QueryRefused) -> Response:
    body = {"status": "error", "errorType": refused.kind, "error": str(refused)}
    return JSONResponse(body, status_code=refused.status)
