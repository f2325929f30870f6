"""Bounds the work that requests may do at one time: all together, and each caller.

Work that takes a thread for long waits here for its turn, without a thread. A pool of turns is for one kind of work, so
that documents do not stop pages, and neither stops probes or ingest, which need no turn. Within a pool the next turn
goes to the request that has waited longest, among callers that have fewer turns than one caller may have. Too many
waiting requests, and requests that waited too long, are refused.

If the client closes its connection, or the server stops and its patience ends, the request leaves the queue, or its
work is called off (`gputally.base.called_off`)."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, ParamSpec, TypeVar

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response

from gputally.base.called_off import CalledOff, Work, make_current
from gputally.server.https_server import STOPPING

P = ParamSpec("P")
T = TypeVar("T")
_AGAIN_S: Final = 0.2
GONE: Final = Response(status_code=499)
"""The answer to a caller who has gone, which nobody gets."""


class Busy(Exception):
    """The request gets no turn. The message is the reason.

    seconds: after which the client may try again.
    own: whether the caller itself has too many requests, and not all callers together."""

    def __init__(self, reason: str, seconds: float, *, own: bool) -> None:
        super().__init__(reason)
        self.seconds = seconds
        self.own = own


@dataclass(frozen=True, slots=True)
class TurnLimits:
    """Limits of one pool.

    running, running_by_caller: turns at one time.
    waiting, waiting_by_caller: requests that wait for one.
    patience_s: how long a request waits."""

    running: int
    running_by_caller: int
    waiting: int = 256
    waiting_by_caller: int = 64
    patience_s: float = 60.0


@dataclass(eq=False, slots=True)
class _Waiter:
    caller: str
    loop: asyncio.AbstractEventLoop
    turn: asyncio.Future[None] = field(init=False)

    def __post_init__(self) -> None:
        self.turn = self.loop.create_future()


class Turns:
    """A pool of turns. Thread-safe, because a process may have several event loops. what: the kind of work, for
    messages."""

    def __init__(self, what: str, limits: TurnLimits) -> None:
        self._what = what
        self._limits = limits
        self._lock = threading.Lock()
        self._running: Counter[str] = Counter()
        self._queue: list[_Waiter] = []

    @property
    def running(self) -> int:
        """Return the number of turns at present."""
        return self._running.total()

    @property
    def waiting(self) -> int:
        """Return the number of waiting requests."""
        return len(self._queue)

    @asynccontextmanager
    async def turn(self, request: Request, caller: str, *, may_stop: bool = True) -> AsyncIterator[None]:
        """Wait for a turn and hold it while the block runs. Raises Busy, also for what a server that stops has called
        off, and CalledOff if the client goes before the turn comes.

        may_stop: the block has a current `Work`, which is called off when the client goes or the server stops."""
        work, gone = Work(), asyncio.get_running_loop().create_future()
        stopping: asyncio.Event | None = request.scope.get(STOPPING)
        watch = asyncio.ensure_future(_call_off_when_gone(request, stopping, work, gone))
        try:
            await self._enter(caller, gone)
            try:
                make_current(work if may_stop else None)
                yield
            except asyncio.CancelledError:  # the server stops
                work.call_off()
                raise
            finally:
                make_current(None)
                self._leave(caller)
        except CalledOff as error:
            if stopping is None or not stopping.is_set():
                raise
            raise Busy("this server stops: try again", 1, own=False) from error
        finally:
            watch.cancel()

    async def run(self, request: Request, call: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
        """Run the call in a thread when the turn comes, for a caller that is known by its address alone. Raises what
        `turn` raises."""
        async with self.turn(request, request.client.host if request.client else ""):
            return await to_thread.run_sync(partial(call, *args, **more), abandon_on_cancel=True)

    async def _enter(self, caller: str, gone: asyncio.Future[None]) -> None:
        waiter = _Waiter(caller, asyncio.get_running_loop())
        with self._lock:
            if self._free(caller) and not any(self._free(one.caller) for one in self._queue):
                self._running[caller] += 1
                return
            own = sum(one.caller == caller for one in self._queue)
            if own >= self._limits.waiting_by_caller:
                raise Busy(f"{own} {self._what} of this caller wait already: wait for their answers", 1, own=True)
            if len(self._queue) >= self._limits.waiting:
                raise Busy(f"{len(self._queue)} {self._what} wait already: try again later", 5, own=False)
            self._queue.append(waiter)
        done: set[asyncio.Future[None]] = set()
        try:
            done, _ = await asyncio.wait(
                [waiter.turn, gone], timeout=self._limits.patience_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            if not (waiter.turn in done and not gone.done()):
                self._withdraw(waiter)
        if gone.done():
            raise CalledOff
        if waiter.turn not in done:
            raise Busy(
                f"{self._what} of other requests take all turns for {self._limits.patience_s:g} s: try again later",
                5,
                own=False,
            )

    def _free(self, caller: str) -> bool:
        """Return whether the caller may have one more turn. The caller of the method holds the lock."""
        return self._running.total() < self._limits.running and self._running[caller] < self._limits.running_by_caller

    def _withdraw(self, waiter: _Waiter) -> None:
        """Take a waiter out of the queue, or give back the turn that it got in the meantime."""
        with self._lock:
            waits = waiter in self._queue
            if waits:
                self._queue.remove(waiter)
        if not waits:
            self._leave(waiter.caller)

    def _leave(self, caller: str) -> None:
        with self._lock:
            self._running[caller] -= 1
            if not self._running[caller]:
                del self._running[caller]
            while (following := next((one for one in self._queue if self._free(one.caller)), None)) is not None:
                self._queue.remove(following)
                self._running[following.caller] += 1
                with suppress(RuntimeError):  # the loop of a stopping server
                    following.loop.call_soon_threadsafe(_give, following.turn)


def _give(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)


async def _call_off_when_gone(
    request: Request, stopping: asyncio.Event | None, work: Work, gone: asyncio.Future[None]
) -> None:
    """Call off the work when the client closes its connection or the server stops, until it has ended: an engine
    ignores an interruption that comes just before its query begins."""
    ends = [asyncio.ensure_future(_disconnected(request))]
    if stopping is not None:
        ends.append(asyncio.ensure_future(_set(stopping)))
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        gone.set_result(None)
        while True:
            work.call_off()
            await asyncio.sleep(_AGAIN_S)
    finally:
        for end in ends:
            end.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _set(event: asyncio.Event) -> None:
    await event.wait()
