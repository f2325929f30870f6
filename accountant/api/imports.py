"""History from elsewhere: what an import may ask, send and note. The only routes of the scope `import`.

What is sent here is an import's and nothing else: its epoch says so, and every row is of method `imported`, which
yields to whatever an agent measured. So a token of this scope can add to the past, and change nothing that was metered.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request, Response
from pydantic import Field, TypeAdapter

from accountant.api.access import Importing
from accountant.api.body import read_model
from accountant.api.deps import Deps, Given
from accountant.api.openapi import AGENT_ACK, AGENT_BATCH, inline_body, refuses
from accountant.api.params import Params
from accountant.api.problems import PROBLEMS, Refusal
from accountant.callers.auth import Principal
from accountant.errors import BadBatch
from accountant.importing.answers import DoneSpan, ImportMark, ImportState, MeteredSpan, Noted
from accountant.importing.protocol import Source, is_import, source_of
from accountant.importing.record import ImportedChunk, of_acts
from accountant.ingest import decode
from accountant.journal import NewAct
from accountant.ledger import Facts
from agent.units import MS_PER_SECOND, US_PER_HOUR

router = APIRouter(tags=["usage"])
_CHUNK = TypeAdapter(ImportedChunk)


class ImportParams(Params):
    cluster: str = Field(min_length=1, max_length=1024, description="Name of the cluster in the ledger.")
    source: Source = Field(description="What is imported from.")


@router.get("/v1/imports", summary="How far an import came", responses=refuses("invalid-parameter", "wrong-origin"))
async def state(asked: Annotated[ImportParams, Query()], deps: Given, principal: Importing) -> ImportState:
    """Chunks that are done, the marks of those that are not, and the node-spans that agents metered."""
    _own_cluster(principal, asked.cluster)

    def read() -> ImportState:
        found = deps.ledger.imports(asked.cluster)
        noted = of_acts(deps.ledger.acts("imported", subject=_subject(asked.cluster, asked.source)))
        return ImportState(
            done=tuple(DoneSpan(epoch=one.epoch, start_ms=one.start_ms, end_ms=one.end_ms) for one in noted),
            marks=tuple(
                ImportMark(node=node, epoch=epoch, durable_seq=seq)
                for node, epochs in found.marks.items()
                for epoch, seq in epochs.items()
                if source_of(epoch) == asked.source
            ),
            metered=tuple(
                MeteredSpan(node=node, start_ms=start, end_ms=end) for node, (start, end) in found.metered.items()
            ),
        )

    return await asyncio.to_thread(read)


@router.post(
    "/v1/imports/usage",
    summary="Report imported intervals",
    openapi_extra={"requestBody": AGENT_BATCH},
    responses=AGENT_ACK | refuses("malformed-batch", "wrong-origin", "sequence-gap", "too-large",
                                         "unknown-schema", "invalid-batch", "ledger-unavailable"),
)  # fmt: skip
async def report(request: Request, deps: Given, principal: Importing) -> Response:
    """As POST /v1/usage, for a batch whose epoch is an import's and whose rows are all imported."""
    started = deps.clock.monotonic_ms()
    try:
        async with deps.intake.body(request) as raw:
            batch = await asyncio.to_thread(decode, raw)
        _own_cluster(principal, batch.cluster)
        if principal.node is not None and principal.node != batch.node:
            raise Refusal("wrong-origin", f"the token {principal.name!r} is bound to {principal.node!r}")
        if not is_import(batch.epoch) or any(row.method != "imported" for row in batch.intervals):
            raise Refusal("invalid-batch", "an import sends under an epoch of its own, and rows of method `imported`")
        receipt = await asyncio.wrap_future(deps.ingest.submit_batch(batch))
    except BadBatch as error:
        raise Refusal(error.type if error.type in PROBLEMS else "invalid-batch", error.detail) from error
    deps.metrics.booked(receipt, (deps.clock.monotonic_ms() - started) / MS_PER_SECOND)
    return Response(msgspec.json.encode(receipt.ack), media_type="application/json")


@router.post(
    "/v1/imports",
    summary="A chunk was sent completely",
    openapi_extra={"requestBody": inline_body(ImportedChunk)},
    responses=refuses("malformed-body", "too-large", "invalid-body", "wrong-origin", "ledger-unavailable"),
)
async def note(request: Request, deps: Given, principal: Importing) -> Noted:
    """Noted once, in the audit trail; the month's report says what was imported into it."""
    chunk = await read_model(deps.intake, request, _CHUNK)
    _own_cluster(principal, chunk.cluster)
    if not is_import(chunk.epoch) or source_of(chunk.epoch) != chunk.source:
        raise Refusal("invalid-body", f"epoch {chunk.epoch[:100]!r} is none of an import from {chunk.source}")
    return Noted(new=await asyncio.to_thread(_note, deps, principal, chunk))


def _note(deps: Deps, principal: Principal, chunk: ImportedChunk) -> bool:
    subject = _subject(chunk.cluster, chunk.source)
    if any(known.span == chunk.span for known in of_acts(deps.ledger.acts("imported", subject=subject))):
        return False
    act = NewAct(
        deps.clock.wall_ms(),
        "imported",
        subject,
        principal.name,
        f"{chunk.sent_us / US_PER_HOUR:.1f} GPU-hours of {chunk.nodes} nodes from {chunk.origin}",
        chunk.model_dump_json(),
    )
    deps.ledger.observe(Facts(), act.at_ms, act=act)
    return True


def _subject(cluster: str, source: Source) -> str:
    return f"{source}/{cluster}"


def _own_cluster(principal: Principal, cluster: str) -> None:
    if principal.cluster not in (None, cluster):
        raise Refusal(
            "wrong-origin", f"the token {principal.name!r} is bound to {principal.cluster!r}, not {cluster!r}"
        )
