"""Each program imports only the libraries of its dependency group, which are all that its image contains."""

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
EVERYTHING, GROUPS = PYPROJECT["project"]["dependencies"], PYPROJECT["dependency-groups"]

# Imports every module of a package while the libraries named on standard input cannot be found, and prints each
# module that does not load.
_IMPORT_ALL = """
import importlib, pkgutil, sys
package, *optional = sys.argv[1:]
hidden = frozenset(sys.stdin.read().split())

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
top = importlib.import_module(package)
for module in pkgutil.walk_packages(top.__path__, package + "."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as fault:
        if fault.name.partition(".")[0] not in optional:
            print(f"{module.name} needs {fault.name}")
"""


def _installed(requirements: list[str]) -> Iterator[str]:
    """Return the distributions that pip installs for these requirements, with their own requirements."""
    waiting = [(Requirement(text), frozenset({""})) for text in requirements]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement, extras = waiting.pop()
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        name, own = canonicalize_name(requirement.name), frozenset({"", *requirement.extras})
        if (name, own) in seen:
            continue
        seen.add((name, own))
        yield name
        try:
            waiting.extend((Requirement(text), own) for text in requires(name) or ())
        except PackageNotFoundError:
            continue  # for another platform


def test_the_wheel_depends_on_every_group_of_an_image() -> None:
    for image in ("agent", "accountant", "fairshare"):
        assert set(GROUPS[image]) <= set(EVERYTHING), image


@pytest.mark.parametrize(("program", "optional"), [("agent", ()), ("accountant", ()), ("fairshare", ("matplotlib",))])
def test_a_program_imports_only_what_its_group_installs(program: str, optional: tuple[str, ...]) -> None:
    """optional: libraries that modules for charts import by name."""
    installed = set(_installed(GROUPS[program]))
    own = {"agent", "accountant", "fairshare", "dashboards", "gputally"}
    hidden = {
        name
        for name, owners in packages_distributions().items()
        if name not in own and not installed & {canonicalize_name(owner) for owner in owners}
    }
    assert "pytest" in hidden  # a development tool: no image has it
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT_ALL, program, *optional],
        input="\n".join(hidden), capture_output=True, text=True, check=False, timeout=120, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
