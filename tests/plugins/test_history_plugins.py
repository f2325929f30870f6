"""The commands of histories come from their plug-ins. A broken one of another package is named and left out."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from accountant.__main__ import main
from gputally.base import plugins as registry
from tests.plugins.installed import install

OTHERS = {point.name for point in entry_points(group="gputally.histories")}
"""The histories that there are without one of another package."""

_PLUGIN = """
from typing import Annotated
from typer import Argument
from accountant.history_import.protocol import HistoryPlugin, HolderNames, Import

def imports(asked, {parameters}):
    "Import nothing."
    {body}

def names(asked):
    "Name nothing."
    return HolderNames("c", "x", ())

HISTORY = HistoryPlugin("{name}", "Other", "others", imports, ("none",), "nothing", "page", {more})
"""


def plugin(parameters: str = "", body: str = "return ()", name: str = "other", more: str = "") -> str:
    return _PLUGIN.format(parameters=parameters, body=body, name=name, more=more)


Say = Callable[..., tuple[int, str]]


@pytest.fixture
def say(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    """A function that installs a history and runs a command as a new process would: what it said."""

    def call(text: str, *command: str, name: str = "other") -> tuple[int, str]:
        if not list(folder.glob("*.dist-info")):
            install(folder, "other-package", {"gputally.histories": {name: "other_module:HISTORY"}}, other_module=text)
            importlib.invalidate_caches()
        monkeypatch.delitem(sys.modules, "accountant.cli.import_commands", raising=False)
        registry._entry_points.cache_clear()
        registry._listed.cache_clear()
        code = main(command)
        told = capsys.readouterr()
        assert "Traceback" not in told.err
        return code, told.out + told.err

    return call


def test_a_history_of_another_package_has_a_command_with_its_options(say: Say) -> None:
    text = plugin(parameters='file: Annotated[str, Argument(help="Its file.")]')
    code, told = say(text, "import", "other", "--help")
    assert code == 0
    assert "Its file." in told
    assert "--replace" in told


@pytest.mark.parametrize(
    "text",
    [
        "raise ValueError('no licence')", "HISTORY = 1", plugin(name="an other"), plugin(parameters="output: str"),
        plugin(parameters="what: Nothing"), plugin(parameters="what: 'exit(3)'"), plugin(more="names=1"),
    ],
)  # fmt: skip
def test_a_history_that_cannot_be_used_is_named_and_left_out(say: Say, text: str) -> None:
    code, told = say(text, "import", "other")
    assert code == 1
    assert "other-package" in told
    code, told = say(text, "import", "--help")
    assert code == 0
    assert "other" not in told.split()
    assert set(told.split()) >= OTHERS


def test_a_name_that_nobody_has_is_a_wrong_call(say: Say) -> None:
    assert say(plugin(), "import", "nobody")[0] == 2


@pytest.mark.parametrize("body", ["1 / 0", "yield 1", "raise OSError('gone')", "return None"])
def test_a_history_that_fails_ends_with_one_line(say: Say, body: str) -> None:
    code, told = say(plugin(body=body), "import", "other")
    assert code == 1
    assert len(told.strip().splitlines()) == 1
    assert "other" in told


def test_a_history_replaces_no_command(say: Say) -> None:
    text = plugin(name="close", more="names")
    assert "month" in say(text, "close", "--help", name="close")[1].lower()
    code, told = say(text, "--help")
    assert code == 0
    assert sum(line.split()[:1] == ["close"] for line in told.splitlines()) == 1


def test_a_history_may_name_holders_under_its_own_name(say: Say) -> None:
    code, told = say(plugin(more="names"), "other", "import", "--help")
    assert code == 0
    assert "Name nothing." in told
