"""Calls other servers (an issuer, a provider, the API server) without delaying requests that need no call.

The calls have threads of their own. While all of them wait for a server that hangs, further callers are refused after a
moment, and every other request is answered as usual."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

from anyio import CapacityLimiter, to_thread

from gputally.server.tokens_and_grants import AuthorityUnavailable

P = ParamSpec("P")
T = TypeVar("T")
TURN_SECONDS: Final = 1.0
"""How long a caller waits for its turn. A server that answers keeps nobody waiting as long."""


class OutgoingCalls:
    """Runs blocking calls to one server, or to one kind of server.

    server: its name in refusals.
    most: the largest number of calls at a time."""

    def __init__(self, server: str, most: int) -> None:
        self._server = server
        self._turns = asyncio.Semaphore(most)
        self._threads = CapacityLimiter(most)

    async def run(self, call: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
        """Run the call in a thread and return its result. Raises AuthorityUnavailable if no earlier call ends in
        time."""
        try:
            async with asyncio.timeout(TURN_SECONDS):
                await self._turns.acquire()
        except TimeoutError as error:
            raise AuthorityUnavailable(
                f"{self._server} has not answered the calls of others yet: try again in a minute"
            ) from error
        try:
            return await to_thread.run_sync(lambda: call(*args, **more), limiter=self._threads)
        finally:
            self._turns.release()
