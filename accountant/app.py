"""Composes the accountant's HTTP application from the API, the pages and the compatibility APIs."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from accountant.api import (
    admin_routes,
    bookkeeping_routes,
    ingest_routes,
    policy_routes,
    problems,
    statement_routes,
    usage_routes,
)
from accountant.api import problems as openapi
from accountant.api.dependencies import Deps
from accountant.api.middleware import AccessMiddleware
from accountant.web import job_pages, node_pages, overview_pages, sign_in_pages, statement_pages

ROUTES = (
    [
        route
        for router in (
            ingest_routes.usage_router,
            ingest_routes.import_router,
            ingest_routes.pod_router,
            admin_routes.gpu_router,
            admin_routes.router,
            usage_routes.query_router,
            usage_routes.window_router,
            statement_routes.statement_router,
            statement_routes.period_router,
            bookkeeping_routes.router,
            bookkeeping_routes.adjustment_router,
            bookkeeping_routes.price_router,
            usage_routes.budget_router,
            policy_routes.policy_router,
            policy_routes.decision_router,
            admin_routes.check_router,
            bookkeeping_routes.reconciliation_router,
            bookkeeping_routes.credit_router,
            bookkeeping_routes.audit_router,
            usage_routes.wait_router,
            usage_routes.job_router,
            admin_routes.backup_router,
            admin_routes.delivery_router,
            admin_routes.health_router,
            overview_pages.page_router,
            statement_pages.line_router,
            statement_pages.journal_router,
            overview_pages.decision_router,
            statement_pages.invoice_router,
            overview_pages.router,
            job_pages.router,
            node_pages.router,
        )
        for route in router.routes
    ]
    + sign_in_pages.ROUTES
    + overview_pages.STATIC
)
"""Shared by all apps of the process: an `include_router` would derive every one anew for each app, half a second, and
search 29 routers per request."""


class _App(FastAPI):
    """Batches of agents go to `usage` past the framework."""

    usage: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        batch = scope["type"] == "http" and scope["path"] == "/v1/usage" and scope["method"] == "POST"
        await (self.usage if batch else super().__call__)(scope, receive, send)


def create_app(deps: Deps) -> FastAPI:
    """An app that owns nothing: the builder of `deps` closes them after the last request."""
    app = _App(
        title="gputally accountant",
        version=version("gputally"),
        summary="The ledger of GPU-hours and cost.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.deps = deps
    problems.install(app, deps.failed, overview_pages.present)
    app.router.routes.extend(ROUTES)

    local_only = deps.settings.auth == "off"
    app.add_middleware(AccessMiddleware, clock=deps.clock, local_only=local_only)
    app.usage = AccessMiddleware(
        ingest_routes.ingest_app(deps), clock=deps.clock, local_only=local_only, answered=deps.metrics.answered
    )

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = openapi.document(app)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # the way FastAPI documents to extend it
    return app
