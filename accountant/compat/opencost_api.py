"""Serves OpenCost's HTTP API from the ledger.

GET /allocation and /allocation/compute, their summaries, the nodes' GPUs as /assets, all with and without /model
before them; the other addresses that those clients open get an empty answer of the right shape. Nothing can be written.
Every client that reaches the port reads every team's cost: the port is one of its own, for a NetworkPolicy, and answers
no other site's scripts.

GPU time without a price has cost 0 here, because OpenCost's clients cast every column to a number; the `warning`
of the answer then names the models and hours, as it does for unmetered time.

A few questions to the ledger make a whole answer, however many steps it has. What cannot be told by a number is told
by a warning: time without a price, and unmetered time. Nothing after the present is asked for.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any, Literal, Protocol
from urllib.parse import urlencode

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response

from accountant.api import question_cost
from accountant.billing.costs import Charge, charges
from accountant.billing.queue_waits import KnownPod
from accountant.compat.opencost_allocation import (
    DIMENSIONS,
    SORTED_BY,
    UNALLOCATED,
    Allocation,
    NodeTotal,
    PodName,
    PodSeen,
    accumulated,
    aggregated,
    allocations,
    filtered_by,
    node_assets,
    sets,
    share_idle,
    summary,
    table,
)
from accountant.compat.opencost_query import (
    ASSET,
    MAX_STEPS,
    BadQuestion,
    Question,
    Span,
    asset_filter,
    parameters,
    parse_query,
)
from accountant.core.settings import Limits
from accountant.ledger.protocols import Ledger
from accountant.prices.price_book import PriceBook
from gputally.base.clock import Clock
from gputally.base.errors import AccountantError
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR, MS_PER_SECOND, US_PER_HOUR

MAX_ALLOCATIONS = 200_000
"""Of one answer, over all of its sets."""
_STEPS_AT_ONCE = 31
_SHARED = ("nvidia.com/gpu.shared", "nvidia.com/mig-")
"""Beginnings of resources that are parts of a GPU."""

_FIELDS = {"controllerName": "controller"}
"""Names of fields that are aggregated by under another."""

Found = list[tuple[Span, dict[str, Allocation]]]


class PodLedger(Ledger, Protocol):
    """A ledger that also knows its pods (accountant.storage.DuckLedger)."""

    def pods(self, start_ms: int, end_ms: int, *, placed: bool) -> list[KnownPod]:
        """Those that existed in the span; placed: also those of which only their placing was seen."""
        ...


class AllocationSource:
    """Answers questions about allocations. Thread-safe. cluster: this one's name, where no agent has told one yet."""

    def __init__(
        self, ledger: PodLedger, clock: Clock, book: Callable[[], PriceBook | None], cluster: str, limits: Limits
    ) -> None:
        self._cluster = cluster
        self._ledger = ledger
        self._clock = clock
        self._book = book
        self._longest_ms = limits.span_days * MS_PER_DAY
        self._most_gpu_hours = limits.question_gpu_hours

    def answer(self, query: str, *, summed: bool) -> Mapping[str, object] | str:
        """The body of a successful answer; text is CSV. Raises BadQuestion and
        accountant.core.errors.AccountantError."""
        question, found, warnings = self._found(query)
        if question.format == "csv":
            return table(found)
        whole = (question.start_ms, question.end_ms)
        return _success(summary(found, question.step_ms, whole) if summed else sets(found), warnings)

    def nodes(self, query: str) -> Mapping[str, object]:
        """Each node's GPUs as an asset: held time on it, and time without a holder.

        One map by name, as OpenCost answers; a list of one where `filterTypes` is given, as Kubecost does and as
        `kubectl cost node` reads it. Raises as `answer` does."""
        given = parameters(query)
        now = self._clock.wall_ms()
        asked = parse_query(urlencode({"window": given.get("window", "")}), now, self._longest_ms)
        keeps = asset_filter(given)
        start, end = asked.start_ms, min(asked.end_ms, now)
        self._check_cost(start, end, 2)
        totals: dict[tuple[str, str], NodeTotal] = {}
        unpriced: dict[str, int] = {}
        for charge in charges(self._ledger, self._book(), start, end, ("cluster", "node")) if start < end else ():
            cluster, node = charge.key
            if not charge.billed or not keeps({"cluster": cluster, "name": node, **ASSET}):
                continue
            before = totals.get((cluster, node), NodeTotal())
            price = Fraction(charge.row.price) if charge.row is not None else Fraction(0)
            totals[cluster, node] = NodeTotal(before.gpu_us + charge.gpu_us, before.cost + price * charge.gpu_us)
            if charge.unpriced:
                unpriced[charge.place.gpu_model] = unpriced.get(charge.place.gpu_model, 0) + charge.gpu_us
        known = {(facts.cluster, facts.name): facts for facts in self._ledger.nodes()}
        data: object = node_assets(totals, known, (start, end))
        return _success([data] if given.get("filterTypes", "") else data, _unpriced(unpriced))

    def values(self, query: str) -> Mapping[str, object]:
        """The values that allocations of the window have of `field` and that contain `search`, for a list to choose
        from. Raises as `answer` does."""
        given = parameters(query)
        field = _FIELDS.get(given.get("field", ""), given.get("field", ""))
        asked = urlencode(
            {name: given[name] for name in ("window", "filter") if given.get(name)}
            | {"aggregate": field or "namespace", "accumulate": "true"}
        )
        _, found, _ = self._found(asked)
        search = given.get("search", "").lower()
        one_kind = [name.partition(":")[2] or name if field == "controller" else name for name in found[0][1]]
        listed = sorted({name for name in one_kind if name != UNALLOCATED and search in name.lower()})
        limit = given.get("limit", "")
        return _success(listed[: int(limit) if limit.isascii() and limit.isdigit() else None], [])

    def information(self) -> Mapping[str, object]:
        """What /clusterInfo says: the clusters that allocations name, the one this accountant runs in first."""
        known = sorted(self._ledger.clusters(), key=lambda name: (name != self._cluster, name)) or [self._cluster]
        return _success(
            {"id": known[0], "name": ", ".join(known), "profile": "gputally", "provider": "", "version": ""}, []
        )

    def configuration(self) -> Mapping[str, object]:
        """What /getConfigs says: the currency of every cost."""
        book = self._book()
        return _success({"currencyCode": book.currency if book is not None else "", "clusterName": self._cluster}, [])

    def _check_cost(self, start_ms: int, end_ms: int, width: int) -> None:
        """Raises BadQuestion, before anything is read."""
        if reason := question_cost.refusal(self._ledger, self._most_gpu_hours, start_ms, end_ms, width):
            raise BadQuestion("window", reason)

    def _found(self, query: str) -> tuple[Question, Found, list[str]]:
        now = self._clock.wall_ms()
        question = parse_query(query, now, self._longest_ms)
        return question, *self._read(question, now)

    def _read(self, question: Question, now_ms: int) -> tuple[Found, list[str]]:
        self._check_cost(question.start_ms, min(question.end_ms, now_ms), len(question.aggregate))
        book = self._book()
        seen = _seen(self._ledger.pods(question.start_ms, min(question.end_ms, now_ms), placed=True))
        found: Found = []
        unmetered_us = count = 0
        steps_told = self._charges([step for spans in question.sets for step in spans], book, now_ms)
        for spans in question.sets:
            steps = []
            for start, end in spans:
                told = next(steps_told)
                unmetered_us += sum(charge.gpu_us for charge in told if charge.account == "unmetered")
                steps.append(_step(told, seen, start, min(end, now_ms), question))
            found.append(((spans[0][0], spans[-1][1]), accumulated(steps) if len(steps) > 1 else steps[0]))
            count += len(found[-1][1])
            if count > MAX_ALLOCATIONS:
                raise BadQuestion("window", f"more than {MAX_ALLOCATIONS} allocations: aggregate, or ask for less time")
        shown = [(span, _chosen(named, question)) for span, named in found]
        left = count - sum(len(named) for _, named in shown)
        return shown, _warnings(found, unmetered_us, question) + ([f"{left} allocations are left off"] if left else [])

    def _charges(self, steps: Sequence[Span], book: PriceBook | None, now_ms: int) -> Iterator[list[Charge]]:
        """Of each step, none after now. The ledger is asked for many steps at once where whole hours part them."""
        grain = _grain(steps)
        many = _STEPS_AT_ONCE if grain else 1
        for chunk in (steps[at : at + many] for at in range(0, len(steps), many)):
            start, end = chunk[0][0], min(chunk[-1][1], now_ms)
            by = DIMENSIONS if grain is None else (*DIMENSIONS, grain)
            told = charges(self._ledger, book, start, end, by) if start < end else []
            if grain is None:
                yield told
                continue
            of_step: list[list[Charge]] = [[] for _ in chunk]
            starts = [begin for begin, _ in chunk]
            for charge in told:
                at = bisect_right(starts, max(start, _instant(charge.key[-1]))) - 1
                of_step[at].append(replace(charge, key=charge.key[:-1]))
            yield from of_step


