"""The parts of the OpenAPI document that FastAPI does not write: the agents' language and problems.

agent.wire is msgspec's, not pydantic's: its JSON Schema is generated and put beside the others.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Final

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from accountant.api.problems import MEDIA_TYPE, PROBLEMS
from accountant.books.reconcile import Invoice
from accountant.reported import PodReport
from agent.wire import PROBLEM, Ack, Batch

_REF = "#/components/schemas/{name}"


def _content(name: str, media_type: str = "application/json") -> dict[str, Any]:
    return {media_type: {"schema": {"$ref": _REF.format(name=name)}}}


def answers(description: str, *media_types: str) -> dict[int | str, dict[str, Any]]:
    """The 200 of a route whose content has no schema of ours."""
    return {200: {"description": description, "content": {media_type: {} for media_type in media_types}}}


ANYBODYS: Final = frozenset({"/livez", "/readyz"})
"""What needs no token."""
OPEN: Final = ANYBODYS | {"/metrics"}
"""The same, and what says more to who shows one."""
AGENT_BATCH: Final[dict[str, Any]] = {"required": True, "content": _content("Batch")}
AGENT_ACK: Final[dict[int | str, dict[str, Any]]] = {200: {"description": "Committed", "content": _content("Ack")}}


def json_body(name: str, *, many: bool = False) -> dict[str, Any]:
    """The request body of a route that reads and validates it itself, after letting the caller pass."""
    one = {"$ref": _REF.format(name=name)}
    return {
        "required": True,
        "content": {"application/json": {"schema": {"type": "array", "items": one} if many else one}},
    }


def inline_body(model: type[BaseModel], *, at_most: int | None = None) -> dict[str, Any]:
    """The same for a model that no answer shares; its schema stands where it is used. at_most: so many in a list."""
    one = model.model_json_schema()
    many = {"type": "array", "items": one, "minItems": 1, "maxItems": at_most}
    return {"required": True, "content": {"application/json": {"schema": one if at_most is None else many}}}


def text_body(media_type: str, description: str) -> dict[str, Any]:
    """A request body that is text of its own form."""
    return {"required": True, "description": description, "content": {media_type: {"schema": {"type": "string"}}}}


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
        "ack": {"$ref": _REF.format(name="Ack"), "description": "sequence-gap: how far the node's numbers go"},
        "errors": {
            "description": "invalid-parameter, invalid-body: every fault and its place",
            "type": "array",
            "items": {
                "type": "object",
                "required": ["at", "reason"],
                "properties": {"at": {"type": "string"}, "reason": {"type": "string"}},
            },
        },
        "limit_bytes": {"type": "integer", "description": "too-large: the bound"},
    },
    "additionalProperties": True,
}


def refuses(*slugs: str) -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses of a route that may answer these problems, besides those any route may."""
    by_status: dict[int | str, list[str]] = defaultdict(list)
    for slug in (*slugs, "unauthenticated", "forbidden", "too-many-requests", "authority-unavailable"):
        by_status[PROBLEMS[slug].status].append(slug)
    return {
        status: {
            "description": "; ".join(f"`{slug}`: {PROBLEMS[slug].title}" for slug in named),
            "content": _content("Problem", MEDIA_TYPE),
        }
        for status, named in sorted(by_status.items(), key=lambda item: int(item[0]))
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
    _, agent = msgspec.json.schema_components([Batch, Ack, PodReport], ref_template=_REF)
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
                operation["security"] = [] if address in ANYBODYS else [{}, {"bearer": []}]
            if operation["responses"].get("422", {}).get("content", {}).get("application/json"):
                operation["responses"]["422"] = refuses("invalid-parameter")[422]
    described["components"]["schemas"] = dict(sorted(schemas.items()))
    return described
