"""Serves backups, ledger checks, quarantine, deliveries, the owners of GPUs, moved and retired GPUs, the clock, health
and metrics.

/v1/clock reports whether the accountant's clock can be trusted, and which stored items are dated in the future."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import Field, model_validator

from accountant.api.access_control import Admin, Reader, admit, body, require_all_teams
from accountant.api.bookkeeping_models import Balance, DeliveryState, GpuOwners, LakeRepaired
from accountant.api.dependencies import AppDeps, Deps
from accountant.api.problems import Refusal, answers, refuses, with_body
from accountant.api.query_parameters import ListedParams, Params, SpanParams, check_cost, instant, invalid
from accountant.bookkeeping.month_closing import faults
from accountant.core.errors import LedgerUnavailable
from accountant.ledger.protocols import (
    MOST_QUARANTINED,
    ClockReport,
    GpuMove,
    GpuOwnership,
    MisdatedRecords,
    RetiredDevice,
    Retirement,
)
from accountant.ledger.usage import coverage
from accountant.notifications.dispatcher import Dispatcher, UnknownDelivery
from accountant.notifications.subscriptions import Delivery
from accountant.runtime.clock_step_guard import SKEW_MS, ClockState
from accountant.runtime.job_and_task_metrics import CONTENT_TYPE
from accountant.storage import backups
from accountant.storage.backups import Backup, NoBackup
from accountant.wire.listed_tables import GPUS
from gputally.base import host_names
from gputally.base.host_names import KnownHosts
from gputally.base.units import MS_PER_SECOND
from gputally.server.config_loading import Model

operation_router = APIRouter(tags=["operation"])
MEDIA_TYPE = "application/vnd.duckdb"
BackupName = Annotated[str, Path(pattern=r"^ledger-[0-9TZ]{1,40}$", description="Name of a backup.")]


@operation_router.post(
    "/v1/backups", summary="Make a verified backup of the ledger", responses=refuses("ledger-unavailable")
)
def make_backup(deps: AppDeps, _: Admin) -> Backup:
    """Writes a verified copy of the ledger to the configured place (`backups.to`). The ledger continues meanwhile; the
    oldest backups beyond `backups.keep` are removed."""

    return deps.backups.make(deps.ledger, deps.clock.wall_ms())[0]


@operation_router.get("/v1/backups", summary="Backups, newest first", responses=refuses("ledger-unavailable"))
def list_backups(deps: AppDeps, _: Admin) -> list[Backup]:
    return deps.backups.listed()


@operation_router.get(
    "/v1/backups/{name}",
    summary="A backup as a file",
    response_class=StreamingResponse,
    responses={**answers("A DuckDB file", MEDIA_TYPE), **refuses("not-found", "ledger-unavailable")},
)
def fetch_backup(name: BackupName, deps: AppDeps, _: Admin) -> StreamingResponse:
    try:
        backup = backups.named(deps.backups.store, name)
    except NoBackup as error:
        raise Refusal("not-found", f"there is no backup {name!r}: GET /v1/backups lists the backups") from error
    headers = {"content-disposition": f'attachment; filename="{name}.duckdb"', "content-length": str(backup.bytes)}
    return StreamingResponse(backups.content(deps.backups.store, backup), media_type=MEDIA_TYPE, headers=headers)


_SHOWN = 100


class QuarantinedRow(Model):
    """A record that was not booked; its span is unmetered. content: the record as it was sent, in JSON."""

    cluster: str
    node: str
    epoch: str
    seq: int
    received_ms: int
    reason: str
    detail: str
    content: str


class QuarantineParams(Params):
    limit: int = Field(default=1_000, ge=1, le=MOST_QUARANTINED, description="Records, newest first.")


class CheckParams(SpanParams):
    lake: bool = Field(default=False, description="Also compare the published days of the lake with the ledger.")


@operation_router.get(
    "/v1/check", summary="Check the accounts against the rows", responses=refuses("invalid-parameter")
)
def check_ledger(params: Annotated[CheckParams, Query()], deps: AppDeps, _: Admin) -> Balance:
    """Computes the accounts again from every row of the span and compares them with the sums. This is slow: do not
    request it from a dashboard."""
    now, newest = deps.clock.wall_ms(), deps.newest_ms()
    span = params.span(now, deps.settings.timezone, deps.settings.limits, newest)
    check_cost(deps.ledger, deps.settings.limits, span)
    start, end, zone = span
    with deps.ledger.moment(start, end) as moment:
        imbalance, usage = moment.imbalance(start, end), moment.usage((start, end), ())
    books = deps.books.books()
    if params.lake and deps.lake is None:
        raise invalid("lake", "this accountant publishes to no lake: set lake.warehouse in its settings")
    comparison = deps.lake.compare() if params.lake and deps.lake is not None else None
    return Balance(
        start_ms=start,
        end_ms=end,
        imbalance_gpu_us=imbalance.total_us,
        differences=tuple(imbalance.lines[:_SHOWN]),
        coverage=coverage(usage),
        capacity_gpu_us=usage.sum_of_accounts().total,
        quarantined_rows=imbalance.quarantined,
        wal_bytes=deps.ledger.wal_bytes(),
        closed_months=len(books.closed),
        month_faults=tuple(faults(books)),
        lake_days=comparison.days if comparison is not None else None,
        lake_differences=comparison.differences[:_SHOWN] if comparison is not None else (),
        note=params.note(start, now, zone, newest, deps.silence_note()),
    )


class LakeRepair(Model):
    """The request to make the lake equal to the ledger. reason: for the audit trail."""

    reason: str = Field(min_length=1, max_length=1000)


@operation_router.post(
    "/v1/lake/repair",
    summary="Write to the lake what differs from the ledger",
    **with_body(LakeRepair, "invalid-parameter", "ledger-unavailable"),
)
def repair_lake(request: Annotated[LakeRepair, body(LakeRepair)], deps: AppDeps, principal: Admin) -> LakeRepaired:
    """Makes the lake equal to the ledger, also where the ledger has fewer acts or begins later, and begins a lake that
    is missing. Recorded in the audit trail. This is slow: it reads every published day."""
    if deps.lake is None:
        raise invalid("lake", "this accountant publishes to no lake: set lake.warehouse in its settings")
    written = deps.lake.repair(principal.actor, request.reason)
    return LakeRepaired(days=written.days, months=written.months, tables=written.registers)


@operation_router.get("/v1/quarantine", summary="Records that were not booked", responses=refuses("invalid-parameter"))
def quarantine(params: Annotated[QuarantineParams, Query()], deps: AppDeps, principal: Reader) -> list[QuarantinedRow]:
    require_all_teams(principal)
    with deps.ledger.moment() as moment:
        rows = moment.quarantined(params.limit)
    return [QuarantinedRow.from_object(row) for row in rows]


class DeliveryRetry(Model):
    """The request to send a failed delivery again. key: as in the list of deliveries."""

    key: str = Field(min_length=1, max_length=1_000)
    reason: str = Field(min_length=1, max_length=400)


@operation_router.get(
    "/v1/deliveries",
    summary="Deliveries of reports and notices, newest first",
    responses=refuses("not-found", "ledger-unavailable"),
)
def deliveries(deps: AppDeps, _: Admin) -> list[DeliveryState]:
    return [_delivery_state(delivery) for delivery in _dispatcher(deps).known()]


@operation_router.post(
    "/v1/deliveries/again",
    summary="Send a delivery again",
    **with_body(DeliveryRetry, "not-found", "ledger-unavailable"),
)
def deliver_again(
    request: Annotated[DeliveryRetry, body(DeliveryRetry)], deps: AppDeps, principal: Admin
) -> DeliveryState:
    """Sends `unsure` and `given-up` messages again. They may have arrived already, so this is never done
    automatically."""
    try:
        delivery = _dispatcher(deps).again(request.key, principal.actor, request.reason)
    except UnknownDelivery as error:
        raise Refusal("not-found", str(error)) from error
    return _delivery_state(delivery)


def _dispatcher(deps: Deps) -> Dispatcher:
    if deps.deliveries is None:
        raise Refusal("not-found", "this accountant delivers nothing: set `deliveries: FILE` in its settings")
    return deps.deliveries


def _delivery_state(delivery: Delivery) -> DeliveryState:
    return DeliveryState(
        key=delivery.key, outcome=delivery.outcome, tries=delivery.tries, first_ms=delivery.first_ms,
        last_ms=delivery.last_ms, next_ms=delivery.due_ms, detail=delivery.detail,
    )  # fmt: skip


gpu_router = APIRouter(tags=["usage"])
MOST_GPUS = 10_000
DeviceId = Annotated[str, Field(max_length=1024)]


class Retire(Model):
    """The request to retire GPUs: those listed, all of a node, or all of a cluster.

    cluster: required only if the ledger has several clusters."""

    cluster: DeviceId = ""
    node: DeviceId = ""
    gpus: Annotated[tuple[DeviceId, ...], Field(max_length=MOST_GPUS)] = ()
    since: str = Field(default="", max_length=64, description="When their capacity ends; default: now.")
    reason: str = Field(min_length=1, max_length=1000)

    @model_validator(mode="after")
    def _names_something(self) -> Self:
        if not (self.cluster or self.node or self.gpus):
            raise ValueError("name at least one of cluster, node and gpus")
        return self


class Move(Model):
    """The request to assign GPUs to another node from an instant on.

    cluster: required only if the ledger has several clusters."""

    cluster: DeviceId = ""
    node: Annotated[str, Field(min_length=1, max_length=1024, description="The new owner.")]
    gpus: Annotated[tuple[DeviceId, ...], Field(min_length=1, max_length=MOST_GPUS)]
    since: str = Field(
        default="",
        max_length=64,
        description="When they moved; default: for each GPU, the end of its present owner's newest record.",
    )
    reason: str = Field(min_length=1, max_length=1000)


class OwnersParams(ListedParams):
    cluster: str = Field(default="", max_length=1024, description="Only of this cluster.")
    node: str = Field(
        default="", max_length=1024, description="Only GPUs that ever belonged to this node, or that it claims."
    )
    gpu: str = Field(default="", max_length=1024, description="Only this UUID.")
    moved: bool = Field(default=False, description="Only GPUs that changed their owner or that another node claims.")
    after: str = Field(default="", max_length=4096, description="`next_after` of the previous answer.")
    limit: int | None = Field(default=1_000, ge=1, le=MOST_GPUS, description="GPUs in one answer.")

    def asks_for(self, gpu: GpuOwnership) -> bool:
        """Whether the GPU matches the filter."""
        return (
            self.cluster in ("", gpu.cluster)
            and self.gpu in ("", gpu.gpu_uuid)
            and (not self.node or self.node in gpu.nodes)
            and (not self.moved or len(gpu.owners) > 1 or bool(gpu.claims))
        )


@gpu_router.get("/v1/gpus/owners", summary="Which node each GPU belonged to", responses=refuses("invalid-parameter"))
def gpu_owners(params: Annotated[OwnersParams, Query()], deps: AppDeps, principal: Reader) -> GpuOwners:
    """A GPU belongs to the node that first reported it, until it moves. Its records from other nodes are quarantined
    and listed here as claims. Refused to callers who may see only some teams."""
    require_all_teams(principal)
    with deps.ledger.moment() as moment:
        gpus = moment.gpu_owners()
    matching = params.ordered(sorted(filter(params.asks_for, gpus), key=_sort_key), GPUS)
    if params.after:
        places = [place for place, gpu in enumerate(matching, 1) if _sort_key(gpu) == params.after]
        if not places:
            raise invalid("after", "the list has changed since the page before: begin again without it")
        matching = matching[places[0] :]
    listed = matching[: params.limit]
    return GpuOwners(gpus=tuple(listed), next_after=_sort_key(listed[-1]) if len(matching) > len(listed) else None)


@gpu_router.post(
    "/v1/gpus/move",
    summary="Confirm that GPUs moved to another node",
    **with_body(Move, "invalid-parameter", "books-refuse", "ledger-unavailable"),
)
def move_gpus(request: Annotated[Move, body(Move)], deps: AppDeps, principal: Admin) -> list[GpuOwnership]:
    """Assigns all of the listed GPUs to the node, or none. Without this request, a GPU moves to another node that
    reports it once its owner has not reported it for `gpu_move_after`. Earlier records stay with the former owner, and
    quarantined records stay quarantined."""
    since = instant("since", request.since, deps.settings.zone) if request.since else None
    gpu_move = GpuMove(request.node, request.gpus, request.cluster, since)
    return list(deps.ledger.move_gpus(gpu_move, deps.clock.wall_ms(), principal.actor, request.reason))


def _sort_key(gpu: GpuOwnership) -> str:
    """The key by which GPUs are sorted and paged."""
    return f"{gpu.cluster}/{gpu.gpu_uuid}"


@gpu_router.post(
    "/v1/gpus/retire",
    summary="Retire GPUs",
    **with_body(Retire, "invalid-parameter", "books-refuse", "ledger-unavailable"),
)
def retire_gpus(request: Annotated[Retire, body(Retire)], deps: AppDeps, principal: Admin) -> list[RetiredDevice]:
    """Ends the capacity of all of these GPUs, or of none. For machines that were removed permanently and are in no
    cluster or inventory file. A GPU that is reported again is capacity again, and the time in between is unmetered."""
    now = deps.clock.wall_ms()
    at = instant("since", request.since, deps.settings.zone) if request.since else now
    retirement = Retirement(request.cluster, request.node, request.gpus)
    return list(deps.ledger.retire(retirement, at, now, principal.actor, request.reason, deps.books.closed_ms()))


class HealthStatus(Model):
    status: Literal["ok"] = "ok"


@operation_router.get("/livez", summary="Whether the process runs")
async def alive() -> HealthStatus:
    return HealthStatus()


@operation_router.get("/v1/sessions/ended", summary="Sessions of the pages that people ended")
async def ended_sessions(deps: AppDeps, principal: Reader) -> dict[str, int]:
    """Digests of the sessions that were ended before their expiry, each with the time after which no cookie of it is
    valid (milliseconds since 1970, UTC). For the controller's pages at the same address."""
    require_all_teams(principal)
    people = deps.people()
    return {} if people is None else dict(people.ended())


