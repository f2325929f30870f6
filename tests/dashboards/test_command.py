"""`gputally dashboards build|check`, and the freshness of what is committed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dashboards import __main__
from dashboards.__main__ import main


def test_what_is_committed_is_what_the_code_gives(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 0
    assert "rules kept" in capsys.readouterr().out


def test_the_chart_carries_the_same_files() -> None:
    assert __main__.CHART / "dashboards" in __main__.folders()
    for name in __main__.files():
        ours, theirs = __main__.GENERATED / name, __main__.CHART / "dashboards" / name
        assert ours.read_bytes() == theirs.read_bytes()


def test_build_writes_where_it_is_told_and_nowhere_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "--out", str(tmp_path / "new")]) == 0
    files = sorted((tmp_path / "new").iterdir())
    assert [f.name for f in files] == sorted(__main__.files())
    assert sorted(capsys.readouterr().out.split()) == [str(f) for f in files]
    assert __main__.stale_files(tmp_path / "new") == []


def test_stale_missing_and_forgotten_files_are_named(tmp_path: Path) -> None:
    __main__.build(tmp_path)
    file = tmp_path / "cluster.json"
    shutil.copy(file, tmp_path / "old.json")
    file.write_text(file.read_text() + " ")
    assert __main__.stale_files(tmp_path) == [
        f"{file}: differs from the code",
        f"{tmp_path / 'old.json'}: the code generates no such file",
    ]
    file.unlink()
    assert f"{file}: missing" in __main__.stale_files(tmp_path)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    assert main(["build", "--out", str(tmp_path / "file")]) == 1
    assert capsys.readouterr().err == f"gputally dashboards: {tmp_path / 'file'}: File exists\n"
