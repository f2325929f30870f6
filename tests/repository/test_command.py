"""The command `gputally`: lazy imports, a clear message for a missing part, a lean client, and completion through the
shells' own protocols."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from accountant import __main__ as accountant
from accountant.history_import.protocol import SEAM, HistoryPlugin
from gputally.__main__ import COMMANDS, Command, main, run, usage
from gputally.base.plugins import usable

HEAVY = {"pandas", "numpy", "duckdb", "fastapi", "pydantic", "kubernetes", "pyarrow", "rich", "pynvml", "typer"}
MOST_MODULES = 350
"""A typer command with its options loads 300, of which pydantic is 100; a program that serves, 1,300."""
QUESTIONS = "accountant.cli.usage_commands, accountant.cli.bookkeeping_commands"
WITHOUT_CLUSTER = "accountant.composition, fairshare.composition, gputally.kubernetes.list_watch"


def _called(statement: str, **environment: str) -> tuple[str, set[str]]:
    """Run a statement in a new process; return its output and the packages it loads."""
    loads = "print(*sorted({m.split('.')[0] for m in sys.modules}), file=sys.stderr)"
    code = f"import sys; from gputally.__main__ import main; {statement}; {loads}"
    environ = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    return done.stdout, set(done.stderr.split())


@pytest.mark.parametrize(
    ("statement", "not_loaded"),
    [
        ("import agent.__main__, agent.composition", HEAVY),
        ("pass", {*HEAVY, "agent", "accountant", "fairshare", "dashboards"}),
        ("main(['--help'])", HEAVY),
        (f"import accountant.__main__, {QUESTIONS}", {"numpy", "duckdb", "fastapi", "uvicorn", "structlog"}),
        (f"import {WITHOUT_CLUSTER}", {"kubernetes", "kubernetes_asyncio"}),
    ],
    ids=["the agent", "the command", "its help", "a question to the accountant", "programs without a cluster"],
)
def test_nothing_is_loaded_before_it_is_needed(statement: str, not_loaded: set[str]) -> None:
    assert not _called(statement)[1] & not_loaded


@pytest.mark.parametrize(
    "words",
    [*COMMANDS, "agent run", "accountant serve", "accountant backup", "fairshare run", "fairshare what-if"],
)
def test_help_loads_few_modules(words: str) -> None:
    """Counts modules, of which the time of `--help` consists, because a wall clock would depend on the machine."""
    count = "atexit.register(lambda: print(len(sys.modules)))"  # argparse ends the process
    code = f"import atexit, sys; {count}; from gputally.__main__ import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, *words.split(), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout.splitlines()[-1]) <= MOST_MODULES


def test_the_agent_loads_few_modules() -> None:
    """Without those that the interpreter itself loads, which differ from machine to machine."""
    code = (
        "import sys; own = len(sys.modules); import agent.__main__; few = len(sys.modules); import agent.composition; "
        "print(few - own, len(sys.modules) - own)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for_help, to_meter = map(int, done.stdout.split())
    assert for_help <= 120
    assert to_meter <= 200


def test_every_module_of_the_accountant_adds_the_commands_it_is_listed_for() -> None:
    listed: dict[str, set[str]] = {}
    for module, names in accountant.COMMANDS:
        listed.setdefault(module, set()).update(names)
    assert not listed[accountant.OF_PLUGINS]
    naming = {name for name, one in usable(SEAM, HistoryPlugin).items() if one.names is not None}
    listed[accountant.OF_PLUGINS] = {"import", *naming}
    for module, expected in listed.items():
        app = importlib.import_module(f"accountant.cli.{module}").app
        assert set(typer.main.get_group(app).commands) == expected


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert printed.strip() == usage()
    assert all(f"  {name} " in printed for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_can_be_loaded(name: str) -> None:
    assert callable(getattr(importlib.import_module(COMMANDS[name].module), COMMANDS[name].entry))


def test_a_wrong_call_is_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    capsys.readouterr()
    assert main(["agnet"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "no command 'agnet'" in error


def test_an_interruption_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = types.ModuleType("interrupted")

    def interrupted(_arguments: object) -> int:
        raise KeyboardInterrupt  # not by signal: a process in the background ignores Ctrl-C's

    module.main = interrupted  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "interrupted", module)
    monkeypatch.setitem(COMMANDS, "wait", Command("interrupted", "waits"))
    assert main(["wait"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_missing_library_is_named() -> None:
    with pytest.raises(SystemExit, match=r"needs 'no_such_library'.*pip install gputally"):
        run(Command("no_such_library", ""), [])


def test_a_missing_library_is_named_when_only_the_part_that_is_called_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def part_of_it(_arguments: object) -> int:
        raise ModuleNotFoundError("No module named 'uvicorn'", name="uvicorn")

    module = types.ModuleType("in_parts")
    monkeypatch.setattr(module, "main", part_of_it, raising=False)
    monkeypatch.setitem(sys.modules, "in_parts", module)
    with pytest.raises(SystemExit, match=r"needs 'uvicorn'.*pip install gputally"):
        run(Command("in_parts", ""), [])


# --- completion ---------------------------------------------------------------------------------


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
    """Return the completions that a shell shows for an unfinished line."""

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
        ("gputally jobs --state ", ["waiting", "running", "ended", "failed"], []),
        ("gputally agent ", ["run", "top", "smoke"], []),
        ("gputally agent run --pri", ["--privilege", "--print-config"], ["--holders"]),
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
    """The command writes once to the user's start file; a new bash then calls the program on its path."""
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
    asked = {"_GPUTALLY_COMPLETE": "complete_bash", **bash("gputally ")}
    said, loaded = _called("main([])", **asked)
    assert said.split() == list(COMMANDS)
    assert not loaded & {"pandas", "duckdb", "fastapi", "kubernetes", "agent", "accountant", "fairshare", "dashboards"}


@pytest.mark.parametrize("name", ["fleet", "report"])
def test_a_command_of_the_accountant_is_named_as_it_was_typed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--no-such-option"]) == 2
    told = capsys.readouterr().err
    assert f"gputally {name}" in told
    assert "gputally accountant" not in told
