"""Pictures of the dashboards, drawn by Grafana's own panels over a day of the demo."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser

from dashboards.__main__ import DASHBOARDS
from tests.real import history
from tests.real.preview import answers, drawn
from tests.real.prometheus import backfill, prometheus

DAYS = 1


def take_pictures(browser: Browser, out: Path, folder: Path) -> Iterator[str]:
    """Each dashboard as `dashboard-NAME.png` in `out`; gives the names. folder: for everything else, made here."""
    (folder / "demo").mkdir(parents=True)
    recorder = history.Recorder()
    with history.pipeline(folder / "demo", DAYS) as demo:
        history.scraped(recorder, demo)
        end_s = demo.scenario.end_ms / 1000
    history.staged(recorder, demo.scenario.start_ms, DAYS * 24)
    backfill(recorder.openmetrics(), folder)
    with prometheus(folder, arguments=[f"--query.lookback-delta={60 * history.EVERY_HOURS + 5}m"]) as server:
        for name, render in DASHBOARDS.items():
            board = json.loads(render())
            page, _ = drawn(browser, board, answers(server, board, end_s, DAYS), end_s, DAYS, folder)
            page.screenshot(path=out / f"dashboard-{name}.png", full_page=True)
            page.close()
            yield f"dashboard-{name}"
