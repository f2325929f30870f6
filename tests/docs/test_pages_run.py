"""Every command of the pages that needs no cluster and no GPU runs, in order, and prints the output on its page.

`GPUTALLY_UPDATE=1` updates the outputs on the pages, except those with an ellipsis. Review the difference."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from rich.console import Console

from gputally.base.yaml_file import FileFault
from gputally.demo.options import DemoOptions
from gputally.demo.pipeline import Pipeline
from gputally.demo.scenario import build
from gputally.demo.session import simulate
from tests.docs import yaml_validators
from tests.docs.code_blocks import PAGES, ROOT, CodeBlock, with_commands
from tests.docs.conftest import FOLDERS
from tests.docs.page_commands import Shell, follow


@pytest.mark.parametrize("page", with_commands(None))
def test_the_commands_of_the_page_run(page: str, shell: Shell) -> None:
    otherwise = follow(page, [None], shell)
    assert otherwise == [], "\n\n".join(otherwise)


@pytest.mark.real
@pytest.mark.parametrize("page", with_commands("slow"))
def test_the_slow_commands_of_the_page_run(page: str, tmp_path: Path) -> None:
    """Each as a process, as a reader would start it."""
    for name in (*FOLDERS, "gputally", ".venv"):
        (tmp_path / name).symlink_to(ROOT / name)
    otherwise = follow(page, ["slow"], Shell(tmp_path, {"COLUMNS": "120"}, in_process=False))
    assert otherwise == [], "\n\n".join(otherwise)


@pytest.mark.real
@pytest.mark.timeout(1_800)  # a month takes minutes where other tests run beside it
@pytest.mark.parametrize("page", with_commands("demo"))
def test_what_follows_the_demo_runs_against_its_pages(page: str, tmp_path: Path) -> None:
    """Every page's commands for a second terminal, after the whole demo, whose clock stops in the middle of a month."""
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    demo = build(DemoOptions())
    with Pipeline(demo, tmp_path, 0) as pipeline:
        simulate(demo, pipeline, Console(quiet=True), tmp_path, threading.Event())
        otherwise = follow(page, ["demo"], Shell(tmp_path, {"COLUMNS": "120", "GPUTALLY_URL": pipeline.url}, False))
    assert otherwise == [], "\n\n".join(otherwise)


@pytest.mark.parametrize(
    "block",
    [pytest.param(f, id=f.where) for blocks in PAGES.values() for f in blocks if f.language == "yaml" and f.usable],
)
def test_the_yaml_of_the_pages_is_taken(block: CodeBlock) -> None:
    try:
        yaml_validators.check(block.words[0], block.text, block.where)
    except FileFault as fault:
        pytest.fail(os.linesep.join(fault.faults))