def _grain(steps: Sequence[Span]) -> Literal["hour", "day"] | None:
    """By what one answer can be taken apart into the steps."""
    edges = [end for _, end in steps[:-1]]
    if not edges:
        return None
    if all(edge % MS_PER_DAY == 0 for edge in edges):
        return "day"
    return "hour" if all(edge % MS_PER_HOUR == 0 for edge in edges) else None


@lru_cache(maxsize=MAX_STEPS)
def _instant(text: str) -> int:
    """Of a day or an hour as the ledger names it, in UTC."""
    return round(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * MS_PER_SECOND)


def _step(
    told: Sequence[Charge], seen: Mapping[PodName, PodSeen], start_ms: int, end_ms: int, question: Question
) -> dict[str, Allocation]:
    found = allocations(told, seen, start_ms, end_ms)
    if question.share_idle:
        found = share_idle(found, by_node=question.idle_by_node)
    wanted = question.include_idle or question.share_idle
    kept = [one for one in found if (wanted or not one.idle) and question.keeps(filtered_by(one))]
    apart = ("node" if question.idle_by_node else "cluster") if question.split_idle else ""
    return aggregated(kept, question.aggregate, split_idle=apart)


def _chosen(named: dict[str, Allocation], question: Question) -> dict[str, Allocation]:
    """Those of one set that are shown, in their order."""
    names = list(named)
    if question.sort:
        figure = SORTED_BY[question.sort]
        names.sort(key=lambda name: figure(named[name]), reverse=question.descending)
    elif question.descending:
        names.reverse()
    until = None if question.limit is None else question.offset + question.limit
    return {name: named[name] for name in names[question.offset : until]}


