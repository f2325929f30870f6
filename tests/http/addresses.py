"""The addresses that the accountant serves to readers, each in exactly one of two tables, and how to ask for them."""

from __future__ import annotations

import re

FIGURES = {
    "/v1/usage": "", "/v1/cost": "", "/v1/guarantees": "", "/v1/jobs": "",
    "/v1/windows": "size=7d", "/v1/statement": "month=MONTH",
    "/v1/report": "month=MONTH", "/v1/periods": "", "/v1/budgets": "", "/v1/check": "", "/v1/waits": "",
    "/v1/waits/unused": "",
    "/v1/gpus/owners": "", "/metrics": "", "/": "", "/month": "", "/month/{month}": "", "/month/{month}/lines": "",
    "/month/{month}/lines.csv": "", "/team/{team:path}": "month=MONTH", "/coverage": "", "/decisions": "",
    "/invoice": "", "/invoice/{month}": "", "/jobs": "", "/jobs.csv": "", "/jobs.parquet": "", "/nodes": "",
    "/nodes.csv": "", "/nodes.parquet": "", "/v1/nodes": "",
    "/node/{cluster}/{node}": "", "/prices": "",
    "/proposals": "", "/job/{id:path}": "", "/v1/jobs/{id}": "", "/v1/periods/{month}": "",
    "/invoice/{month}/lines.csv": "", "/invoices": "", "/invoices.csv": "",
    "/invoices/{month}": "", "/group": "by=cluster&value=prod&month=MONTH", "/explore": "",
    "/explore.csv": "", "/explore.parquet": "", "/waits": "", "/waits.csv": "",
    "/savings": "month=MONTH&team=vision", "/savings.csv": "month=MONTH&team=vision",
}  # fmt: skip
"""Addresses that show figures of the ledger, with their parameters."""
NO_FIGURES = {
    "/v1/adjustments", "/v1/audit", "/v1/backups", "/v1/backups/{name}", "/v1/clock", "/v1/corrections",
    "/v1/periods/{month}/changes",
    "/v1/decisions", "/v1/deliveries", "/v1/imports", "/v1/policy", "/v1/policy/versions", "/v1/prices",
    "/v1/prices/versions", "/v1/proposals", "/v1/periods/{month}/proposals", "/v1/quarantine", "/v1/sessions/ended",
    "/act/{number}", "/audit", "/audit.csv",
    "/decisions/{at_ms}/{id:path}", "/leading", "/livez", "/readyz", "/openapi.json",
    "/static/style.css", "/static/zoom.js", "/favicon.ico", "/sign-in", "/sign-in/done", "/signed-out",
}  # fmt: skip
"""Addresses of entries by users and programs, which have their own times."""


def address(route: str, month: str, team: str = "vision") -> str:
    """Return the address of a route for a month, a team and the job, node and entry of the tests' ledgers."""
    path = re.sub(r"\{month\}", month, route)
    path = re.sub(r"\{team:path\}", team, path).replace("{cluster}/{node}", "prod/node-1")
    path = re.sub(r"\{id(:path)?\}", "prod~vision~Pod~train-0", path)
    query = FIGURES.get(route, "").replace("MONTH", month)
    return f"{path}?{query}" if query else path
