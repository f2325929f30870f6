"""Every address of the pages, and the scope that it wants; those for signing in want none."""

from __future__ import annotations

from fairshare.web import governing, reading
from fairshare.web.signing import OPENINGS
from fairshare.web.site import Route

__all__ = ["OPENINGS", "ROUTES"]

ROUTES = (
    Route("GET", "/", "read", reading.shares, for_teams=True),
    Route("GET", "/queue/", "read", reading.queue, for_teams=True),
    Route("GET", "/decisions", "read", reading.decisions),
    Route("GET", "/decision", "read", reading.decision),
    Route("GET", "/policy", "read", governing.form),
    Route("GET", "/preview/", "read", governing.preview_page),
    Route("POST", "/policy", "policy", governing.submit),
    Route("POST", "/policy/check", "policy", governing.check),
    Route("POST", "/policy/file", "policy", governing.file),
    Route("POST", "/policy/preview", "policy", governing.preview),
    Route("POST", "/policy/apply", "policy", governing.apply),
    Route("POST", "/preview/", "policy", governing.cancel),
)
