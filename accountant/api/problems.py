"""Defines every error answer of the API as RFC 9457 problem+json, and adds them and the agents' bodies to the OpenAPI
document.

`type` is `agent.wire.PROBLEM` plus an identifier from the table `PROBLEMS`, whose meaning never changes. Agents decide
by status and type: they split a batch after 413, bisect it after 400 and 422, continue from the number in the answer
after a sequence gap (409), and try again later after everything else. `detail` is text for people and may change.
Additional members are allowed.

`agent.wire` uses msgspec instead of pydantic. Its JSON Schema is generated and added to the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from accountant.api.bookkeeping_models import PodReport
from accountant.bookkeeping.invoice_reconciliation import Invoice
from accountant.bookkeeping.month_closing import CannotClose
from accountant.core.errors import (
    CannotMove,
    CannotRedate,
    CannotRender,
    CannotRetire,
    LakeUnavailable,
    LedgerFailed,
    LedgerUnavailable,
    OverQuota,
    SequenceGap,
    TooManyViews,
    UnsupportedQuestion,
)
from accountant.ledger.journal import BooksMoved
from accountant.wire.usage_cost_and_job_models import known_dimension
from agent.wire import PROBLEM, Ack, Batch, schemas_of
from gputally.base.called_off import CalledOff
from gputally.server.config_loading import fault_text
from gputally.server.turns import Busy

MEDIA_TYPE = "application/problem+json"
_RETRY_AFTER_SECONDS = 5
_QUOTA_SECONDS = 600


@dataclass(frozen=True, slots=True)
class ProblemKind:
    """A kind of error with its HTTP status and the title of its answers."""

    status: int
    title: str


PROBLEMS: Final[Mapping[str, ProblemKind]] = {
    "malformed-batch": ProblemKind(400, "The batch cannot be decoded"),
    "malformed-body": ProblemKind(400, "The body cannot be decoded"),
    "bad-page": ProblemKind(400, "The page does not belong to this query"),
    "unauthenticated": ProblemKind(401, "The caller is not signed in"),
    "forbidden": ProblemKind(403, "The caller may not do that"),
    "wrong-origin": ProblemKind(403, "The caller may not report for that node"),
    "cross-site": ProblemKind(403, "Requests of another site may not change anything"),
    "not-found": ProblemKind(404, "There is nothing at this address"),
    "method-not-allowed": ProblemKind(405, "This address does not accept this method"),
    "slow-body": ProblemKind(408, "The body did not arrive in time"),
    "sequence-gap": ProblemKind(409, "Numbers before this batch are missing"),
    "books-refuse": ProblemKind(409, "The bookkeeping refuses this"),
    "too-many-epochs": ProblemKind(409, "The job has the maximum number of epochs"),
    "page-gone": ProblemKind(410, "The answer to which this page belongs is no longer stored"),
    "too-large": ProblemKind(413, "The body is larger than this service accepts"),
    "unsupported-encoding": ProblemKind(415, "The body's content encoding is not known"),
    "unknown-schema": ProblemKind(415, "The batch has an unknown schema version"),
    "wrong-host": ProblemKind(421, "Without a token this is not answered under this host name"),
    "invalid-batch": ProblemKind(422, "The batch is well-formed but violates a rule"),
    "invalid-parameter": ProblemKind(422, "A parameter is missing, unknown or out of range"),
    "invalid-body": ProblemKind(422, "The body does not follow its schema"),
    "unsupported-question": ProblemKind(422, "The ledger cannot answer this query"),
    "too-many-requests": ProblemKind(429, "The client sends more requests than its limit allows"),
    "client-gone": ProblemKind(499, "The client closed the connection before the answer"),
    "internal": ProblemKind(500, "A defect of this service"),
    "ledger-unavailable": ProblemKind(503, "Nothing was stored; the same request may succeed later"),
    "authority-unavailable": ProblemKind(503, "The service that knows the caller gives no valid answer"),
    "task-failing": ProblemKind(503, "A background task of this service fails"),
    "busy": ProblemKind(503, "The service has too much to do at this moment"),
    "cannot-render": ProblemKind(501, "This file format is not available on this machine"),
    "no-price-book": ProblemKind(503, "This accountant has no price book"),
}


class Refusal(Exception):
    """An error answer. A route, or a function that it calls, raises it."""

    def __init__(self, slug: str, detail: str, *, headers: Mapping[str, str] | None = None, **members: object) -> None:
        super().__init__(detail)
        self.slug = slug
        self.detail = detail
        self.headers = dict(headers or {})
        self.members = members

    @property
    def kind(self) -> ProblemKind:
        return PROBLEMS[self.slug]


def retry_later(slug: str, detail: str, seconds: float = _RETRY_AFTER_SECONDS) -> Refusal:
    """A refusal with Retry-After, in whole seconds, at least one."""
    return Refusal(slug, detail, headers={"Retry-After": str(max(1, -int(-seconds // 1)))})


def with_faults(slug: str, faults: Sequence[tuple[str, str]]) -> Refusal:
    """The refusal of parameters or a body. faults: the place and the reason of each; "" is the body as a whole."""
    detail = "; ".join(f"{place}: {reason}" if place else reason for place, reason in faults)
    return Refusal(slug, detail, errors=[{"at": place, "reason": reason} for place, reason in faults])


def answer(refusal: Refusal, instance: str) -> Response:
    """The HTTP answer with the problem document. instance: the requested path."""
    kind = refusal.kind
    body: dict[str, Any] = {
        "type": PROBLEM + refusal.slug,
        "title": kind.title,
        "status": kind.status,
        "detail": refusal.detail,
        "instance": instance,
        **refusal.members,
    }
    return Response(msgspec.json.encode(body), kind.status, refusal.headers, MEDIA_TYPE)


Handler = Callable[[Request, Exception], Awaitable[Response]]
LedgerFailureHandler = Callable[[LedgerFailed], None]
"""Called when the ledger needs a restart."""


_DETAIL_FROM_MESSAGE: Final[Mapping[type[Exception], str]] = {
    CannotClose: "books-refuse",
    BooksMoved: "books-refuse",
    CannotRetire: "books-refuse",
    CannotMove: "books-refuse",
    CannotRedate: "books-refuse",
    CannotRender: "cannot-render",
    TooManyViews: "books-refuse",
    UnsupportedQuestion: "unsupported-question",
}
"""Errors whose message becomes the `detail` of the answer."""


def translated(error: Exception, failed: LedgerFailureHandler) -> Refusal | None:
    """The refusal for an error that a route raised; None if it is a defect."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, Busy):
        return retry_later("too-many-requests" if error.own else "busy", str(error), error.seconds)
    if isinstance(error, (CalledOff, ClientDisconnect)):
        return Refusal("client-gone", "nobody waits for this answer")
    if isinstance(error, SequenceGap):
        return Refusal("sequence-gap", str(error), ack=error.ack)
    if isinstance(error, OverQuota):
        return retry_later("too-many-requests", str(error), _QUOTA_SECONDS)
    if isinstance(error, (LedgerUnavailable, LakeUnavailable)):
        return retry_later("ledger-unavailable", str(error))
    if isinstance(error, LedgerFailed):
        failed(error)
        return retry_later("ledger-unavailable", str(error))
    slug = next((slug for kind, slug in _DETAIL_FROM_MESSAGE.items() if isinstance(error, kind)), None)
    return None if slug is None else Refusal(slug, str(error))


