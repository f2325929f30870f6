"""A valid request of every route of the accountant, as the start of hostile ones.

The routes come from the application. A route whose values are missing here is a KeyError."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import msgspec
from fastapi.dependencies.utils import get_flat_params
from fastapi.routing import APIRoute

from accountant.composition import ROUTES
from tests.fakes.memory_ledger import MINUTE_MS, NOW_MS
from tests.price_books import price_book_text
from tests.usage_records import interval, pod_facts, pod_holder

BEGIN = NOW_MS - 60 * MINUTE_MS
PRICES = price_book_text(H100=2.5)
NORMAL = {
    "month": "2026-10", "id": "prod~vision~Job~train", "name": "ledger-20261101T000000Z", "proposal": "0" * 16,
    "cluster": "prod", "node": "node-1", "team": "vision", "number": "1", "at_ms": str(BEGIN), "source": "slurm",
    "reason": "because", "by": "team", "value": "vision",
}  # fmt: skip
"""Valid values of parameters that a route requires."""
_EPOCH = "01930000-0000-7000-8000-000000000000"
_ROW = msgspec.to_builtins(
    interval(BEGIN, "GPU-1", pod_holder("train-0", "vision"), span_ms=MINUTE_MS, energy_uj=1, memory_mib_s=1)
) | {"seq": 1}
_FACT = msgspec.to_builtins(
    pod_facts("train-0", BEGIN, namespace="vision", created_ms=BEGIN, scheduled_ms=BEGIN, started_ms=BEGIN, priority=1)
) | {"seq": 2}
_BATCH = {
    "schema": 1, "cluster": "prod", "node": "node-1", "boot_id": "b", "epoch": _EPOCH, "first_seq": 1, "oldest_seq": 1,
    "intervals": [_ROW], "facts": [_FACT], "skipped": [],
}  # fmt: skip
_IMPORT = {**_BATCH, "epoch": f"import:slurm:{BEGIN:014}", "intervals": [{**_ROW, "method": "imported"}], "facts": []}
_SPAN = {"start": "2026-11-01T00:00:00Z", "end": "2026-11-01T01:00:00Z"}
_CREDIT = {"node": "node-1", **_SPAN, "cluster": "prod", "share": "0.5"}
_DECISION = {
    "id": "d", "at_ms": BEGIN, "kind": "weight", "target": "kai", "subject": "vision", "mode": "dry-run", "reason": "r",
    "policy_version": "v",
}  # fmt: skip
_POLICY = {
    "schema": 1, "queues": [{"name": "vision", "deserved": 4, "weight": 1, "team": "vision"}],
    "window": {"kind": "sliding", "size": "7d", "half_life": "1d"}, "measure": "allocated",
}  # fmt: skip
_INVOICE = {
    "schema": 1, "currency": "USD", "source": "cloud",
    "lines": [{"item": "gpu", "gpu_model": "H100", "gpu_hours": "1.5", "amount": "3.75"}],
}  # fmt: skip
BODIES: dict[str, Any] = {
    "/v1/usage": _BATCH,
    "/v1/imports/usage": _IMPORT,
    "/v1/imports": {
        "cluster": "prod",
        "source": "slurm",
        "epoch": _IMPORT["epoch"],
        "start_ms": BEGIN,
        "end_ms": NOW_MS,
        "sent_us": 1,
        "nodes": 1,
        "origin": "o",
    },
    "/v1/imports/withdraw": {
        "cluster": "prod",
        "source": "slurm",
        "start_ms": BEGIN,
        "end_ms": NOW_MS,
        "reason": "r",
    },
    "/v1/pods": {"cluster": "prod", "source": "s", "pods": [_FACT]},
    "/v1/gpus/move": {"cluster": "prod", "node": "node-2", "gpus": ["GPU-1"], "since": _SPAN["end"], "reason": "r"},
    "/v1/gpus/retire": {"cluster": "prod", "node": "node-1", "since": _SPAN["end"], "reason": "r"},
    "/v1/periods/{month}/close": {"reason": "r", "acknowledge": ["coverage"]},
    "/v1/periods/{month}/reopen": {"reason": "r"},
    "/v1/periods/{month}/publish": {"reason": "r"},
    "/v1/periods/{month}/drafts": {"reason": "r"},
    "/v1/adjustments": {"month": "2026-10", "team": "vision", "amount": "1.50", "reason": "r", "approved_by": "a"},
    "/v1/adjustments/preview": {
        "month": "2026-10",
        "team": "vision",
        "amount": "1.50",
        "reason": "r",
        "approved_by": "a",
    },
    "/v1/corrections": {},
    "/v1/credits/preview": _CREDIT,
    "/v1/credits": {**_CREDIT, "reason": "r", "approved_by": "a"},
    "/v1/periods/{month}/proposals/{proposal}/take": {"reason": "r"},
    "/v1/periods/{month}/proposals/{proposal}/refuse": {"reason": "r"},
    "/v1/reconciliation/{month}": _INVOICE,
    "/v1/prices/preview": PRICES,
    "/v1/prices": PRICES,
    "/v1/policy": _POLICY,
    "/v1/decisions": [_DECISION],
    "/v1/jobs/{id}/progress": [{"epoch": 1, "at": _SPAN["start"]}],
    "/v1/backups": {},
    "/v1/deliveries/again": {"key": "k", "reason": "r"},
    "/v1/clock/accept": {},
    "/v1/clock/heal": {"reason": "r"},
    "/v1/lake/repair": {"reason": "r"},
    "/node/{cluster}/{node}/gpus": "gpu=GPU-1&reason=r",
    "/invoices/{month}": "step=close&reason=r",
    "/invoice/{month}": "step=keep&lines=item,amount%0Ax,1",
    "/views": "name=a&address=%2Fexplore%3Fby%3Dteam",
}
"""A valid body of every route that takes one; a text is sent as it is."""
API_ROUTES = [route for route in ROUTES if isinstance(route, APIRoute)]
READS = [route for route in API_ROUTES if "GET" in (route.methods or ())]
WRITES = [route for route in API_ROUTES if "GET" not in (route.methods or ())]


def address(route: APIRoute, changed: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Return path and query of a request with these values, and with valid values of what the route requires."""
    path, query = route.path, {}
    for parameter in get_flat_params(route.dependant):
        name = parameter.alias
        for marker in ("{" + name + "}", "{" + name + ":path}"):
            if marker in path:
                path = path.replace(marker, quote(changed.get(name, NORMAL[name]), safe=""))
                break
        else:
            if name in changed:
                query[name] = changed[name]
            elif parameter.field_info.is_required():
                query[name] = NORMAL[name]
    return path, query


def sent(body: Any) -> bytes:
    return body.encode() if isinstance(body, str) else json.dumps(body).encode()
