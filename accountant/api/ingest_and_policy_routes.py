"""Accepts usage batches from agents, imported history and pod facts from other systems, and policies and decisions from
fairshare controllers.

The raw body is passed to the ingest, which decodes it once with msgspec. OpenAPI describes the body by the JSON Schema
of `agent.wire`. A 200 is sent only after the commit.

The import route accepts only batches whose epoch marks them as an import and whose rows all have the method `imported`.
Such rows yield to rows that an agent measured. A token with the scope `import` can therefore add to the past, but not
change metered time."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Query, Request, Response
from pydantic import Field, TypeAdapter
from starlette.types import ASGIApp, Receive, Scope, Send

from accountant.api import problems
from accountant.api.access_control import (
    Admin,
    ImportPrincipal,
    IngestPrincipal,
    PolicyPrincipal,
    Reader,
    admit,
    body,
    require_all_teams,
)
from accountant.api.bookkeeping_models import ObservedPods, PodReport
from accountant.api.dependencies import AppDeps, Deps
from accountant.api.middleware import INLINE_BYTES
from accountant.api.problems import AGENT_ACK, PROBLEMS, Refusal, json_body, refuses, with_body
from accountant.api.query_parameters import Params, SpanParams
from accountant.core.errors import BadBatch, OverQuota
from accountant.core.import_epochs import is_import, source_of
from accountant.core.record_faults import fact_fault
from accountant.history_import.import_run import IMPORTING, ImportedChunk, Source, imported_chunks
from accountant.ledger.journal import NewAct
from accountant.ledger.protocols import Facts, ImportSpan, Receipt, policy_at
from accountant.runtime.ingest import decode, with_short_stops
from accountant.wire.policy_models import Decision, DecisionKind, Policy, PolicyVersion
from accountant.wire.usage_cost_and_job_models import (
    ChunkNote,
    DoneSpan,
    ImportMark,
    ImportState,
    MeteredSpan,
    Withdrawal,
)
from gputally.base.units import MS_PER_SECOND, US_PER_HOUR
from gputally.base.untrusted_text import UNDECODABLE
from gputally.server.config_loading import Model
from gputally.server.tokens_and_grants import Principal

usage_router = APIRouter(tags=["usage"])
_TAKES_BATCH: Final[dict[str, Any]] = {
    "openapi_extra": {"requestBody": json_body("Batch")},
    "responses": AGENT_ACK
    | refuses(
        "malformed-batch", "wrong-origin", "sequence-gap", "too-large", "unknown-schema", "invalid-batch",
        "ledger-unavailable",
    ),
}  # fmt: skip


@usage_router.post("/v1/usage", summary="Report closed usage intervals and pod facts", **_TAKES_BATCH)
async def report_usage(request: Request, deps: AppDeps, principal: IngestPrincipal) -> Response:
    """Accepts one batch of one node's outbox, gzip or plain. The answer says up to which number the node's records are
    committed. After 400 or 422, a record of the batch is at fault. After 413, send smaller batches. 409 contains the
    `ack` after which to continue. After any other status, keep the batch and try again."""
    started = deps.clock.monotonic_ms()
    votes = principal.node is not None or deps.settings.auth == "off"
    try:
        async with deps.intake.body(request) as raw:
            if len(raw) <= INLINE_BYTES:
                _check_origin(principal, raw)
                future = deps.ingest.submit(raw, votes=votes)
            else:
                async with deps.intake.heavy:
                    await asyncio.to_thread(_check_origin, principal, raw)
                    future = await asyncio.to_thread(partial(deps.ingest.submit, raw, votes=votes))
            receipt = await asyncio.wrap_future(future)
    except BadBatch as error:
        raise _bad_batch(error) from error
    except OverQuota as error:
        deps.count_refusal(error)
        raise
    return _acknowledged(deps, receipt, started)


def _bad_batch(error: BadBatch) -> Refusal:
    return Refusal(error.type if error.type in PROBLEMS else "invalid-batch", error.detail)


def _acknowledged(deps: Deps, receipt: Receipt, started_ms: int) -> Response:
    deps.metrics.booked(receipt, (deps.clock.monotonic_ms() - started_ms) / MS_PER_SECOND)
    return Response(msgspec.json.encode(receipt.ack), media_type="application/json")


def ingest_app(deps: Deps) -> ASGIApp:
    """Returns `report_usage` as a separate ASGI application, because FastAPI would spend several times as long on a
    request as it takes to store a small batch. The route `report_usage` describes it in the OpenAPI document."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            answer = await report_usage(request, deps, await admit(request, deps, "ingest"))
        except Exception as error:
            # Not a local variable: its traceback would keep the frames, and with them the body, until a garbage
            # collection.
            refusal = _refused(request, deps, error)
            if refusal is None:
                raise
            answer = refusal
        await answer(scope, receive, send)

    return app


