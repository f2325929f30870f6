"""Lists the routes of the controller's pages."""

from __future__ import annotations

from fairshare.web import policy_pages, queue_pages
from fairshare.web.page_context import Route
from fairshare.web.sign_in_pages import OPENINGS

__all__ = ["OPENINGS", "ROUTES"]

ROUTES = (
    Route("GET", "/", "read", queue_pages.shares, for_teams=True),
    Route("GET", "/queue/", "read", queue_pages.queue, for_teams=True),
    Route("GET", "/decisions", "read", queue_pages.decisions),
    Route("GET", "/decision", "read", queue_pages.decision),
    Route("GET", "/policy", "read", policy_pages.form),
    Route("GET", "/preview/", "read", policy_pages.preview_page),
    Route("POST", "/policy", "policy", policy_pages.submit),
    Route("POST", "/policy/check", "policy", policy_pages.check),
    Route("POST", "/policy/file", "policy", policy_pages.file),
    Route("POST", "/policy/preview", "policy", policy_pages.preview),
    Route("POST", "/policy/apply", "policy", policy_pages.apply),
    Route("POST", "/preview/", "policy", policy_pages.cancel),
)
