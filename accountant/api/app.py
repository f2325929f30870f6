"""The HTTP application: routers over given dependencies. Composes, decides nothing."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI

from accountant.api import (
    adjustments,
    audit,
    backups,
    budgets,
    checks,
    clock,
    credits,
    decisions,
    deliveries,
    gpus,
    health,
    imports,
    jobs,
    openapi,
    periods,
    pods,
    policy,
    prices,
    problems,
    proposals,
    queries,
    reconciliation,
    statements,
    usage,
    waits,
    windows,
)
from accountant.api.asgi import App, Receive, Scope, Send
from accountant.api.deps import Deps
from accountant.api.guard import Guard
from accountant.web import acts, deciding, invoices, late, lines, machines, pages, signin, work

ROUTES = [
    route
    for module in (
        usage, imports, pods, gpus, clock, queries, windows, statements, periods, proposals, adjustments, prices,
        budgets, policy, decisions, checks, reconciliation, credits, audit, waits, jobs, backups, deliveries, health,
        pages, lines, acts, deciding, invoices, late, work, machines, signin,
    )
    for route in module.router.routes
]  # fmt: skip
"""Shared by all apps of the process: an `include_router` would derive every one anew for each app, half a second, and
search 29 routers per request."""


class _App(FastAPI):
    """Batches of agents go to `usage` past the framework."""

    usage: App

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        batch = scope["type"] == "http" and scope["path"] == "/v1/usage" and scope["method"] == "POST"
        await (self.usage if batch else super().__call__)(scope, receive, send)


def create_app(deps: Deps) -> FastAPI:
    """An app that owns nothing: whoever built `deps` closes them after the last request."""
    app = _App(
        title="gputally accountant",
        version=version("gputally"),
        summary="The ledger of GPU-hours and cost.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.deps = deps
    problems.install(app, deps.failed, pages.present)
    app.router.routes.extend(ROUTES)

    local_only = deps.settings.auth == "off"
    app.add_middleware(Guard, clock=deps.clock, local_only=local_only)
    app.usage = Guard(usage.directly(deps), clock=deps.clock, local_only=local_only, answered=deps.metrics.answered)

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = openapi.document(app)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # the way FastAPI documents to extend it
    return app