def install(
    app: FastAPI,
    failed: LedgerFailureHandler,
    present: Callable[[Request, Refusal], Response] | None = None,
    recognise: Callable[[Request], Awaitable[None]] | None = None,
) -> None:
    """Makes the app answer every exception that `translated` knows with a problem document.

    failed: called when the ledger needs a restart.
    present: renders the answer instead, for example as an HTML page.
    recognise: finds out who sent a request that reached no route, so that its page has the caller's menu."""

    def known(error: Exception) -> Refusal:
        refusal = translated(error, failed)
        assert refusal is not None
        return refusal

    def handle(translate: Callable[[Any], Refusal]) -> Handler:
        async def handler(request: Request, error: Exception) -> Response:
            refusal = translate(error)
            if refusal.kind.status == HTTPStatus.METHOD_NOT_ALLOWED:
                refusal.headers["Allow"] = ", ".join(_methods(request))
            request.state.problem = refusal.slug
            if recognise is not None and translate is _http:
                await recognise(request)
            if present is not None:
                return present(request, refusal)
            return answer(refusal, request.url.path)

        return handler

    for kind in (
        Refusal, Busy, CalledOff, ClientDisconnect, SequenceGap, OverQuota, LedgerUnavailable, LakeUnavailable,
        LedgerFailed, *_DETAIL_FROM_MESSAGE,
    ):  # fmt: skip
        app.add_exception_handler(kind, handle(known))
    app.add_exception_handler(RequestValidationError, handle(_invalid))
    for status in _FRAMEWORK:
        app.add_exception_handler(status, handle(_http))


def _methods(request: Request) -> list[str]:
    """The methods that the path accepts, over all its routes."""
    methods: set[str] = set()
    for route in request.app.router.routes:
        match, _ = route.matches(request.scope)
        if match is not Match.NONE:
            methods |= route.methods or set()
    return sorted(methods)


def _invalid(error: RequestValidationError) -> Refusal:
    faults = [(name, _fault_text(name, fault)) for fault in error.errors()
              for name in [".".join(map(str, fault["loc"][1:]))]]  # fmt: skip
    return with_faults("invalid-parameter", faults)


