"""Draws dashboards with Grafana's panels in Chromium, from the answers of a real Prometheus.

scripts/grafana-preview.sh builds the page. It verifies queries, units, legends, thresholds and layout, but not
Grafana's loader, its migrations or its links."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page

from dashboards import lint
from tests.real import prometheus_history
from tests.real.programs import built
from tests.real.prometheus import Prometheus

WIDTH = 1440
POINTS_S = 900
"""Seconds between two points of a line."""
RATE_HOURS = 4 * prometheus_history.EVERY_HOURS
"""Hours of `$__rate_interval`: four scrape intervals."""
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>dashboard</title><link rel="stylesheet" href="preview.css"></head>
<body style="margin:0"><div id="root"></div><script src="board.js"></script><script src="preview.js"></script></body>
</html>
"""


def sent(expr: str, days: int, **chosen: str) -> str:
    """Return the expression as Grafana sends it for `days` days with every variable set to All."""
    written = {"__rate_interval": f"{RATE_HOURS}h", "__range": f"{days * 24}h", "peak_from": "8", "peak_to": "18"}
    return re.sub(r"\$(\w+)", lambda name: written.get(name[1], chosen.get(name[1], ".*")), expr)


def answers(server: Prometheus, dashboard: dict[str, Any], end_s: float, days: int) -> dict[str, list[Any]]:
    """Return the answers to each panel's queries by panel id."""
    found: dict[str, list[Any]] = {}
    for panel in lint.panels(dashboard):
        for target in panel["targets"]:
            expr = sent(target["expr"], days)
            if target["instant"]:
                series = [{**each, "values": [each["value"]]} for each in server.instant(expr, end_s)]
            else:
                series = server.range(expr, end_s - days * 86_400, end_s, POINTS_S)
            answer = {"refId": target["refId"], "legend": target["legendFormat"], "series": series}
            found.setdefault(str(panel["id"]), []).append(answer)
    return found


def drawn(
    browser: Browser, dashboard: dict[str, Any], found: dict[str, list[Any]], end_s: float, days: int, folder: Path
) -> tuple[Page, list[str]]:
    """Draw the dashboard, and return the page and the errors on it. folder: for its files."""
    site = Path(shutil.copytree(built("grafana-preview.sh"), folder / dashboard["uid"]))
    span = {"from": (end_s - days * 86_400) * 1000, "to": end_s * 1000, "width": WIDTH}
    board = json.dumps({"dashboard": dashboard, "answers": found, **span})
    (site / "board.js").write_text(f"window.board = {board};", encoding="utf-8")
    (site / "index.html").write_text(PAGE, encoding="utf-8")
    page = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto((site / "index.html").as_uri(), wait_until="networkidle")
    page.wait_for_selector("[data-panel]")
    return page, faults