def _success(data: object, warnings: Sequence[str]) -> Mapping[str, object]:
    return {"code": 200, "status": "success", "data": data} | ({"warning": "; ".join(warnings)} if warnings else {})


def _seen(pods: Sequence[KnownPod]) -> Mapping[PodName, PodSeen]:
    """By name; of several pods of one name the time from the first to the last, and the newest one's labels."""
    found: dict[PodName, PodSeen] = {}
    for pod in sorted(
        pods, key=lambda known: (known.facts.created_ms or known.facts.scheduled_ms or 0, known.facts.uid)
    ):
        facts, name = pod.facts, (pod.cluster, pod.facts.namespace, pod.facts.name)
        bound = facts.scheduled_ms if facts.scheduled_ms is not None else facts.created_ms
        end = facts.ended_ms
        shares = any(resource.startswith(_SHARED) for resource in facts.requests)
        if (before := found.get(name)) is not None:
            bound = None if bound is None or before.start_ms is None else min(bound, before.start_ms)
            end = None if end is None or before.end_ms is None else max(end, before.end_ms)
            shares = shares or before.shares
        found[name] = PodSeen(bound, end, facts.labels, shares)
    return found


def _warnings(found: Found, unmetered_us: int, question: Question) -> list[str]:
    unpriced: dict[str, int] = {}
    for _, named in found:
        for one in named.values():
            for model, gpu_us in one.unpriced.items():
                unpriced[model] = unpriced.get(model, 0) + gpu_us
    warnings = _unpriced(unpriced)
    if unmetered_us:
        warnings.append(f"{_hours(unmetered_us)} of the window are not metered, or not delivered yet, and in no figure")
    if "service" in question.aggregate:
        warnings.append("services are not known to the ledger")
    if any(name.startswith("annotation:") for name in question.aggregate):
        warnings.append("annotations are not kept in the ledger")
    warnings += [f"{name} is asked for, but not kept in the ledger: no allocation has one" for name in question.unkept]
    warnings += [f"{name} is not applied" for name in question.ignored]
    return warnings