def _fault_text(name: str, fault: Mapping[str, Any]) -> str:
    """The reason of a fault; of a filter by what is no dimension, with all that are."""
    if fault["type"] == "extra_forbidden" and name.startswith("where."):
        try:
            known_dimension(name.removeprefix("where."))
        except ValueError as error:
            return str(error)
    return fault_text(fault)


_FRAMEWORK: Final = {400: "malformed-body", 404: "not-found", 405: "method-not-allowed"}


def _http(error: Any) -> Refusal:
    """The framework's own errors: no such route, no such method, an unreadable body."""
    slug = _FRAMEWORK[error.status_code]
    return Refusal(slug, error.detail or HTTPStatus(error.status_code).phrase, headers=error.headers)


_REF = "#/components/schemas/{name}"


def _content(name: str, media_type: str = "application/json") -> dict[str, Any]:
    return {media_type: {"schema": {"$ref": _REF.format(name=name)}}}


def answers(description: str, *media_types: str) -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses of a route whose 200 answer has no schema."""
    return {200: {"description": description, "content": {media_type: {} for media_type in media_types}}}


WITHOUT_TOKEN: Final = frozenset({"/leading", "/livez", "/readyz"})
"""Routes that need no token."""
OPEN: Final = WITHOUT_TOKEN | {"/metrics"}
"""Routes that answer without a token; /metrics shows more with one."""
AGENT_ACK: Final[dict[int | str, dict[str, Any]]] = {200: {"description": "Committed", "content": _content("Ack")}}


def json_body(name: str, *, many: bool = False) -> dict[str, Any]:
    """OpenAPI description of a JSON body that the route itself reads and validates, after authorisation.

    name: of the schema in the document; many: the body is a list."""
    schema = {"$ref": _REF.format(name=name)}
    return {
        "required": True,
        "content": {"application/json": {"schema": {"type": "array", "items": schema} if many else schema}},
    }


PROBLEM_SCHEMA: Final[dict[str, Any]] = {
    "title": "Problem",
    "description": "RFC 9457. `type` is stable; `detail` is for people. Further members depend on the type.",
    "type": "object",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string", "format": "uri", "enum": [PROBLEM + slug for slug in PROBLEMS]},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "instance": {"type": "string"},
        "ack": {
            "$ref": _REF.format(name="Ack"),
            "description": "sequence-gap: the sequence numbers up to which the node's records are stored",
        },
        "errors": {
            "description": "invalid-parameter, invalid-body: the faults and their places",
            "type": "array",
            "items": {
                "type": "object",
                "required": ["at", "reason"],
                "properties": {"at": {"type": "string"}, "reason": {"type": "string"}},
            },
        },
        "limit_bytes": {"type": "integer", "description": "too-large: the limit"},
    },
    "additionalProperties": True,
}


def refuses(*slugs: str) -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses of a route that can answer with these problems, and with those of every route."""
    by_status: dict[int | str, list[str]] = defaultdict(list)
    for slug in (*slugs, "unauthenticated", "forbidden", "too-many-requests", "authority-unavailable", "busy"):
        by_status[PROBLEMS[slug].status].append(slug)
    return {
        status: {
            "description": "; ".join(f"`{slug}`: {PROBLEMS[slug].title}" for slug in of_status),
            "content": _content("Problem", MEDIA_TYPE),
        }
        for status, of_status in sorted(by_status.items(), key=lambda item: int(item[0]))
    }


def with_body(model: type[BaseModel], *slugs: str, at_most: int | None = None) -> dict[str, Any]:
    """OpenAPI arguments of a route that reads a body of this model, which no answer uses, and that can answer with
    these problems and with those of every body.

    at_most: the body is a list of the models with at most this length; None: one model."""
    schema = model.model_json_schema()
    if at_most is not None:
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": at_most}
    return {
        "openapi_extra": {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}},
        "responses": refuses("malformed-body", "too-large", "invalid-body", *slugs),
    }


def document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI 3.1 document of the app."""
    described = get_openapi(
        title=app.title,
        version=app.version,
        summary=app.summary,
        routes=app.routes,
        separate_input_output_schemas=app.separate_input_output_schemas,
    )
    schemas = described.setdefault("components", {}).setdefault("schemas", {})
    _, agent = schemas_of(Batch, Ack, PodReport, ref_template=_REF)
    schemas.update(agent)
    _, requests = models_json_schema([(Invoice, "validation")], ref_template="#/components/schemas/{model}")
    schemas.update(requests["$defs"])
    schemas["Problem"] = PROBLEM_SCHEMA
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    described["components"]["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
    }
    described["security"] = [{"bearer": []}]
    for address, path in described["paths"].items():
        for operation in path.values():
            if address in OPEN:
                operation["security"] = [] if address in WITHOUT_TOKEN else [{}, {"bearer": []}]
            if operation["responses"].get("422", {}).get("content", {}).get("application/json"):
                operation["responses"]["422"] = refuses("invalid-parameter")[422]
    described["components"]["schemas"] = dict(sorted(schemas.items()))
    return described
