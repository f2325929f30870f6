"""Serves the probes, the metrics and the answers to schedulers that ask (`fairshare.targets.extender`) over HTTP.

The probes and the metrics share one listener, and schedulers have their own. Both limit connections, handshakes and
headers (`gputally.server.https_server`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from fairshare.targets.extender import MOST_BYTES, BadRequest, ExtenderAnswer
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import Clock
from gputally.base.units import MS_PER_SECOND
from gputally.server import https_server
from gputally.server.host_names import HostCheck
from gputally.server.https_server import Tls
from gputally.server.rate_and_connection_limits import ConnectionLimits
from gputally.server.request_handling import RequestLog, read_body

BODY_S = 1.0
"""The time within which the body of a request must arrive."""
LIMITS = ConnectionLimits(connections=256, connections_by_address=64)
Probe = Callable[[], str | None]
"""Returns None if healthy, otherwise the fault."""


class Probes:
    """Answers the probes.

    The controller is live if a cycle has ended within the last three intervals and a minute. It is ready after its
    first cycle while it can act: the tasks without which it cannot (`BackgroundTasks.serving`) work, and a replica
    leads, this one or another.

    leaderless: returns the reason if no replica is known to lead."""

    def __init__(
        self,
        clock: Clock,
        interval_s: float,
        tasks: BackgroundTasks | None = None,
        leaderless: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._clock = clock
        self._leaderless = leaderless
        self._tasks = tasks or BackgroundTasks(clock)
        self._patience_ms = 3 * interval_s * MS_PER_SECOND + 60 * MS_PER_SECOND
        self._last_cycle_ms = clock.monotonic_ms()
        self._had_cycle = False

    def beat(self) -> None:
        """Record that a cycle has ended."""
        self._last_cycle_ms, self._had_cycle = self._clock.monotonic_ms(), True

    def live(self) -> str | None:
        idle_ms = self._clock.monotonic_ms() - self._last_cycle_ms
        return f"no cycle has ended for {idle_ms / MS_PER_SECOND:.0f} s" if idle_ms > self._patience_ms else None

    def ready(self) -> str | None:
        needed = self._tasks.serving
        faults = [f"{name} {fault.partition(':')[0]}" for name, fault in self._tasks.faults().items() if name in needed]
        if faults:
            return f"{'; '.join(faults)}: see the log for the reason"
        if not self._had_cycle:
            return "the first cycle has not ended yet"
        return None if self._leaderless() is None else "no replica leads: see the log for the reason"


@contextmanager
def serve(
    host: str,
    port: int,
    *,
    live: Probe,
    ready: Probe,
    metrics: Callable[[], bytes],
    tasks: BackgroundTasks | None = None,
    hosts: Collection[str] = (),
    over: threading.Event | None = None,
) -> Iterator[str]:
    """Serve the probes and the metrics in a thread until the context ends, and yield the base URL. Raises CannotStart.

    port: 0 takes a free one.
    hosts: public host names of the listener (`gputally.base.host_names`).
    over: as in `https_server.serve`."""

    def exposition(_: Request) -> Response:
        return Response(metrics(), media_type="text/plain; version=0.0.4")

    def probe(check: Probe) -> Callable[[Request], Awaitable[Response]]:
        async def answer(_: Request) -> Response:  # on the event loop, because it must not wait for a thread
            fault = check()
            return PlainTextResponse(f"{fault or 'ok'}\n", 503 if fault else 200)

        return answer

    app = Starlette(
        routes=[Route("/metrics", exposition), Route("/livez", probe(live)), Route("/readyz", probe(ready))]
    )
    logged = RequestLog(HostCheck(app, hosts, "hosts"), "fairshare.http")
    with https_server.serve(logged, host, port, limits=LIMITS, name="fairshare-http", tasks=tasks, over=over) as url:
        yield url


@contextmanager
def serve_extender(
    host: str,
    port: int,
    routes: Mapping[str, Callable[[bytes], ExtenderAnswer]],
    *,
    answered: Callable[[str, float, str], None] | None = None,
    tls: Tls | None = None,
    tasks: BackgroundTasks | None = None,
    hosts: Collection[str] = (),
    over: threading.Event | None = None,
) -> Iterator[str]:
    """Serve what answers POST requests, by path, until the context ends, and yield the base URL. Raises CannotStart.

    answered: called after every response with the verb (the last part of the path), the seconds that it took, and `ok`,
        `late` or `refused`.
    hosts: public host names of the listener.
    over: as in `https_server.serve`."""

    def answering(path: str, decide: Callable[[bytes], ExtenderAnswer]) -> Route:
        async def answer(request: Request) -> Response:
            """Answer on the event loop without a thread, because answers come from memory and have a deadline."""
            started = time.monotonic()
            content = await read_body(request, MOST_BYTES, BODY_S)
            try:
                decision = decide(content)
            except BadRequest as error:
                result, response = "refused", _refused(400, str(error))
            else:
                result = "late" if decision.late else "ok"
                response = Response(msgspec.json.encode(decision.body), media_type="application/json")
            if answered is not None:
                answered(path.rpartition("/")[2], time.monotonic() - started, result)
            return response

        return Route(path, answer, methods=["POST"])

    async def refuse(_: Request, error: HTTPException) -> Response:
        return _refused(error.status_code, error.detail, error.headers)

    app = Starlette(
        routes=[answering(path, decide) for path, decide in routes.items()],
        exception_handlers={HTTPException: refuse},  # type: ignore[dict-item]  # a handler of its own exception
    )
    wrapped = RequestLog(HostCheck(app, hosts, "hosts"), "fairshare.http")
    with https_server.serve(
        wrapped, host, port, tls, LIMITS, "fairshare-extender", tasks=tasks, renew=True, over=over
    ) as url:
        yield url


def _refused(status: int, reason: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse({"Error": reason}, status, headers)
