"""Handles what all requests need: id, security headers, cross-site rules, one log line, and reading, decompressing and
validating bodies within limits.

`AccessMiddleware` is plain ASGI, so that it adds little to the ingest and never reads a body. The log line has method,
path, status, time, caller and problem, but no token and no query string.

A body counts against the limits as far as it has arrived, so a slow body does not take space from a fast one. A
compressed body is decompressed in pieces and only up to the limit, so a small body that expands enormously costs no
more than the limit."""

from __future__ import annotations

import asyncio
import re
import secrets
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from functools import cache
from typing import ClassVar, TypeVar

import structlog
from fastapi import Request
from fastapi.datastructures import Headers
from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from accountant.api.problems import Refusal, answer, retry_later, with_faults
from accountant.core.settings import Limits
from gputally.base.called_off import CalledOff
from gputally.base.clock import Clock
from gputally.base.untrusted_text import NO_CONTROLS, unprintable
from gputally.server import page_layout
from gputally.server.config_loading import NO_NUMBER, booleans_as_numbers, fault_text
from gputally.server.loopback import is_loopback, names_this_machine
from gputally.server.request_handling import ObservedSend, raw_headers

HEADERS = page_layout.headers()
_HEADERS = raw_headers(HEADERS)
_QUIET = frozenset({"/leading", "/livez", "/readyz", "/metrics", "/v1/usage"})
"""Requested every few seconds by machines: logged at debug level, unless there was an error."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class AccessMiddleware:
    """Gives each request an id, each answer the security headers and each request a log line. Refuses cross-site forms,
    and addresses with a NUL character.

    local_only: accept only loopback host names, because requests need no token (against DNS rebinding).
    answered: called with the HTTP status of every answer."""

    def __init__(
        self, app: ASGIApp, *, clock: Clock, local_only: bool, answered: Callable[[int], None] = lambda _: None
    ) -> None:
        self._app = app
        self._clock = clock
        self._local_only = local_only
        self._answered = answered
        self._log = structlog.get_logger("accountant.http")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = self._clock.monotonic_ms()
        headers = Headers(scope=scope)
        sent_id = headers.get("x-request-id", "")
        request_id = sent_id if _REQUEST_ID.fullmatch(sent_id) else secrets.token_hex(8)
        state = scope.setdefault("state", {})
        observed = ObservedSend(send, [*_HEADERS, (b"x-request-id", request_id.encode())])
        refusal = self._refusal(scope, headers)
        try:
            if refusal is None:
                await self._app(scope, receive, observed)
        except (CalledOff, ClientDisconnect):
            state["problem"] = "client-gone"
            observed.status = 499
        except Exception as error:  # noqa: BLE001  # the last stop: a defect is logged and answered
            self._log.error("request_failed", path=scope["path"][:200], request_id=request_id, exc_info=error)
            refusal = Refusal(
                "internal", f"a defect of this service: its log has the details under the request id {request_id}"
            )
        try:
            if refusal is not None and not observed.started:
                state["problem"] = refusal.slug
                await answer(refusal, scope["path"])(scope, receive, observed)
        finally:
            status = observed.status
            self._answered(status)
            level = "warning" if status >= 500 else "debug" if scope["path"] in _QUIET and status < 400 else "info"
            getattr(self._log, level)(
                "request",
                method=scope["method"],
                path=scope["path"][:200],
                status=status,
                milliseconds=self._clock.monotonic_ms() - started,
                principal=state.get("principal"),
                problem=state.get("problem"),
                request_id=request_id,
            )

    def _refusal(self, scope: Scope, headers: Headers) -> Refusal | None:
        if self._local_only and not _for_this_machine(scope, headers):
            return Refusal("wrong-host", "this service has no tokens, so it answers only under localhost or 127.0.0.1")
        if scope["method"] not in ("GET", "HEAD") and headers.get("sec-fetch-site", "none") not in (
            "none",
            "same-origin",
        ):
            return Refusal("cross-site", "a page of another site sent this request, which only pages of this site may")
        if "\0" in scope["path"] or b"%00" in scope["query_string"]:  # it would end the text of an engine's query
            return Refusal("invalid-parameter", "the address contains a NUL character (%00), which no name has")
        return None


def _for_this_machine(scope: Scope, headers: Headers) -> bool:
    """Whether the Host header is a loopback name; without a Host header the caller used the address."""
    host = headers.get("host")
    if host is None:
        server = scope.get("server")
        return server is not None and is_loopback(server[0])
    return names_this_machine(host)


INLINE_BYTES = 128 * 1024
"""Bodies up to this size are decompressed and batches decoded on the event loop, larger ones in a thread."""
_GZIP = 16 + zlib.MAX_WBITS
_HEAVY_AT_ONCE = 2
_MOST_DIGITS = 18
"""Maximum number of digits of Content-Length."""
_CALLERS_SHARE = 4
"""One caller may use this fraction (1/4) of the memory for all bodies."""
_PIECE_BYTES = 256 * 1024
"""Size of the pieces in which a body is decompressed."""
_SHOWN_FAULTS = 20
_ESCAPES = re.compile(rb"\\[ubfr]|[\x7f\xc2]")
"""Occurs in every body whose texts contain a control character other than line feed and tab."""
M = TypeVar("M")
Caller = tuple[str, str]
"""Name of the principal, and address."""


class _BodyBytes:
    """The memory of one body, which grows as the body arrives."""

    def __init__(self, intake: BodyLimits, caller: Caller) -> None:
        self._intake = intake
        self._caller = caller
        self._size = 0

    def grow(self, size: int) -> None:
        """Reserves `size` more bytes. Raises Refusal (busy)."""
        self._intake.take(self._caller, size)
        self._size += size

    def shrink(self, size: int) -> None:
        """Releases `size` bytes."""
        self._intake.give_back(self._caller, size)
        self._size -= size

    def end(self) -> None:
        """Releases all bytes of the body."""
        self.shrink(self._size)


class BodyLimits:
    """Limits the bodies of all requests together, and of each caller. One per app, used from its event loop only."""

    GRACE_SECONDS: ClassVar = 5.0
    """How long a body may arrive before its minimum rate applies."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._held: Counter[Caller] = Counter()
        self._all = 0
        self._share = max(limits.inflight_bytes // _CALLERS_SHARE, limits.body_bytes + limits.decoded_bytes)
        self.heavy = asyncio.Semaphore(_HEAVY_AT_ONCE)
        """Limits how many large bodies are decompressed and decoded at a time."""

    def take(self, caller: Caller, size: int) -> None:
        """Reserves bytes for a body of this caller. Raises Refusal (busy)."""
        if self._all + size > self._limits.inflight_bytes:
            raise retry_later(
                "busy", "this service is receiving too many bodies at present: send this one again later", 1
            )
        if self._held[caller] + size > self._share:
            raise retry_later("busy", "this caller is sending too many bodies at present: send this one again later", 1)
        self._held[caller] += size
        self._all += size

    def give_back(self, caller: Caller, size: int) -> None:
        self._all -= size
        self._held[caller] -= size
        if not self._held[caller]:
            del self._held[caller]

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytes]:
        """The whole body, decompressed; it counts against the limits until the context ends.

        Raises Refusal (too-large, slow-body, malformed-body, unsupported-encoding, busy)."""
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("identity", "gzip"):
            raise Refusal(
                "unsupported-encoding", f"the content encoding {encoding[:40]!r} is unknown: send gzip, or no encoding"
            )
        if _declared(request) > self._limits.body_bytes:
            raise _too_large("the body", self._limits.body_bytes)
        address = request.client.host if request.client else ""
        memory = _BodyBytes(self, (getattr(request.state, "principal", ""), address))
        try:
            raw = await self._receive(request, memory)
            if encoding == "identity":
                if len(raw) > self._limits.decoded_bytes:
                    raise _too_large("the body", self._limits.decoded_bytes)
                yield raw
                return
            sent = len(raw)
            plain = await self._inflated(raw, memory)
            del raw
            memory.shrink(sent)
            yield plain
        finally:
            memory.end()

    async def _inflated(self, raw: bytes, memory: _BodyBytes) -> bytes:
        limit = self._limits.decoded_bytes
        if len(raw) <= INLINE_BYTES:
            return b"".join(_counted(decompressed(raw, limit), memory))
        pieces = []
        async with self.heavy:
            chunks = decompressed(raw, limit)
            while (piece := await asyncio.to_thread(next, chunks, None)) is not None:
                memory.grow(len(piece))
                pieces.append(piece)
            return await asyncio.to_thread(b"".join, pieces)

    async def _receive(self, request: Request, memory: _BodyBytes) -> bytes:
        chunks: list[bytes] = []
        size = 0
        started = asyncio.get_running_loop().time()
        try:
            more = True
            while more:
                patience = min(
                    self._limits.read_seconds, self.GRACE_SECONDS + size / self._limits.body_bytes_per_second
                )
                async with asyncio.timeout_at(started + patience):
                    message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise Refusal("malformed-body", "the client closed the connection before the end of the body")
                chunks.append(message.get("body", b""))
                more = message.get("more_body", False)
                size += len(chunks[-1])
                if size > self._limits.body_bytes:
                    raise _too_large("the body", self._limits.body_bytes)
                memory.grow(len(chunks[-1]))
        except TimeoutError as error:
            raise Refusal(
                "slow-body",
                f"the body took longer than {self._limits.read_seconds:g} s, or arrived at less than"
                f" {self._limits.body_bytes_per_second} bytes per second",
                headers={"Connection": "close"},
            ) from error
        return b"".join(chunks)


