"""Bodies that take room: many at once, slow ones, compressed ones. Those of other callers still pass."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from fastapi import Request

from accountant.api.middleware import BodyLimits
from accountant.api.problems import Refusal
from accountant.core.settings import Limits

KIB = 1024
LIMITS = Limits(body_bytes=64 * KIB, decoded_bytes=64 * KIB, inflight_bytes=512 * KIB)


def request(caller: str, *pieces: bytes, ends: bool = True, **headers: str) -> Request:
    """ends: False: after the pieces nothing comes any more."""
    left = list(pieces)

    async def receive() -> dict[str, Any]:
        if left:
            return {"type": "http.request", "body": left.pop(0), "more_body": bool(left) or not ends}
        await asyncio.Event().wait()
        raise AssertionError

    scope = {
        "type": "http", "method": "POST", "path": "/", "query_string": b"", "client": ("127.0.0.1", 1),
        "headers": [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()],
        "state": {"principal": caller},
    }  # fmt: skip
    return Request(scope, receive)


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 30))  # type: ignore[arg-type]


def test_bodies_that_are_only_announced_take_no_room():
    async def work() -> None:
        intake = BodyLimits(LIMITS)
        slow = [request("slow", b"x", ends=False, content_length=str(64 * KIB)) for _ in range(80)]
        waiting = [asyncio.create_task(intake.body(one).__aenter__()) for one in slow]
        await asyncio.sleep(0)
        async with intake.body(request("other", b"y" * 64 * KIB)) as body:
            assert len(body) == 64 * KIB
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    run(work)


def test_one_caller_has_a_share_and_leaves_the_rest_to_others():
    packed = gzip.compress(bytes(60 * KIB))

    async def work() -> None:
        intake = BodyLimits(LIMITS)
        async with AsyncExitStack() as held:
            for _ in range(2):
                await held.enter_async_context(intake.body(request("node-1", packed, content_encoding="gzip")))
            with pytest.raises(Refusal, match="of this caller") as refused:
                await held.enter_async_context(intake.body(request("node-1", packed, content_encoding="gzip")))
            assert refused.value.headers["Retry-After"] == "1"
            await held.enter_async_context(intake.body(request("node-2", packed, content_encoding="gzip")))
        async with intake.body(request("node-1", packed, content_encoding="gzip")) as body:
            assert len(body) == 60 * KIB

    run(work)


def test_a_body_that_comes_too_slowly_is_given_up_before_its_time_is_over():
    class Impatient(BodyLimits):
        GRACE_SECONDS = 0.05

    async def work() -> None:
        with pytest.raises(Refusal, match="slower than") as refused:
            async with Impatient(LIMITS).body(request("slow", b"x", ends=False)):
                pass
        assert refused.value.slug == "slow-body"

    run(work)


@pytest.mark.parametrize("text", ["9" * 5_000, "-1", "1_000", "²"])
def test_a_length_that_is_none_is_refused(text):
    async def work() -> None:
        with pytest.raises(Refusal, match="Content-Length"):
            async with BodyLimits(LIMITS).body(request("any", b"", content_length=text)):
                pass

    run(work)
