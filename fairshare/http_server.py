"""Serves health, metrics and the kube-scheduler extender over HTTP.

Each has a listener of its own (`gputally.server.https_server`), which limits connections, handshakes and headers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from fairshare.controller.kube_scheduler_extender import MOST_BYTES, BadRequest, Extender
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import Clock
from gputally.base.units import MS_PER_SECOND
from gputally.server import https_server
from gputally.server.https_server import Tls
from gputally.server.rate_and_connection_limits import ConnectionLimits
from gputally.server.request_handling import RequestLog, read_body

BODY_S = 1.0
"""Time within which a body must arrive."""
LIMITS = ConnectionLimits(connections=256, connections_by_address=64)
Probe = Callable[[], str | None]
"""A probe. None: healthy. Text: what is wrong."""


class Health:
    """Live while cycles run; ready after the first cycle, while every background task works."""

    def __init__(self, clock: Clock, interval_s: float, tasks: BackgroundTasks | None = None) -> None:
        self._clock = clock
        self._tasks = tasks or BackgroundTasks(clock)
        self._patience_ms = 3 * interval_s * MS_PER_SECOND + 60 * MS_PER_SECOND
        self._beat_ms = clock.monotonic_ms()
        self._beaten = False

    def beat(self) -> None:
        """Record that a cycle has ended."""
        self._beat_ms, self._beaten = self._clock.monotonic_ms(), True

    def live(self) -> str | None:
        silent_ms = self._clock.monotonic_ms() - self._beat_ms
        return f"no cycle has ended for {silent_ms / MS_PER_SECOND:.0f} s" if silent_ms > self._patience_ms else None

    def ready(self) -> str | None:
        faults = [f"{name} {fault.partition(':')[0]}" for name, fault in self._tasks.faults().items()]
        if faults:
            return f"{'; '.join(faults)}: the log says why"
        return None if self._beaten else "the first cycle has not ended yet"


@contextmanager
def serve(
    host: str,
    port: int,
    *,
    live: Probe,
    ready: Probe,
    metrics: Callable[[], bytes],
    tasks: BackgroundTasks | None = None,
) -> Iterator[str]:
    """Serves in a thread until the context ends; yields the base URL. port: 0 for any free one. Raises CannotStart."""

    def exposition(_: Request) -> Response:
        return Response(metrics(), media_type="text/plain; version=0.0.4")

    def probe(check: Probe) -> Callable[[Request], Response]:
        def answer(_: Request) -> Response:
            fault = check()
            return PlainTextResponse(f"{fault or 'ok'}\n", 503 if fault else 200)

        return answer

    app = Starlette(
        routes=[Route("/metrics", exposition), Route("/livez", probe(live)), Route("/readyz", probe(ready))]
    )
    logged = RequestLog(app, "fairshare.http")
    with https_server.serve(logged, host, port, limits=LIMITS, name="fairshare-http", tasks=tasks) as url:
        yield url


@contextmanager
def serve_extender(
    host: str,
    port: int,
    extender: Extender,
    *,
    told: Callable[[str, float, str], None] | None = None,
    tls: Tls | None = None,
    tasks: BackgroundTasks | None = None,
) -> Iterator[str]:
    """Serve `POST /scheduler/prioritize` and `/scheduler/preempt` until the context ends; yields the base URL.

    told: called with every answer, as (verb, seconds, ok | late | refused). Raises CannotStart."""
    verbs = {"prioritize": extender.prioritize, "preempt": extender.preempt}

    async def answer(request: Request) -> Response:
        """Answer on the event loop, because answers come from memory and have a deadline."""
        started = time.monotonic()
        verb = request.path_params["verb"]
        if verb not in verbs:
            raise HTTPException(404)
        content = await read_body(request, MOST_BYTES, BODY_S)
        try:
            found = verbs[verb](content)
        except BadRequest as error:
            result, response = "refused", _refused(400, str(error))
        else:
            result, response = "late" if found.late else "ok", JSONResponse(found.body)
        if told is not None:
            told(verb, time.monotonic() - started, result)
        return response

    async def refuse(_: Request, error: HTTPException) -> Response:
        return _refused(error.status_code, error.detail, error.headers)

    app = Starlette(
        routes=[Route("/scheduler/{verb}", answer, methods=["POST"])],
        exception_handlers={HTTPException: refuse},  # type: ignore[dict-item]  # a handler of its own exception
    )
    wrapped = RequestLog(app, "fairshare.http")
    with https_server.serve(wrapped, host, port, tls, LIMITS, "fairshare-extender", tasks=tasks, renew=True) as url:
        yield url


def _refused(status: int, reason: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse({"Error": reason}, status, headers)