def _unpriced(by_model: Mapping[str, int]) -> list[str]:
    if not by_model:
        return []
    listed = ", ".join(f"{model} ({_hours(gpu_us)})" for model, gpu_us in sorted(by_model.items()))
    return [f"cost 0 means unpriced for {listed}: the price book has no price"]


def _hours(gpu_us: int) -> str:
    return f"{gpu_us / US_PER_HOUR:,.2f} GPU-hours"


_AT_ONCE = 2
"""Questions that are read at one time; further ones wait."""
_PLAIN = frozenset({"window", "aggregate"})
"""Parameters whose faults OpenCost answers as plain text."""
_EMPTY: Mapping[str, object] = {
    "/assets/autocomplete": [],
    "/cloudCost": [],
    "/cloudCost/autocomplete": [],
    "/cloudCost/status": [],
    "/cloudCost/view/graph": [],
    "/cloudCost/view/table": [],
    "/cloudCost/view/totals": [],
    "/customCost/status": [],
    "/customCost/total": [],
    "/customCost/timeseries": [],
}


def create_app(source: AllocationSource) -> FastAPI:
    """The listener's application: no credentials, nothing to write, a few questions at a time."""
    turns = asyncio.Semaphore(_AT_ONCE)

    def reading(read: Callable[[str], Mapping[str, object] | str]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            try:
                async with turns:
                    return await asyncio.to_thread(_encoded, read, request.url.query)
            except BadQuestion as bad:
                return _bad(bad)
            except AccountantError as error:
                return _json({"code": 503, "status": "", "data": None, "message": f"Error: {error}"}, 503)

        return answer

    def always(data: object) -> Callable[[Request], Any]:
        body = {"code": 200, "status": "success", "data": data}

        async def same(_: Request) -> Response:
            return _json(body)

        return same

    async def well(_: Request) -> Response:
        return PlainTextResponse("")

    app = FastAPI(title="gputally's answers in OpenCost's form", openapi_url=None)
    questions: Mapping[str, Callable[[str], Mapping[str, object] | str]] = {
        "/allocation": partial(source.answer, summed=False),
        "/allocation/compute": partial(source.answer, summed=False),
        "/allocation/summary": partial(source.answer, summed=True),
        "/allocation/compute/summary": partial(source.answer, summed=True),
        "/allocation/autocomplete": source.values,
        "/assets": source.nodes,
        "/clusterInfo": lambda _: source.information(),
        "/getConfigs": lambda _: source.configuration(),
    }
    for prefix in ("", "/model"):
        for path, read in questions.items():
            app.add_route(prefix + path, reading(read))
        for path, data in _EMPTY.items():
            app.add_route(prefix + path, always(data))
        app.add_route(f"{prefix}/healthz", well)
    return app


def _encoded(read: Callable[[str], Mapping[str, object] | str], query: str) -> Response:
    answer = read(query)
    return Response(answer, media_type="text/csv") if isinstance(answer, str) else _json(answer)


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def _bad(bad: BadQuestion) -> Response:
    if bad.parameter in _PLAIN:
        return PlainTextResponse(f"Invalid '{bad.parameter}' parameter: {bad}\n", 400)
    return _json({"code": 400, "status": "", "data": None, "message": f"Error: {bad.parameter}: {bad}"}, 400)