@operation_router.get("/leading", summary="Whether this replica serves the ledger")
async def leading() -> HealthStatus:
    """Answers 200 if this replica serves; waiting replicas answer 503."""
    return HealthStatus()


class Readiness(HealthStatus):
    """tasks: background tasks with a fault. Only they wait: requests are taken and answered."""

    tasks: dict[str, str] = Field(default={})


@operation_router.get(
    "/readyz",
    summary="Whether requests can be taken and answered",
    responses=refuses("ledger-unavailable", "task-failing"),
)
async def ready(deps: AppDeps) -> Readiness:
    """Answers 503 if the ledger cannot be read or written, and while the clock is in doubt: it was set, or it disagrees
    with the agents' clocks or with the newest record. A task that fails beside that, such as a backup, is named in
    `tasks`. The answer needs no thread and waits for no other request."""
    if deps.guard is not None and (why := deps.guard.doubt):
        raise LedgerUnavailable(why)
    faults = {} if deps.tasks is None else deps.tasks.faults()
    # The reasons name files and hosts, and this route needs no token, so they are only in the log.
    tasks = {name: fault.partition(":")[0] for name, fault in faults.items()}
    if deps.tasks is not None and (stops := deps.tasks.serving & tasks.keys()):
        detail = "; ".join(f"{name} {tasks[name]}" for name in sorted(stops))
        raise Refusal("task-failing", f"{detail}: the log of the accountant says why", tasks=tasks)
    now = deps.clock.wall_ms()
    ahead_ms = deps.ledger.status().newest_ms - now
    if ahead_ms > SKEW_MS:
        raise LedgerUnavailable(
            f"the newest record ends {ahead_ms // MS_PER_SECOND} s after the time of the accountant's clock, so one of "
            "them is wrong: run gputally accountant clock show"
        )
    return Readiness(tasks=tasks)


