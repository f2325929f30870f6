"""OpenCost's HTTP API for allocations, answered from the ledger, so that its clients can point here.

GET /allocation and /allocation/compute, their summaries, the nodes' GPUs as /assets, all with and without /model
before them; the other addresses that those clients open get an empty answer of the right shape. Nothing can be written.
Every client that reaches the port reads every team's cost: the port is one of its own, for a NetworkPolicy, and answers
no other site's scripts.

GPU time without a price has cost 0 here, because OpenCost's clients cast every column to a number; the `warning`
of the answer then names the models and hours, as it does for time that nobody metered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response

from accountant.compat.opencost_query import BadQuestion
from accountant.compat.opencost_source import AllocationSource
from accountant.errors import AccountantError

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
