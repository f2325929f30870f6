"""The commands that take longer than `make test` has, each as a process of its own, as a reader would start them."""

from __future__ import annotations

from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from rich.console import Console

from accountant.core.periods import Month
from gputally.demo.__main__ import simulate
from gputally.demo.pipeline import Pipeline
from gputally.demo.scenario import Options, build
from tests.docs.conftest import FOLDERS, ROOT
from tests.docs.following import follow, with_commands
from tests.docs.shell import Shell

pytestmark = pytest.mark.real
UTC = ZoneInfo("UTC")


@pytest.mark.parametrize("page", with_commands("slow"))
def test_the_slow_commands_of_the_page_run(page: str, tmp_path: Path) -> None:
    for name in (*FOLDERS, "gputally", ".venv"):
        (tmp_path / name).symlink_to(ROOT / name)
    otherwise = follow(page, ["slow"], Shell(tmp_path, {"COLUMNS": "120"}, in_process=False))
    assert otherwise == [], "\n\n".join(otherwise)


@pytest.mark.timeout(1_800)  # a month takes minutes where other tests run beside it
@pytest.mark.parametrize("page", with_commands("demo"))
def test_what_follows_the_demo_runs_against_its_pages(page: str, tmp_path: Path) -> None:
    """Every page's commands for a second terminal, after a whole month: the demo's clock stands at the next one."""
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    demo = build(Options())
    assert Month.spanning(demo.start_ms, demo.end_ms, UTC) is not None
    with Pipeline(demo, tmp_path, 0) as pipeline:
        simulate(demo, pipeline, Console(quiet=True), tmp_path)
        otherwise = follow(page, ["demo"], Shell(tmp_path, {"COLUMNS": "120", "GPUTALLY_URL": pipeline.url}, False))
    assert otherwise == [], "\n\n".join(otherwise)
