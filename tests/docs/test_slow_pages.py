"""The commands that take longer than `make test` has, each as a process of its own, as a reader would start them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.conftest import FOLDERS, ROOT
from tests.docs.following import follow, with_commands
from tests.docs.shell import Shell

pytestmark = pytest.mark.real


@pytest.mark.parametrize("page", with_commands("slow"))
def test_the_slow_commands_of_the_page_run(page: str, tmp_path: Path) -> None:
    for name in (*FOLDERS, "gputally", ".venv"):
        (tmp_path / name).symlink_to(ROOT / name)
    otherwise = follow(page, ["slow"], Shell(tmp_path, {"COLUMNS": "120"}, in_process=False))
    assert otherwise == [], "\n\n".join(otherwise)