def _declared(request: Request) -> int:
    """The size in Content-Length; 0 without one. Raises Refusal."""
    text = request.headers.get("content-length", "0")
    if not text.isascii() or not text.isdigit() or len(text) > _MOST_DIGITS:
        raise Refusal("malformed-body", "Content-Length is not a number of bytes")
    return int(text)


def _counted(pieces: Iterable[bytes], memory: _BodyBytes) -> Iterator[bytes]:
    for piece in pieces:
        memory.grow(len(piece))
        yield piece


async def read_model(intake: BodyLimits, request: Request, model: type[M] | TypeAdapter[M]) -> M:
    """The JSON body as a validated model. Raises Refusal (invalid-body for a violation of the schema, and the kinds of
    `BodyLimits.body`)."""
    async with intake.body(request) as raw:
        try:
            if len(raw) <= INLINE_BYTES:
                return await asyncio.to_thread(_validated, raw, model)
            async with intake.heavy:
                return await asyncio.to_thread(_validated, raw, model)
        except ValidationError as error:
            errors = error.errors(include_url=False, include_input=False)
            if errors[0]["type"] == "json_invalid":
                raise Refusal("malformed-body", fault_text(errors[0])) from error
            faults = [(".".join(map(str, fault["loc"])), fault_text(fault)) for fault in errors[:_SHOWN_FAULTS]]
            raise with_faults("invalid-body", faults) from error


