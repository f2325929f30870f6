"""`make pictures`: draws docs/img, which shows the pages over a simulated month and the dashboards over a day."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser
from rich.console import Console

from dashboards.__main__ import DASHBOARDS
from gputally.server import logs_and_metrics
from tests.browser.demo_pages import chromium, demo_site
from tests.real import prometheus_history
from tests.real.dashboard_preview import answers, drawn
from tests.real.prometheus import backfill, prometheus

FOLDER = Path(__file__).parents[2] / "docs" / "img"
WIDTH = 1280
PICTURES = {
    "report": 1500, "overview": 1200, "explore": 1300, "month": 1250,
    "team": 1200, "lines": 900, "jobs": 900, "waits": 1200, "job": 1200, "nodes": 900,
    "node": 900, "decisions": 900, "why": 1000, "prices": 800, "invoice": 1000, "coverage": 900,
    "shares": 760, "queue": 1100, "policy": 1300, "preview": 1250,
}  # fmt: skip
"""The pictured pages, with the height of each picture in pixels."""
MOST_MS = 120_000
"""Time limit of one page, on a busy machine."""
DAYS = 1
"""Days that the dashboards show."""


def main() -> int:
    console = Console()
    logs_and_metrics.configure("error")
    with (
        tempfile.TemporaryDirectory(prefix="gputally-pictures-") as folder,
        console.status("simulating a month"),
        contextlib.chdir(folder),  # so that pages name the files they were made from as anybody's would
        demo_site(Path(), days=31) as site,
        chromium() as browser,
    ):
        for name, height in PICTURES.items():
            page = browser.new_page(viewport={"width": WIDTH, "height": height}, color_scheme="light")
            page.goto(site.pages[name], wait_until="networkidle", timeout=MOST_MS)
            page.screenshot(path=FOLDER / f"{name}.png")
            page.close()
            console.print(f"docs/img/{name}.png")
        for name in dashboard_pictures(browser, FOLDER, Path(folder) / "boards"):
            console.print(f"docs/img/{name}.png")
    return 0


def dashboard_pictures(browser: Browser, out: Path, folder: Path) -> Iterator[str]:
    """Draw each dashboard with Grafana's panels as `dashboard-NAME.png` in `out`, and return the names. folder: for
    temporary files."""
    (folder / "demo").mkdir(parents=True)
    recorder = prometheus_history.Recorder()
    with prometheus_history.pipeline(folder / "demo", DAYS) as demo:
        prometheus_history.scraped(recorder, demo)
        end_s = demo.scenario.end_ms / 1000
    prometheus_history.staged(recorder, demo.scenario.start_ms, DAYS * 24)
    backfill(recorder.openmetrics(), folder)
    with prometheus(folder, arguments=[f"--query.lookback-delta={60 * prometheus_history.EVERY_HOURS + 5}m"]) as server:
        for name, render in DASHBOARDS.items():
            board = json.loads(render())
            page, _ = drawn(browser, board, answers(server, board, end_s, DAYS), end_s, DAYS, folder)
            page.screenshot(path=out / f"dashboard-{name}.png", full_page=True)
            page.close()
            yield f"dashboard-{name}"


if __name__ == "__main__":
    sys.exit(main())