@operation_router.get(
    "/metrics",
    summary="Prometheus text format",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **refuses("wrong-host")},
)
async def metrics(request: Request, deps: AppDeps) -> Response:
    """Without a token, the answer contains only series that name no team, user, namespace, queue or job. With
    `open_metrics: true` in the settings it contains all series, and without a token it is given only under addresses,
    names of the cluster and known public names."""
    settings = deps.settings
    own = urlsplit(settings.public_url or "").hostname
    with_names = settings.open_metrics and KnownHosts((*settings.hosts, *([own] if own else []))).knows(
        request.headers.get("host")
    )
    if not with_names:
        try:
            require_all_teams(await admit(request, deps, "read"))
            with_names = True
        except Refusal as refusal:
            if refusal.slug != "unauthenticated" or "authorization" in request.headers:
                raise
            if settings.open_metrics:
                raise Refusal("wrong-host", host_names.refusal("hosts").strip()) from refusal
    async with deps.turns.turn("metrics", request, request.client.host if request.client else ""):
        text = await asyncio.to_thread(deps.metrics.exposition, naming=with_names)
    return Response(text, media_type=CONTENT_TYPE)


class RedateReason(Model):
    """The reason, for the audit trail."""

    reason: str = Field(min_length=1, max_length=1000)


@operation_router.get(
    "/v1/clock",
    summary="The accountant's clock, and records that are dated in the future",
    responses=refuses("ledger-unavailable"),
)
def read_clock(deps: AppDeps, _: Admin) -> ClockReport:
    """Returns the state of the clock. doubt: why no item is given a timestamp at present. misdated: by kind, the items
    dated in the future by a clock that was ahead."""
    return _clock_report(deps)


@operation_router.post(
    "/v1/clock/accept", summary="Accept the machine's clock as right", responses=refuses("ledger-unavailable")
)
def accept_clock(deps: AppDeps, _: Admin) -> ClockReport:
    """Accepts the machine's clock as right after it was set, if too few agents report their time to confirm it."""
    if deps.guard is not None:
        deps.guard.accept()
    return _clock_report(deps)


@operation_router.post(
    "/v1/clock/heal",
    summary="Correct records that are dated in the future",
    **with_body(RedateReason, "invalid-parameter", "books-refuse", "ledger-unavailable"),
)
def redate_records(
    request: Annotated[RedateReason, body(RedateReason)], deps: AppDeps, principal: Admin
) -> list[MisdatedRecords]:
    """Corrects the items that `GET /v1/clock` lists, each kind as described there, and records it in the audit
    trail."""
    return list(deps.ledger.redate(deps.clock.wall_ms(), principal.actor, request.reason))


def _clock_report(deps: Deps) -> ClockReport:
    now = deps.clock.wall_ms()
    state = deps.guard.state() if deps.guard is not None else ClockState("", now, now, 0, 0)
    with deps.ledger.moment() as moment:
        return ClockReport(**asdict(state), misdated=moment.misdated(state.told_ms))
