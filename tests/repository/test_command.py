"""The one command: lazy, honest about what is missing, and lean where it must be."""

from __future__ import annotations

import importlib
import subprocess
import sys
import types

import pytest
import typer

from accountant import __main__ as accountant
from gputally.__main__ import COMMANDS, Command, main, run, usage

HEAVY = ["pandas", "numpy", "duckdb", "fastapi", "pydantic", "kubernetes", "pyarrow", "rich", "pynvml", "typer"]


def _imported_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(answer.stdout.split())


def test_the_agent_imports_nothing_heavy() -> None:
    assert not _imported_by("import agent.__main__").intersection(HEAVY)


def test_the_command_imports_no_program_before_it_is_called() -> None:
    imported = _imported_by("import gputally.__main__")
    assert not imported.intersection([*HEAVY, "agent", "accountant", "fairshare", "dashboards"])


def test_a_question_loads_nothing_of_what_answers_it() -> None:
    asking = ", ".join(
        [
            "accountant.cli.usage_commands",
            "accountant.cli.bookkeeping_commands",
        ]
    )
    imported = _imported_by(f"import accountant.__main__, {asking}")
    assert not imported.intersection(["numpy", "duckdb", "fastapi", "uvicorn", "structlog"])


def test_a_program_without_a_cluster_does_not_load_the_kubernetes_client() -> None:
    imported = _imported_by("import accountant.composition, fairshare.composition, gputally.kubernetes.list_watch")
    assert not imported.intersection(["kubernetes", "kubernetes_asyncio"])


def test_every_module_of_the_accountant_adds_the_commands_it_is_listed_for() -> None:
    listed: dict[str, set[str]] = {}
    for module, names in accountant.COMMANDS:
        listed.setdefault(module, set()).update(names)
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
