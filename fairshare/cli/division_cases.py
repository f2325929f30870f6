"""Reads cases of a division from JSON.

A case has the keys `name, total, kValue, queues[], function, resource`, and a queue the keys `name, request, deserved,
limit, overQuotaWeight, usage, priority, creation, parent, initialFairShare`. Further keys of a conformance file (such
as `expected`) are ignored, and any other key is a fault of the case."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, Field

from accountant.wire.option_types import MOST
from fairshare.core.queues_and_weights import UNLIMITED, DivisionProblem, Function, QueueClaim
from gputally.base.errors import DivisionError
from gputally.base.untrusted_text import UNDECODABLE
from gputally.server.config_loading import Model, faults_of

_IGNORED = {"source", "expected", "expectedRemaining", "deterministic", "alternatives", "note", "meta"}


def _quota(value: float) -> float:
    if UNLIMITED < value < 0:
        raise ValueError(f"{value:g} is neither -1 (unlimited) nor 0 or more")
    return value


Amount = Annotated[float, Field(ge=0, le=MOST)]


Quota = Annotated[float, Field(ge=UNLIMITED, le=MOST), AfterValidator(_quota)]


class _Case(Model, strict=True):
    """A JSON object of a case. Unknown keys, and texts in place of numbers, are faults."""


class CaseQueue(_Case):
    """A queue of a case, with the fields of `QueueClaim`."""

    name: str = Field(min_length=1)
    request: Amount
    deserved: Quota = 0.0
    limit: Quota = UNLIMITED
    weight: Amount = Field(default=1.0, alias="overQuotaWeight")
    usage: Annotated[float, Field(ge=-MOST, le=MOST)] = 0.0
    priority: int = 100
    creation: int = 0
    parent: str | None = None
    initial: Amount = Field(default=0.0, alias="initialFairShare")


class DivisionCase(_Case):
    """A case, with the fields of `DivisionProblem`."""

    name: str = ""
    total: Amount
    k: Amount = Field(default=0.0, alias="kValue")
    queues: list[CaseQueue]
    function: Function = "hierarchy"
    resource: str = "GPU"


def parse(text: str | bytes) -> tuple[DivisionProblem, ...]:
    """Return the cases of a JSON document. Raises DivisionError that names the case and the key at fault."""
    try:
        document = json.loads(text)
    except UNDECODABLE as error:
        raise DivisionError(f"not JSON: {error}") from error
    if isinstance(document, Mapping) and "vectors" in document:
        document = document["vectors"]
    cases = document if isinstance(document, list) else [document]
    if not cases:
        raise DivisionError("it contains no case: a case has the keys total and queues")
    return tuple(_problem(case, number) for number, case in enumerate(cases, 1))


def _problem(raw: object, number: int) -> DivisionProblem:
    if not isinstance(raw, Mapping):
        raise DivisionError(f"case {number}: it is not a JSON object with the keys total and queues")
    content = {key: value for key, value in raw.items() if key not in _IGNORED}
    name = raw.get("name") or f"case {number}"
    label = f"case {name!r}" if raw.get("name") else name
    for path, message in faults_of(content, DivisionCase):
        raise DivisionError(f"{label}: {'.'.join(map(str, path))}: {message}")
    case = DivisionCase.model_validate(content)
    claims = tuple(QueueClaim(**{**queue.model_dump(), "parent": queue.parent or None}) for queue in case.queues)
    return DivisionProblem(name, case.total, case.k, claims, case.function, case.resource)
