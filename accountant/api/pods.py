"""POST /v1/pods: what other systems know of the holders of GPUs, such as Slurm's accounting of its jobs."""

from __future__ import annotations

import asyncio

import msgspec
from fastapi import APIRouter, Request

from accountant.api.access import Administering
from accountant.api.deps import Given
from accountant.api.openapi import json_body, refuses
from accountant.api.problems import Refusal
from accountant.journal import NewAct
from accountant.ledger import Facts
from accountant.reported import PodReport
from accountant.store.writing.validation import fact_fault
from accountant.told import Taken

router = APIRouter(tags=["usage"])
MOST_PODS = 100_000


_decoder = msgspec.json.Decoder(PodReport)


@router.post(
    "/v1/pods",
    summary="Report what is known of holders",
    openapi_extra={"requestBody": json_body("PodReport")},
    responses=refuses("malformed-body", "too-large", "invalid-body", "ledger-unavailable"),
)
async def report(request: Request, deps: Given, principal: Administering) -> Taken:
    """Labels open time anew; a closed month keeps its labels."""
    async with deps.intake.body(request) as raw:
        try:
            told = await asyncio.to_thread(_decoder.decode, raw)
        except msgspec.ValidationError as error:
            raise Refusal("invalid-body", str(error)) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Refusal("malformed-body", str(error)) from error
    if not told.cluster or len(told.pods) > MOST_PODS:
        raise Refusal("invalid-body", f"a report names its cluster and has at most {MOST_PODS} pods")
    now_ms = deps.clock.wall_ms()
    for number, pod in enumerate(told.pods):
        if not pod.uid:
            raise Refusal("invalid-body", f"pods.{number}: every pod needs a uid")
        if (fault := fact_fault(pod, now_ms)) is not None:
            raise Refusal("invalid-body", f"pods.{number}: {fault.detail}")

    def take() -> Taken:
        now = deps.clock.wall_ms()
        facts = Facts(pods=tuple((told.cluster, pod) for pod in told.pods))
        act = NewAct(now, "pods", told.cluster, principal.name, f"{len(told.pods)} holders from {told.source}")
        deps.ledger.observe(facts, now, deps.books.closed_ms(), act)
        return Taken(pods=len(told.pods))

    return await asyncio.to_thread(take)
