"""Lists the routes of the controller's pages."""

from __future__ import annotations

from fairshare.web import policy_pages, queue_pages
from fairshare.web.page_context import Page

ROUTES = (
    Page("GET", "/", "read", queue_pages.shares, for_teams=True),
    Page("GET", "/queue/", "read", queue_pages.queue, for_teams=True),
    Page("GET", "/decisions", "read", queue_pages.decisions),
    Page("GET", "/decision", "read", queue_pages.decision),
    Page("GET", "/policy", "read", policy_pages.form),
    Page("GET", "/preview/", "read", policy_pages.preview_page),
    Page("POST", "/policy", "policy", policy_pages.submit),
    Page("POST", "/policy/check", "policy", policy_pages.check),
    Page("POST", "/policy/file", "policy", policy_pages.file),
    Page("POST", "/policy/preview", "policy", policy_pages.preview),
    Page("POST", "/policy/apply", "policy", policy_pages.apply),
    Page("POST", "/preview/", "policy", policy_pages.cancel),
)
