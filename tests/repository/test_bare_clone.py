"""A checkout without shared files: all tests can be collected, and the pipeline runs them there first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEPT = ("PATH", "HOME", "TMPDIR")


def test_every_test_is_collected_where_the_shelf_is_absent(tmp_path: Path) -> None:
    environ = {name: os.environ[name] for name in KEPT if name in os.environ}
    environ["GPUTALLY_SHARED"] = str(tmp_path / "nowhere")
    # Modules that read shared files, and their neighbours; collecting all would take ten seconds.
    rooms = sorted(
        {str(path.parent) for path in (ROOT / "tests").rglob("*.py") if "tests.shared_files" in path.read_text()}
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *rooms],
        cwd=ROOT, env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2_000:]


def test_the_pipeline_begins_in_a_bare_clone() -> None:
    steps = [line for line in (ROOT / ".ci" / "run").read_text("utf-8").splitlines() if line.startswith("step ")]
    assert steps[0] == "step bare make test"
    assert [step for step in steps if step.startswith("step make test ")] == [
        'step make test ARGS="--skipped-in=$empty/gputally"'
    ]
