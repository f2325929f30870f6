"""The folder of a plug-in can be deleted: no other module imports from it, and no test but its own."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gputally.kubernetes.pod_queue_labels import ACCOUNTS
from scripts import without

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
    assert found == set()


def within(module: str, folder: str) -> bool:
    return module == folder or module.startswith(f"{folder}.")


def test_no_test_imports_from_a_plug_in_but_its_own() -> None:
    """Tests of a plug-in are in folders of its name, `tests/**/NAME/`, which go with it; benchmarks may use it. Where a
    test needs any scheduler, there is `gputally.testing.fake_scheduler`."""
    imports = {
        path.relative_to(ROOT): imported(path)
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if path.relative_to(ROOT).parts[1] != "bench"
    }
    found = set()
    for plugin, folder in folders().items():
        seam = plugin.removeprefix("gputally.").partition(" ")[0]
        own = without.tests_of(ROOT, seam, folder.rpartition(".")[2])
        gone = (folder, *(".".join(place.relative_to(ROOT).parts) for place in own))
        found |= {
            (folder, module.relative_to("tests").as_posix())
            for module, names in imports.items()
            if not any((ROOT / module).is_relative_to(place) for place in own)
            and any(within(name, place) for name in names for place in gone)
        }
    assert found == set()


PARTS = [f"{seam.removeprefix('gputally.')}.{name}" for seam in SEAMS for name in POINTS[seam]]
STARTS = """
import sys
from pathlib import Path
from starlette.testclient import TestClient
from accountant.composition import Service
from accountant.core.settings import Settings
from agent.__main__ import main as agent
from agent.core.settings import AgentSettings
from agent.holders.installed import sharing_systems
from fairshare.__main__ import main as fairshare
from gputally.__main__ import main as gputally
from gputally.base.clock import VirtualClock
folder = Path(sys.argv[1])
scenario = folder / "scenario.yaml"
scenario.write_text("gpus: [{model: H100}]\\n")
assert gputally(["plugins"]) == 0, "no plug-in that is left needs the one that is gone"
assert agent(["run", "--once", f"--simulated={scenario}"]) == 0
assert AgentSettings().sharing_systems <= sharing_systems(), "the default stops no agent"
assert fairshare(["check", sys.argv[2]]) == 0
with Service(Settings(data=folder, auth="off"), VirtualClock(1_790_812_800_000)) as service:
    with TestClient(service.app, base_url="http://127.0.0.1") as client:
        day = {"start": "2026-09-01T00:00:00Z", "end": "2026-09-02T00:00:00Z"}
        assert client.get("/v1/usage", params=day).status_code == 200
        assert client.get("/readyz").status_code == 200
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the programs and of what registers plug-ins."""
    made = tmp_path_factory.mktemp("copy")
    for program in PROGRAMS:
        shutil.copytree(ROOT / program, made / program, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", made)
    return made


@contextmanager
def deleted(copy: Path, parts: list[str]) -> Iterator[None]:
    """Delete plug-ins from the copy, and put them back afterwards."""
    before = (copy / "pyproject.toml").read_text()
    without.deleted(copy, parts)
    try:
        yield
    finally:
        (copy / "pyproject.toml").write_text(before)
        for part in parts:
            seam, _, name = part.partition(".")
            place = without.place_of(ROOT, name, POINTS[f"gputally.{seam}"][name].partition(":")[0])
            back = copy / place.relative_to(ROOT)
            if place.is_dir():
                shutil.copytree(place, back, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(place.with_suffix(".py"), back.with_suffix(".py"))


def call(copy: Path, *command: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, *command], cwd=copy, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(copy), os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr * (done.returncode != 0)


def assert_starts(copy: Path, folder: Path, gone: list[str]) -> None:
    """Start the three programs with a policy for a scheduler that is left, or for accounts if there is none."""
    names = POINTS.get("gputally.schedulers", {})
    left = next((name for name in names if f"schedulers.{name}" not in gone), ACCOUNTS)
    policy = folder / "policy.yaml"
    policy.write_text(f"schema: 1\nqueues: [{{name: a, refs: ['{left}:a']}}]\n")
    code, told = call(copy, "-c", STARTS, str(folder), str(policy))
    assert code == 0, told[-3000:]


@pytest.mark.parametrize("gone", [PARTS[::2], PARTS[1::2]], ids=["every second", "the others"])
def test_programs_start_without_half_of_the_plug_ins(copy: Path, tmp_path: Path, gone: list[str]) -> None:
    with deleted(copy, gone):
        assert_starts(copy, tmp_path, gone)


def test_a_folder_that_is_gone_while_its_entry_point_is_there_is_named(copy: Path) -> None:
    place = copy / "fairshare" / "schedulers" / "volcano"
    if not place.exists():
        pytest.skip("this plug-in is deleted")
    without.register(copy)
    aside = place.rename(copy / "aside")
    try:
        code, told = call(copy, "-m", "gputally", "plugins", "--output", "json")
    finally:
        aside.rename(place)
    assert code == 1
    assert [f"{one['seam']} {one['name']}" for one in json.loads(told) if one["fault"]] == [
        "gputally.schedulers volcano"
    ]


@pytest.mark.parametrize(
    ("gone", "setting"), [("gpu_readers.nvml", "--gpu-readers=nvml"), ("holders.kubelet", "--holders=kubelet")]
)
def test_an_agent_whose_default_is_deleted_says_what_is_installed(
    copy: Path, tmp_path: Path, gone: str, setting: str
) -> None:
    """It does not fall back to another source: who held a GPU would then be somebody else without anybody's word."""
    if not {gone, "gpu_readers.nvml"} <= set(PARTS):
        pytest.skip("this plug-in is deleted")
    installed = [part.partition(".")[2] for part in PARTS if part.startswith(gone.partition(".")[0]) and part != gone]
    spool = f"--spool={tmp_path}"
    with deleted(copy, [gone]):
        for arguments in ((), (setting,)):
            others = () if gone.startswith("gpu_readers") else ("--gpu-readers=nvml",)
            code, told = call(copy, "-m", "agent", "run", "--once", spool, *others, *arguments)
            said = [line for line in told.splitlines() if not line.startswith("{")]  # the log is not an answer
            assert (code, len(said)) == (2, 1), told
            assert setting.removeprefix("--").partition("=")[0].replace("-", "_") in said[0]
            assert not installed or any(name in told for name in installed), "what is installed"