def _refused(request: Request, deps: Deps, error: Exception) -> Response | None:
    refusal = problems.translated(error, deps.failed)
    if refusal is None:
        return None
    request.state.problem = refusal.slug
    return problems.answer(refusal, request.url.path)


class _Origin(msgspec.Struct):
    """The part of a Batch that is compared with a bound token; other fields are skipped."""

    cluster: str
    node: str


_origin = msgspec.json.Decoder(_Origin)


def _check_origin(principal: Principal, raw: bytes) -> None:
    if principal.cluster is None and principal.node is None:
        return
    try:
        origin = _origin.decode(raw)
    except UNDECODABLE:
        return  # an undecodable body names no node; the ingest reports why
    _check_binding(principal, origin.cluster, origin.node)


def _check_binding(principal: Principal, cluster: str, node: str | None = None) -> None:
    """Raises Refusal if the principal is bound to another cluster or node. node: None if the data is of no one node."""
    for what, bound, reported in (("cluster", principal.cluster, cluster), ("node", principal.node, node)):
        if bound is not None and reported not in (None, bound):
            raise Refusal(
                "wrong-origin", f"{principal.name!r} may report only for the {what} {bound!r}, not for {reported!r}"
            )


class ImportParams(Params):
    cluster: str = Field(min_length=1, max_length=253, description="Name of the cluster in the ledger.")
    source: Source = Field(description="The source of the history.")


@usage_router.get(
    "/v1/imports", summary="The progress of an import", responses=refuses("invalid-parameter", "wrong-origin")
)
def import_state(params: Annotated[ImportParams, Query()], deps: AppDeps, principal: ImportPrincipal) -> ImportState:
    """Returns the finished chunks, the sequence numbers that are acknowledged of unfinished ones, and the span of each
    node that agents metered."""
    _check_binding(principal, params.cluster)
    imports = deps.ledger.imports(params.cluster)
    with deps.ledger.moment() as moment:
        acts = moment.acts(*IMPORTING, subject=_subject(params.cluster, params.source))
    chunks = imported_chunks(acts)
    return ImportState(
        generation=sum(act.kind == "withdrawn" for act in acts),
        done=tuple(DoneSpan.from_object(span) for span in chunks),
        marks=tuple(
            ImportMark(node=node, epoch=epoch, durable_seq=seq)
            for node, epochs in imports.marks.items()
            for epoch, seq in epochs.items()
            if source_of(epoch) == params.source
        ),
        metered=tuple(
            MeteredSpan(node=node, start_ms=start, end_ms=end) for node, (start, end) in imports.metered.items()
        ),
    )


@usage_router.post("/v1/imports/usage", summary="Report imported intervals", **_TAKES_BATCH)
async def report_import(request: Request, deps: AppDeps, principal: ImportPrincipal) -> Response:
    """Accepts a batch of an import, like POST /v1/usage. The batch has the epoch of an import, and its rows have the
    method `imported`."""
    started = deps.clock.monotonic_ms()
    try:
        async with deps.intake.body(request) as raw:
            batch = await asyncio.to_thread(decode, raw)
        _check_binding(principal, batch.cluster, batch.node)
        if not is_import(batch.epoch) or any(row.method != "imported" for row in batch.intervals):
            raise Refusal(
                "invalid-batch",
                "this is no batch of an import: it needs an import's epoch, and the method `imported` in each row",
            )
        receipt = await asyncio.wrap_future(deps.ingest.submit_batch(batch))
    except BadBatch as error:
        raise _bad_batch(error) from error
    except OverQuota as error:
        deps.count_refusal(error)
        raise
    return _acknowledged(deps, receipt, started)


