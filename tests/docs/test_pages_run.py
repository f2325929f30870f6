"""Every unmarked command of the pages runs, in order, and prints what its page shows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from accountant import log
from agent.clock import SystemClock
from agent.yamlfile import FileFault
from tests.docs import kinds, site
from tests.docs.conftest import ROOT, written
from tests.docs.fences import COMMANDS, Fence, fences, same, steps
from tests.docs.shell import Shell

FOLDERS = ("accountant", "dashboards", "docs", "fairshare", "helm", "tests")
"""Of the checkout, by links: paths in the pages begin there."""
PAGES = {str(page.relative_to(ROOT)): list(fences(page, text)) for page, text in written().items()}
RUN = [name for name, blocks in PAGES.items() if any(f.language in COMMANDS and f.mark is None for f in blocks)]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The ledger that the commands ask; whatever runs meanwhile says only what went wrong."""
    folder = tmp_path_factory.mktemp("site")
    log.configure("error")
    site.make(folder)
    yield folder
    structlog.reset_defaults()


@pytest.fixture
def shell(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    """A folder as the pages take it for granted: a checkout's folders, the files they name, an accountant to ask."""
    for name in FOLDERS:
        (tmp_path / name).symlink_to(ROOT / name)
    site.stage(tmp_path)
    monkeypatch.setattr(SystemClock, "wall_ms", lambda self: site.NOW_MS)
    with site.answering(made, tmp_path / "var") as url:
        yield Shell(tmp_path, {"GPUTALLY_URL": url, "COLUMNS": "100", "TOKEN": "reader"})


def put(folder: Path, fence: Fence) -> None:
    """The file that the page shows, where it names one."""
    if fence.language in ("yaml", "csv", "json") and fence.words:
        name = fence.words[-1]
        if "." in name:
            (folder / name).write_text(fence.text, "utf-8")


@pytest.mark.parametrize("page", RUN)
def test_the_commands_of_the_page_run(page: str, shell: Shell) -> None:
    for fence in PAGES[page]:
        put(shell.folder, fence)
        if fence.language not in COMMANDS or fence.mark is not None:
            continue
        for step in steps(fence):
            said = shell.run(step.command)
            where = f"{step.where}: {step.command}"
            if step.expected is None:
                assert said.code == 0, f"{where}\n{said.printed}"
            else:
                assert same(step.expected, said.printed), f"{where}\n{said.printed}"


@pytest.mark.parametrize(
    "fence", [pytest.param(f, id=f.where) for blocks in PAGES.values() for f in blocks if f.language == "yaml"]
)
def test_the_yaml_of_the_pages_is_taken(fence: Fence) -> None:
    try:
        kinds.check(fence.words[0], fence.text, fence.where)
    except FileFault as fault:
        pytest.fail(os.linesep.join(fault.faults))