def test_a_seam_stands_for_its_plug_ins_and_a_folder_is_deleted_once() -> None:
    every = without.named([])
    places = [folders().get("gputally." + one.replace(".", " ", 1), one) for one in every]
    assert len(places) == len(set(places)), "two versions of a format are in one folder"
    assert set(places) >= set(folders().values())
    one, *_ = PARTS
    seam = one.partition(".")[0]
    assert one in without.named([seam])
    assert without.named([one]) == [one]
    assert {each.partition(".")[0] for each in without.named([seam])} == {seam}
    with pytest.raises(SystemExit, match="chanels"):
        without.named(["chanels"])


def test_the_tool_of_an_assistant_is_deleted_without_what_it_asks() -> None:
    for name, value in POINTS.get("gputally.assistant", {}).items():
        place = without.place_of(ROOT, name, value.partition(":")[0])
        assert place.with_suffix(".py").exists()


def test_failures_and_errors_of_a_run_are_told(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.fixture\ndef broken(): 1 / 0\n"
        "def test_good(): pass\n"
        "def test_bad(): assert False\n"
        "def test_error(broken): pass\n"
        "def test_skipped(): pytest.skip()\n"
    )
    report = tmp_path / "report.xml"
    options = ("-q", "-p", "no:cacheprovider", "-c", os.devnull, f"--basetemp={tmp_path / 'kept'}")
    call(tmp_path, "-m", "pytest", *options, f"--junit-xml={report}", str(tmp_path))
    found = without.outcome_of(report)
    assert (found.passed, [name.rpartition("::")[2] for name in found.failed]) == (1, ["test_bad", "test_error"])