@usage_router.post(
    "/v1/imports",
    summary="Record a completed chunk of an import",
    **with_body(ImportedChunk, "wrong-origin", "books-refuse", "ledger-unavailable"),
)
def record_chunk(
    chunk: Annotated[ImportedChunk, body(ImportedChunk, "import")], deps: AppDeps, principal: ImportPrincipal
) -> ChunkNote:
    """Records in the audit trail that a chunk is complete, once. Each month's report lists the imports that added time
    to that month."""
    _check_binding(principal, chunk.cluster)
    if not is_import(chunk.epoch) or source_of(chunk.epoch) != chunk.source:
        raise Refusal("invalid-body", f"epoch {chunk.epoch[:100]!r} does not belong to an import from {chunk.source}")
    subject = _subject(chunk.cluster, chunk.source)
    with deps.ledger.moment() as moment:
        known = imported_chunks(moment.acts(*IMPORTING, subject=subject))
    if any(one.span == chunk.span for one in known):
        return ChunkNote(new=False)
    most = deps.settings.quotas.import_chunks
    if len(known) >= most:
        raise Refusal(
            "books-refuse",
            f"the imports of cluster {chunk.cluster!r} from {chunk.source} have noted {most} chunks, which is the most:"
            " withdraw what is wrong, or raise quotas.import_chunks in the accountant's settings",
        )
    act = NewAct(
        deps.clock.wall_ms(),
        "imported",
        subject,
        principal.actor,
        f"{chunk.sent_us / US_PER_HOUR:.1f} GPU-hours of {chunk.nodes} nodes from {chunk.origin}",
        chunk.model_dump_json(),
    )
    deps.ledger.observe(Facts(), act.at_ms, act=act)
    return ChunkNote(new=True)


class WithdrawnImport(ImportSpan):
    """The span of an import that is withdrawn, and the reason for the audit trail."""

    reason: str = Field(min_length=1, max_length=1000)


@usage_router.post(
    "/v1/imports/withdraw",
    summary="Withdraw an import",
    **with_body(WithdrawnImport, "books-refuse", "ledger-unavailable"),
)
def withdraw_import(
    wanted: Annotated[WithdrawnImport, body(WithdrawnImport)], deps: AppDeps, principal: Admin
) -> Withdrawal:
    """Withdraws what imports from a source booked in a span, so that it can be imported again, and records it in the
    audit trail. Closed months do not change; the difference waits as a proposal."""
    span = ImportSpan(**wanted.model_dump(exclude={"reason"}))
    rows = deps.ledger.withdraw_import(span, deps.clock.wall_ms(), principal.actor, wanted.reason)
    return Withdrawal(rows=rows)


def _subject(cluster: str, source: Source) -> str:
    return f"{source}/{cluster}"


MOST_PODS = 100_000


_decoder = msgspec.json.Decoder(PodReport)


@usage_router.post(
    "/v1/pods",
    summary="Report facts about pods and other holders",
    openapi_extra={"requestBody": json_body("PodReport")},
    responses=refuses("malformed-body", "too-large", "invalid-body", "ledger-unavailable"),
)
async def report_pods(request: Request, deps: AppDeps, principal: Admin) -> ObservedPods:
    """Stores facts about pods. Their labels apply to the pods' whole time in open months; closed months do not
    change."""
    async with deps.intake.body(request) as raw:
        try:
            report = await asyncio.to_thread(_decoder.decode, raw)
        except msgspec.ValidationError as error:
            raise Refusal("invalid-body", str(error)) from error
        except UNDECODABLE as error:
            raise Refusal("malformed-body", str(error)) from error
    if not report.cluster or len(report.pods) > MOST_PODS:
        raise Refusal(
            "invalid-body",
            f"a report needs the name of its cluster and has at most {MOST_PODS} pods: split a larger one",
        )
    now_ms = deps.clock.wall_ms()
    pods = with_short_stops(report.pods)
    for number, pod in enumerate(pods):
        if not pod.uid:
            raise Refusal("invalid-body", f"pods.{number}: every pod needs a uid")
        if (fault := fact_fault(pod, now_ms)) is not None:
            raise Refusal("invalid-body", f"pods.{number}: {fault.detail}")

    def take() -> ObservedPods:
        now = deps.clock.wall_ms()
        facts = Facts(pods=tuple((report.cluster, pod) for pod in pods))
        act = NewAct(now, "pods", report.cluster, principal.actor, f"{len(report.pods)} holders from {report.source}")
        deps.ledger.observe(facts, now, deps.books.closed_ms(), act)
        return ObservedPods(pods=len(report.pods))

    return await asyncio.to_thread(take)


policy_router = APIRouter(tags=["policy"])


class PolicyParams(Params):
    reason: str = Field(default="", max_length=1_000, description="Reason for the audit trail.")


_FAR_MS = 253_402_300_800_000
"""The year 10000: later than any policy."""