@cache
def _adapter(model: type[M]) -> TypeAdapter[M]:
    return TypeAdapter(model)


def _validated(raw: bytes, model: type[M] | TypeAdapter[M]) -> M:
    value = (model if isinstance(model, TypeAdapter) else _adapter(model)).validate_json(raw)  # type: ignore[arg-type]  # a class is hashable
    if _ESCAPES.search(raw) and (place := unprintable(from_json(raw))):
        raise with_faults("invalid-body", [(place, NO_CONTROLS)])
    if (b"true" in raw or b"false" in raw) and (paths := booleans_as_numbers(from_json(raw), value)):
        raise with_faults("invalid-body", [(".".join(map(str, path)), NO_NUMBER) for path in paths[:_SHOWN_FAULTS]])
    return value


def decompressed(raw: bytes, limit: int) -> Iterator[bytes]:
    """The content of one gzip member of at most `limit` bytes, decompressed piece by piece as it is consumed.

    Raises Refusal (too-large, malformed-body)."""
    stream = zlib.decompressobj(_GZIP)
    size = 0
    waiting = raw
    while not stream.eof:
        try:
            piece = stream.decompress(waiting, min(_PIECE_BYTES, limit - size + 1))
        except zlib.error as error:
            raise Refusal("malformed-body", f"the body is not gzip: {error}") from error
        waiting = stream.unconsumed_tail
        size += len(piece)
        if size > limit:
            raise _too_large("the decompressed body", limit)
        if piece:
            yield piece
        elif not waiting and not stream.eof:
            raise Refusal("malformed-body", "the gzip body is cut off")
    if stream.unused_data:
        raise Refusal("malformed-body", "the body contains more data after the end of its gzip member")


def _too_large(what: str, limit: int) -> Refusal:
    return Refusal("too-large", f"{what} is larger than {limit} bytes", limit_bytes=limit)
