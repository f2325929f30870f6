"""The tool that puts errors into code says of each whether tests notice it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = """
class Limit:
    def __init__(self, most):
        self.most = most

def allowed(limit, asked):
    assert isinstance(limit, Limit)
    return asked <= limit.most

def left(limit, asked):
    return limit.most - asked
"""
HELPER = "from project.limits import Limit\n\nTHREE = Limit(3)\n"
TEST = """
from project.limits import allowed, left
from suite.helpers import known

def test_it():
    assert allowed(known.THREE, 3) is {allowed}
    assert left(known.THREE, 0) == 3
"""


def mutated(folder: Path, *, allowed: bool) -> subprocess.CompletedProcess[str]:
    """Put two errors into code whose test has a helper in a folder without `__init__.py`."""
    for name, content in (
        ("project/__init__.py", ""),
        ("project/limits.py", CODE),
        ("suite/helpers/known.py", HELPER),
        ("suite/test_limits.py", TEST.format(allowed=allowed)),
        ("pytest.ini", "[pytest]\npythonpath = .\n"),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return subprocess.run(
        [sys.executable, "-m", "scripts.mutations", "project/limits.py", "--", "-p", "no:randomly", "suite"],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_an_error_is_caught_only_by_a_test_that_sees_it(tmp_path: Path) -> None:
    done = mutated(tmp_path, allowed=True)
    said = {line.split(": ")[1].split()[0]: line.split()[0] for line in done.stdout.splitlines()[:-1]}
    assert (done.returncode, said) == (1, {"asked": "caught", "limit.most": "survived"}), done.stderr


def test_tests_that_fail_without_an_error_are_refused(tmp_path: Path) -> None:
    assert mutated(tmp_path, allowed=False).returncode == 2
