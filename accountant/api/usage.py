"""POST /v1/usage: batches from the agents, answered after they are durable.

The body goes to the ingest as raw bytes: it is decoded once, by msgspec, and documented in OpenAPI
by the JSON Schema of agent.wire. Nothing is answered 200 before the commit.
"""

from __future__ import annotations

import asyncio

import msgspec
from fastapi import APIRouter, Request, Response

from accountant.api import problems
from accountant.api.access import Ingesting, admit
from accountant.api.asgi import App, Receive, Scope, Send
from accountant.api.body import INLINE_BYTES
from accountant.api.deps import Deps, Given
from accountant.api.openapi import AGENT_ACK, AGENT_BATCH, refuses
from accountant.api.problems import PROBLEMS, Refusal
from accountant.callers.auth import Principal
from accountant.errors import BadBatch
from agent.units import MS_PER_SECOND

router = APIRouter(tags=["usage"])


@router.post(
    "/v1/usage",
    summary="Report closed usage intervals and pod facts",
    openapi_extra={"requestBody": AGENT_BATCH},
    responses=AGENT_ACK | refuses("malformed-batch", "wrong-origin", "sequence-gap", "too-large",
                                         "unknown-schema", "invalid-batch", "ledger-unavailable"),
)  # fmt: skip
async def report_usage(request: Request, deps: Given, principal: Ingesting) -> Response:
    """One batch of one node's outbox, gzip or plain. Answers how far the node's numbers are committed.

    400 and 422 concern the content; 413 asks for smaller batches; 409 carries the `ack` to rewind to;
    anything else means: keep the batch and try again."""
    started = deps.clock.monotonic_ms()
    try:
        async with deps.intake.body(request) as raw:
            if len(raw) <= INLINE_BYTES:
                _check_origin(principal, raw)
                future = deps.ingest.submit(raw)
            else:
                async with deps.intake.heavy:
                    await asyncio.to_thread(_check_origin, principal, raw)
                    future = await asyncio.to_thread(deps.ingest.submit, raw)
            receipt = await asyncio.wrap_future(future)
    except BadBatch as error:
        raise Refusal(error.type if error.type in PROBLEMS else "invalid-batch", error.detail) from error
    deps.metrics.booked(receipt, (deps.clock.monotonic_ms() - started) / MS_PER_SECOND)
    return Response(msgspec.json.encode(receipt.ack), media_type="application/json")


def directly(deps: Deps) -> App:
    """`report_usage` as an application of its own: what the framework does for a request costs several times what a
    small batch does. The route above describes it."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            answer = await report_usage(request, deps, await admit(request, deps, "ingest"))
        except Exception as error:
            # Not a name of this frame: its traceback would keep the frames, and with them the body, until a collection.
            found = _refused(request, deps, error)
            if found is None:
                raise
            answer = found
        await answer(scope, receive, send)

    return app


def _refused(request: Request, deps: Deps, error: Exception) -> Response | None:
    refusal = problems.translated(error, deps.failed)
    if refusal is None:
        return None
    request.state.problem = refusal.slug
    return problems.answer(refusal, request.url.path)


class _Origin(msgspec.Struct):
    """The part of a Batch that a bound token is held against; the rest is skipped, not built."""

    cluster: str
    node: str


_origin = msgspec.json.Decoder(_Origin)


def _check_origin(principal: Principal, raw: bytes) -> None:
    if principal.cluster is None and principal.node is None:
        return
    try:
        origin = _origin.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return  # what cannot be decoded names no node; the ingest says why
    for bound, told in ((principal.cluster, origin.cluster), (principal.node, origin.node)):
        if bound is not None and bound != told:
            raise Refusal("wrong-origin", f"the token {principal.name!r} is bound to {bound!r}, not {told!r}")
