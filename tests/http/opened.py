"""What the application serves, and which of it everybody may ask for."""

from __future__ import annotations

from fastapi.routing import iter_route_contexts

OPEN = {
    ("GET", "/leading"),
    ("GET", "/livez"),
    ("GET", "/readyz"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/static/style.css"),
    ("GET", "/favicon.ico"),
    ("GET", "/sign-in"),
    ("GET", "/sign-in/done"),
    ("POST", "/sign-out"),
    ("GET", "/signed-out"),
}
"""What nobody needs a token for: nothing about teams but what /metrics is configured to show."""


def routes(app):
    return {
        (method, route.path)
        for route in iter_route_contexts(app.routes)
        for method in (route.methods or set()) - {"HEAD"}
    }
