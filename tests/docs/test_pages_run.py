"""Every unmarked command of the pages runs, in order, and prints what its page shows.

`GPUTALLY_UPDATE=1` puts what is printed now into the pages, where they show it without an ellipsis. Read the
difference.
"""

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
from tests.docs.fences import COMMANDS, Fence, fences, renewed, same, steps
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
        yield Shell(tmp_path, {"GPUTALLY_URL": url, "COLUMNS": "120", "TOKEN": "reader"})


def put(folder: Path, fence: Fence) -> None:
    """The file that the page shows, where it names one."""
    if fence.language in ("yaml", "csv", "json") and fence.words:
        name = fence.words[-1]
        if "." in name:
            (folder / name).write_text(fence.text, "utf-8")


def follow(page: str, mark: str | None, shell: Shell) -> list[str]:
    """Types what the page says, from its top, the blocks with that mark. Returns what came otherwise than it shows."""
    otherwise = []
    for fence in PAGES[page]:
        put(shell.folder, fence)
        if fence.language not in COMMANDS or fence.mark != mark:
            continue
        for step in steps(fence):
            said = shell.run(step.command)
            good = said.code == 0 if step.expected is None else same(step.expected, said.printed)
            if not good and os.environ.get("GPUTALLY_UPDATE"):
                (ROOT / page).write_text(renewed((ROOT / page).read_text("utf-8"), step, said.printed), "utf-8")
            otherwise += [] if good else [f"{step.where}: {step.command}\n{said.printed}"]
    return otherwise


@pytest.mark.parametrize("page", RUN)
def test_the_commands_of_the_page_run(page: str, shell: Shell) -> None:
    otherwise = follow(page, None, shell)
    assert otherwise == [], "\n\n".join(otherwise)


@pytest.mark.parametrize(
    "fence", [pytest.param(f, id=f.where) for blocks in PAGES.values() for f in blocks if f.language == "yaml"]
)
def test_the_yaml_of_the_pages_is_taken(fence: Fence) -> None:
    try:
        kinds.check(fence.words[0], fence.text, fence.where)
    except FileFault as fault:
        pytest.fail(os.linesep.join(fault.faults))
