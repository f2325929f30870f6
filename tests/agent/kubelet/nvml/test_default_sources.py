"""The sources that an agent takes by default, where there is no cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.__main__ import main


def test_a_machine_without_a_cluster_is_told_which_source_it_has(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["run", "--spool", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert (told.startswith("gputally agent: "), told.count("\n")) == (True, 1)
    assert "--holders processes" in told
