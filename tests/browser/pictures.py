"""`make pictures`: the pictures in docs/img, from a simulated month."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from rich.console import Console

from accountant import log
from tests.browser.boards import take_pictures
from tests.browser.site import chromium, demo_site

FOLDER = Path(__file__).parents[2] / "docs" / "img"
WIDTH = 1280
PICTURES = {
    "report": 1500, "overview": 1200, "team": 1200, "decisions": 900, "shares": 760, "policy": 1300, "preview": 1250,
}  # fmt: skip
"""Which pages, and how much of each from the top, in pixels."""
MOST_MS = 120_000
"""For one page, on a machine that has other things to do."""


def main() -> int:
    console = Console()
    log.configure("error")
    with (
        tempfile.TemporaryDirectory(prefix="gputally-pictures-") as folder,
        console.status("simulating a month"),
        demo_site(Path(folder), days=31) as site,
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
