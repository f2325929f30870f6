"""Request bodies, bounded before they are in memory: as sent, after decompression, in time, in sum.

A compressed body is inflated only up to the limit, so a small body that
would become a huge one costs no more than the limit.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

from fastapi import Request
from pydantic import TypeAdapter, ValidationError

from accountant.api.problems import Refusal, reason, retry_later
from accountant.settings import Limits

INLINE_BYTES = 128 * 1024
"""A body up to this size is handled on the event loop; a larger one in a thread."""
_GZIP = 16 + zlib.MAX_WBITS
_HEAVY_AT_ONCE = 2
_SHOWN_FAULTS = 20
M = TypeVar("M")


class Intake:
    """Bounds the bodies of all requests together. One per app, used from its event loop only."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._held = 0
        self._heavy = asyncio.Semaphore(_HEAVY_AT_ONCE)

    @contextmanager
    def _hold(self, size: int) -> Iterator[None]:
        if self._held + size > self._limits.inflight_bytes:
            raise retry_later("busy", "too many bodies are being received at this moment", 1)
        self._held += size
        try:
            yield
        finally:
            self._held -= size

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytes]:
        """The whole body, decompressed; counted against the bound of all until the block ends.

        Raises Refusal (too-large, slow-body, malformed-body, unsupported-encoding, busy)."""
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("identity", "gzip"):
            raise Refusal("unsupported-encoding", f"content encoding {encoding!r}: send gzip or none")
        declared = request.headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > self._limits.body_bytes:
            raise _too_large("the body", self._limits.body_bytes)
        with self._hold(self._limits.body_bytes if not declared.isdigit() or declared == "0" else int(declared)):
            raw = await self._receive(request)
            if encoding == "identity":
                if len(raw) > self._limits.decoded_bytes:
                    raise _too_large("the body", self._limits.decoded_bytes)
                yield raw
                return
            if len(raw) <= INLINE_BYTES:
                plain = inflate(raw, self._limits.decoded_bytes)
            else:
                async with self._heavy:
                    plain = await asyncio.to_thread(inflate, raw, self._limits.decoded_bytes)
            with self._hold(len(plain)):
                yield plain

    async def _receive(self, request: Request) -> bytes:
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._limits.read_seconds):
                more = True
                while more:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise Refusal("malformed-body", "the client went away before the end of the body")
                    chunks.append(message.get("body", b""))
                    more = message.get("more_body", False)
                    size += len(chunks[-1])
                    if size > self._limits.body_bytes:
                        raise _too_large("the body", self._limits.body_bytes)
        except TimeoutError as error:
            raise Refusal("slow-body", f"the body took longer than {self._limits.read_seconds:g} s") from error
        return b"".join(chunks)


async def read_model(intake: Intake, request: Request, model: TypeAdapter[M]) -> M:
    """The JSON body as a validated model. Raises Refusal, also for what breaks the schema."""
    async with intake.body(request) as raw:
        try:
            return await asyncio.to_thread(model.validate_json, raw)
        except ValidationError as error:
            found = error.errors(include_url=False, include_input=False)
            if found[0]["type"] == "json_invalid":
                raise Refusal("malformed-body", str(found[0]["msg"])) from error
            faults = [
                {"at": ".".join(str(part) for part in fault["loc"]), "reason": reason(fault)}
                for fault in found[:_SHOWN_FAULTS]
            ]
            detail = "; ".join(f"{fault['at']}: {fault['reason']}" for fault in faults)
            raise Refusal("invalid-body", detail, errors=faults) from error


def inflate(raw: bytes, limit: int) -> bytes:
    """The content of one gzip member of at most `limit` bytes. Raises Refusal (too-large, malformed-body)."""
    stream = zlib.decompressobj(_GZIP)
    try:
        plain = stream.decompress(raw, limit + 1)
    except zlib.error as error:
        raise Refusal("malformed-body", f"the body is not gzip: {error}") from error
    if len(plain) > limit:
        raise _too_large("the decompressed body", limit)
    if not stream.eof:
        raise Refusal("malformed-body", "the gzip body is cut off")
    if stream.unused_data:
        raise Refusal("malformed-body", "something follows the end of the gzip body")
    return plain


def _too_large(what: str, limit: int) -> Refusal:
    return Refusal("too-large", f"{what} is larger than {limit} bytes", limit_bytes=limit)
