"""The packages that the tutorials build."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tests.docs.code_blocks import PAGES

TUTORIALS = sorted(page for page in PAGES if page.startswith("docs/plugins/"))
UV = shutil.which("uv") or str(Path(sys.executable).parent / "uv")


def write(page: str, folder: Path) -> None:
    """Make the folder, with the files that a tutorial shows."""
    folder.mkdir(parents=True)
    for block in PAGES[page]:
        if block.words and "." in block.words[0]:
            (folder / block.words[0]).write_text(block.text)
