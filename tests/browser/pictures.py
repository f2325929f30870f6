"""`make pictures`: the pictures in docs/img, from a simulated month."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from gputally.server import logs_and_metrics
from tests.browser.boards import take_pictures
from tests.browser.site import chromium, demo_site

FOLDER = Path(__file__).parents[2] / "docs" / "img"
WIDTH = 1280
PICTURES = {
    "report": 1500, "overview": 1200, "month": 1250, "team": 1200, "lines": 900, "jobs": 900, "job": 1200, "nodes": 900,
    "node": 900, "decisions": 900, "why": 1000, "prices": 800, "invoice": 1000, "coverage": 900,
    "shares": 760, "queue": 1100, "policy": 1300, "preview": 1250,
}  # fmt: skip
"""Which pages, and how much of each from the top, in pixels."""
MOST_MS = 120_000
"""For one page, on a machine that has other things to do."""


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
        for name in take_pictures(browser, FOLDER, Path(folder) / "boards"):
            console.print(f"docs/img/{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
