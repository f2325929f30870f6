"""The folder of a plug-in can be deleted: no other module imports from it, except those that are listed here with their
reason; the list gets shorter."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = ("agent", "accountant", "fairshare", "gputally", "dashboards")
POINTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
SEAMS = {
    "gputally.channels": "accountant.channels",
    "gputally.engines": "accountant.lake.engines",
    "gputally.exports": "accountant.exports",
    "gputally.gpu_readers": "agent.gpu_readers",
    "gputally.holders": "agent.holders",
    "gputally.histories": "accountant.histories",
    "gputally.schedulers": "fairshare.schedulers",
}
"""The package of each seam. The tools of an assistant are beside what they ask."""


def folders() -> dict[str, str]:
    """Return the module or folder of each plug-in, by seam and name."""
    found = {}
    for seam, package in SEAMS.items():
        for name, value in POINTS[seam].items():
            own = value.removeprefix(f"{package}.").partition(":")[0].partition(".")[0]
            found[f"{seam} {name}"] = f"{package}.{own}"
    return found


def imported(path: Path) -> set[str]:
    """Return the modules that a module imports, also inside functions."""
    found = set()
    todo: list[ast.AST] = [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        todo += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return found


KNOWN = {
    ("gputally.demo.pipeline", "fairshare.schedulers.kai"): "the demo plays this scheduler",
}


def test_nothing_imports_from_the_folder_of_a_plug_in() -> None:
    imports = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): imported(path)
        for program in PROGRAMS
        for path in sorted((ROOT / program).rglob("*.py"))
    }
    found = {
        (module, folder)
        for folder in set(folders().values())
        for module, names in imports.items()
        if not within(module, folder) and any(within(name, folder) for name in names)
    }
    assert found == KNOWN.keys()


def within(module: str, folder: str) -> bool:
    return module == folder or module.startswith(f"{folder}.")


DELETABLE = {
    "gputally.channels slack": "accountant/channels/slack.py",
    "gputally.engines spark": "accountant/lake/engines/spark",
    "gputally.exports xlsx": "accountant/exports/xlsx",
    "gputally.histories slurm": "accountant/histories/slurm",
    "gputally.holders hami": "agent/holders/hami.py",
    "gputally.holders jobs": "agent/holders/job_files.py",
    "gputally.holders kubelet": "agent/holders/kubelet",
    "gputally.holders slurm": "agent/holders/slurm.py",
    "gputally.schedulers volcano": "fairshare/schedulers/volcano",
}
DELETED = {plugin: place for plugin, place in DELETABLE.items() if (ROOT / place).exists()}
"""Those that are there: this one holds without them too."""


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the programs without these folders."""
    copy = tmp_path_factory.mktemp("without")
    for program in PROGRAMS:
        shutil.copytree(ROOT / program, copy / program, ignore=shutil.ignore_patterns("__pycache__"))
    for place in DELETED.values():
        shutil.rmtree(copy / place) if (copy / place).is_dir() else (copy / place).unlink()
    return copy


def call(folder: Path, *command: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "gputally", *command], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr * (done.returncode != 0)


def test_a_deleted_folder_is_named_and_the_other_plug_ins_can_be_used(without: Path) -> None:
    code, told = call(without, "plugins", "--output", "json")
    assert code == 1
    assert {f"{one['seam']} {one['name']}" for one in json.loads(told) if one["fault"]} == DELETED.keys()


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("fairshare", "check", "fairshare/samples/policy.yaml"), "queues"),
        (("import", "prometheus", "--help"), "--replace"),
        (("report", "--help"), "parquet"),
        (("fleet", "usage", "--help"), "trino"),
    ],
)
def test_programs_go_on_without_deleted_folders(without: Path, command: tuple[str, ...], says: str) -> None:
    code, told = call(without, *command)
    assert (code, says in told) == (0, True), told
