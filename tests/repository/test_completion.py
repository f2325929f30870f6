"""Shells complete every program, through the protocol that their completion functions speak; nothing is loaded for it
that is not completed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gputally.__main__ import COMMANDS, main


def bash(line: str) -> dict[str, str]:
    words = line.split()
    return {"COMP_WORDS": line, "COMP_CWORD": str(len(words) if line.endswith(" ") else len(words) - 1)}


def zsh(line: str) -> dict[str, str]:
    return {"_TYPER_COMPLETE_ARGS": line}


def fish(line: str) -> dict[str, str]:
    return {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}


PROTOCOLS = {"bash": bash, "zsh": zsh, "fish": fish}


@pytest.fixture(params=PROTOCOLS)
def complete(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], str]:
    """What a shell is told for a line that is being typed."""

    def ask(line: str) -> str:
        monkeypatch.setenv("_GPUTALLY_COMPLETE", f"complete_{request.param}")
        for name, value in PROTOCOLS[request.param](line).items():
            monkeypatch.setenv(name, value)
        assert main([]) == 0
        return capsys.readouterr().out

    return ask


@pytest.mark.parametrize(
    ("line", "offered", "not_offered"),
    [
        ("gputally ", ["accountant", "fairshare", "doctor", "demo"], ["slurm"]),
        ("gputally do", ["doctor"], ["demo"]),
        ("gputally fairshare ", ["plan", "what-if", "explain"], ["usage"]),
        ("gputally accountant slurm ", ["import"], []),
        ("gputally jobs --st", ["--start", "--state"], ["--end"]),
        ("gputally jobs --state ", ["waiting", "running", "ended"], []),
        ("gputally agent ", ["run", "top", "smoke"], []),
        ("gputally agent run --pri", ["--privilege", "--print-config"], ["--pods"]),
        ("gputally doctor --output ", ["table", "json", "csv"], []),
        ("gputally advise autoscaler --format ", ["tfvars", "ansible", "karpenter"], []),
        ("gputally dashboards push --to", ["--token-file"], []),
        ("gputally demo --s", ["--seed"], ["--days"]),
    ],
)
def test_every_program_is_completed(
    complete: Callable[[str], str], line: str, offered: list[str], not_offered: list[str]
) -> None:
    said = complete(line)
    assert all(word in said for word in offered), said
    assert not any(word in said for word in not_offered), said


@pytest.mark.parametrize("shell", PROTOCOLS)
def test_the_script_for_a_shell(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "")
    assert main(["--show-completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"_GPUTALLY_COMPLETE=complete_{shell}" in script
    assert main(["--show-completion", "csh"]) == 2


def test_what_is_installed_completes_in_a_bash_that_starts_anew(tmp_path: Path) -> None:
    """Written into the reader's own start file once, and bash then asks the program that is on its path."""
    environ = {"HOME": str(tmp_path), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    (tmp_path / ".bashrc").write_text("export MINE=1\n")
    for _ in range(2):
        install = [sys.executable, "-m", "gputally", "--install-completion", "bash"]
        subprocess.run(install, env=environ, check=True, capture_output=True)
    written = (tmp_path / ".bashrc").read_text()
    assert written.startswith("export MINE=1\n")
    assert written.count("source ") == 1
    typed = """
        complete_line() {
            COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
            "$function" gputally
            echo "${COMPREPLY[*]}"
        }
        read -r _ _ _ _ function _ <<<"$(complete -p gputally)"
        echo "$MINE"
        complete_line gputally fair
        complete_line gputally agent run --pri
    """
    said = subprocess.run(
        ["bash", "--norc", "-c", f"source {tmp_path}/.bashrc\n{typed}"],
        env=environ, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert said.stdout.splitlines() == ["1", "fairshare", "--print-config --privilege"]


def test_names_are_completed_without_loading_a_program() -> None:
    code = "import sys; from gputally.__main__ import main; main([]); print(*sys.modules, file=sys.stderr)"
    environ = {**os.environ, "_GPUTALLY_COMPLETE": "complete_bash", **bash("gputally ")}
    said = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert said.stdout.split() == list(COMMANDS)
    loaded = {name.split(".")[0] for name in said.stderr.split()}
    assert not loaded & {"pandas", "duckdb", "fastapi", "kubernetes", "agent", "accountant", "fairshare", "dashboards"}


def test_help_loads_no_library() -> None:
    code = "import sys; from gputally.__main__ import main; main(['--help']); print(*sys.modules, file=sys.stderr)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in said.stderr.split()}
    assert not loaded & {"pandas", "duckdb", "fastapi", "kubernetes", "pydantic", "typer", "rich", "numpy"}
