"""Typing what a page says, from its top."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from tests.docs.conftest import ROOT, written
from tests.docs.fences import COMMANDS, Fence, fences, renewed, same, steps
from tests.docs.shell import Shell

PAGES = {str(page.relative_to(ROOT)): list(fences(page, text)) for page, text in written().items()}
_NOTHING: Mapping[str, str] = {}


def with_commands(mark: str | None) -> list[str]:
    """The pages that have commands with that mark; None: without one."""
    return [name for name, blocks in PAGES.items() if any(f.language in COMMANDS and f.mark == mark for f in blocks)]


def put(folder: Path, fence: Fence) -> None:
    """The file that the page shows, where it names one."""
    if fence.language in ("yaml", "csv", "json") and fence.words:
        name = fence.words[-1]
        if "." in name:
            (folder / name).write_text(fence.text, "utf-8")


def follow(
    page: str, marks: Collection[str | None], shell: Shell, stands_for: Mapping[str, str] = _NOTHING
) -> list[str]:
    """Type the blocks with one of these marks, top down. stands_for: what a reader puts for a word in capitals.

    Returns what came otherwise than the page shows."""
    names = re.compile("|".join(rf"(?<![\w-]){re.escape(name)}(?![\w-])" for name in stands_for) or r"(?!)")
    otherwise = []
    for fence in PAGES[page]:
        put(shell.folder, fence)
        if fence.language not in COMMANDS or fence.mark not in marks:
            continue
        for step in steps(fence):
            said = shell.run(names.sub(lambda found: stands_for[found[0]], step.command))
            good = said.code == 0 if step.expected is None else same(step.expected, said.printed)
            if not good and os.environ.get("GPUTALLY_UPDATE"):
                (ROOT / page).write_text(renewed((ROOT / page).read_text("utf-8"), step, said.printed), "utf-8")
            otherwise += [] if good else [f"{step.where}: {step.command}\n{said.printed}"]
    return otherwise