@policy_router.put(
    "/v1/policy",
    summary="Put a policy in force",
    response_model=PolicyVersion,
    openapi_extra={"requestBody": json_body("Policy")},
    responses=refuses("malformed-body", "too-large", "invalid-body", "books-refuse", "ledger-unavailable"),
)
def put_policy(
    policy: Annotated[Policy, body(Policy, "policy")],
    params: Annotated[PolicyParams, Query()],
    deps: AppDeps,
    principal: PolicyPrincipal,
) -> PolicyVersion:
    """Puts the policy in force from now on; earlier versions keep their dates. If it is already in force, its version
    is returned unchanged."""
    known, most = every_policy(deps), deps.settings.quotas.policies
    if len(known) >= most and known[-1].version != policy.version():
        raise Refusal(
            "books-refuse",
            f"{len(known)} policies were put in force, and each stays for ever: find out who sends them, and then raise"
            " quotas.policies in the accountant's settings",
        )
    version = deps.ledger.put_policy(policy, deps.clock.wall_ms(), principal.actor, params.reason)
    deps.books.teams.warn_of_unknown("budgets of the policy", (budget.team for budget in policy.budgets))
    return version


@policy_router.get("/v1/policy", summary="The policy in force", responses=refuses("not-found"))
def current_policy(response: Response, deps: AppDeps, principal: Reader) -> PolicyVersion:
    require_all_teams(principal)
    version = policy_at(deps.ledger.status(), deps.clock.wall_ms())
    if version is None:
        raise Refusal("not-found", "no policy is in force yet: PUT /v1/policy sends one")
    response.headers["ETag"] = f'"{version.version}"'
    return version


@policy_router.get("/v1/policy/versions", summary="Every policy that was in force", responses=refuses())
def policy_versions(deps: AppDeps, principal: Reader) -> list[PolicyVersion]:
    """Lists the policies, oldest first; each was in force until the next one's `effective_ms`."""
    require_all_teams(principal)
    return every_policy(deps)


def every_policy(deps: Deps) -> list[PolicyVersion]:
    """The policies that were or are in force, oldest first."""
    return deps.ledger.status().policies(0, _FAR_MS)


decision_router = APIRouter(tags=["decisions"])
MOST_DECISIONS = 10_000
_DECISIONS = TypeAdapter(Annotated[tuple[Decision, ...], Field(max_length=MOST_DECISIONS)])


class Recorded(Model):
    """The number of received decisions.

    recorded: new ones.
    known: those that the ledger already had, which do not change."""

    recorded: int
    known: int


class DecisionParams(SpanParams):
    kind: DecisionKind | None = Field(default=None, description="Only decisions of this kind.")
    subject: str | None = Field(
        default=None, max_length=500, description="Only decisions about this queue or workload, by its full name."
    )
    cluster: str | None = Field(
        default=None,
        min_length=1,
        max_length=253,
        description="Only decisions of this cluster's controller, and of controllers without a cluster name.",
    )
    limit: int = Field(default=1_000, ge=1, le=MOST_DECISIONS, description="Decisions, newest first.")
    before: str | None = Field(
        default=None,
        max_length=500,
        description="For the next page: `CLUSTER/ID` (`ID` without a cluster) of the last decision of this page, with "
        "`end` one millisecond after its `at_ms`. Of that millisecond, only the decisions that follow it are returned.",
    )


@decision_router.post(
    "/v1/decisions",
    summary="Record decisions",
    openapi_extra={"requestBody": json_body("Decision", many=True)},
    responses=refuses("malformed-body", "too-large", "invalid-body", "ledger-unavailable"),
)
def record_decisions(
    decisions: Annotated[tuple[Decision, ...], body(_DECISIONS, "policy")], deps: AppDeps, principal: PolicyPrincipal
) -> Recorded:
    """Stores a list of decisions, except those whose cluster, id and instant are already stored."""
    # What is stored already leaves nothing, so it costs nothing: a controller repeats all that waits until it is taken.
    deps.require_quota("decisions", principal.name)
    new = deps.ledger.record_decisions(decisions, deps.clock.wall_ms())
    deps.recorded["decisions"].charge((principal.name, "decisions"), new - 1)
    return Recorded(recorded=new, known=len(decisions) - new)


@decision_router.get("/v1/decisions", summary="Decisions, newest first", responses=refuses("invalid-parameter"))
def decisions(params: Annotated[DecisionParams, Query()], deps: AppDeps, principal: Reader) -> list[Decision]:
    require_all_teams(principal)
    # "Until now" includes decisions of the current millisecond.
    start, end, _ = params.span(deps.clock.wall_ms() + 1, deps.settings.timezone, deps.settings.limits)
    with deps.ledger.moment() as moment:
        return moment.decisions(
            start,
            end,
            params.limit,
            kind=params.kind,
            subject=params.subject,
            cluster=params.cluster,
            before=params.before,
        )
