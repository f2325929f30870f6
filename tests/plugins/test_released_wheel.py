"""The package that a release publishes is enough for an author of a plug-in: in a new environment without this
repository, the packages of the tutorials and the examples pass their suites."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.plugins.tutorial_packages import TUTORIALS, UV, write

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(folder for folder in (ROOT / "examples" / "plugins").iterdir() if folder.is_dir())


def call(folder: Path, *command: str) -> str:
    """Run a command without what this process has on its path. Returns its output."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of a new environment with the wheel and its extra for tests."""
    folder = tmp_path_factory.mktemp("wheel")
    call(folder, UV, "build", "--quiet", "--wheel", str(ROOT), "-o", str(folder / "dist"))
    (wheel,) = (folder / "dist").glob("*.whl")
    call(folder, UV, "venv", "--quiet", str(folder / "new"))
    found = str(folder / "new" / "bin" / "python")
    call(folder, UV, "pip", "install", "--quiet", "--python", found, f"{wheel}[testing]")
    return found


@pytest.mark.parametrize("source", [*TUTORIALS, *EXAMPLES], ids=str)
def test_a_package_of_another_author_passes_its_suite(source: str | Path, python: str, tmp_path: Path) -> None:
    folder = tmp_path / "package"
    if isinstance(source, Path):
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        write(source, folder)
    call(folder, UV, "pip", "install", "--quiet", "--python", python, str(folder))
    own = ("-p", "no:cacheprovider", "-c", "pyproject.toml", f"--basetemp={tmp_path / 'pytest'}")
    assert " passed" in call(folder, python, "-m", "pytest", "-q", *own)
    assert call(folder, python, "-c", "import gputally; print(gputally.__file__)").startswith(
        str(Path(python).parents[1])
    )
