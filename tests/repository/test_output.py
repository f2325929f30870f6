"""Output in one way: tables, JSON and CSV of the same findings, and all three for every command that prints a table."""

from __future__ import annotations

import csv
import io
import json
from decimal import Decimal
from typing import get_args

import pytest
from rich.table import Table

from gputally.base.command_output import Output, flat, show
from gputally.base.terminal import WIDTH_WITHOUT_TERMINAL
from gputally.base.untrusted_text import for_cell
from gputally.shell_completion import all_commands

RECORD = {
    "name": "=cmd",
    "cost": Decimal("0.10"),
    "by": {"team": "a", "gpu": None},
    "refs": ["x", {"y": 1}],
    "on": True,
}
ELSEWHERE = {
    "gputally fairshare what-if",
    "gputally accountant report",
    "gputally report",
}
"""Commands that write files of their own form; their `--output` is the path."""
TEXT = {
    "accountant serve", "accountant fleet serve", "fleet serve", "accountant token new", "accountant token revoke",
    "fairshare run", "fairshare check", "fairshare shard", "accountant slurm",
    "agent run", "agent top", "dashboards build", "dashboards check", "accountant mcp", "mcp",
    "accountant fleet view", "fleet view",
}  # fmt: skip
"""Commands that print lines, or show a screen of their own."""


def printed(output: Output, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("COLUMNS", raising=False)
    table = Table("name")
    table.add_row("[bold]x" * 20)
    stream = io.StringIO()
    show(output, lambda: table, [RECORD, {"name": "b", "more": 1}], to=stream)
    return stream.getvalue()


def test_json_holds_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = json.loads(printed("json", monkeypatch))
    assert first == {
        "name": "=cmd",
        "cost": "0.10",
        "by": {"team": "a", "gpu": None},
        "refs": ["x", {"y": 1}],
        "on": True,
    }
    assert second == {"name": "b", "more": 1}


def test_csv_is_flat_and_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = csv.DictReader(io.StringIO(printed("csv", monkeypatch)))
    assert first == {
        "name": "'=cmd", "cost": "0.10", "by.team": "a", "by.gpu": "", "refs": 'x;{"y": 1}', "on": "true", "more": ""
    }  # fmt: skip
    assert (second["name"], second["cost"], second["more"]) == ("b", "", "1")
    assert flat({"several": [1, None]}) == {"several": "1;"}
    assert [for_cell(text) for text in ("a", "+1", "@x")] == ["a", "'+1", "'@x"]


def test_a_table_is_as_wide_as_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(map(len, printed("table", monkeypatch).splitlines())) <= WIDTH_WITHOUT_TERMINAL


def test_records_are_the_lines_of_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    show("csv", Table, {"rows": 2}, [{"a": 1}, {"a": 2}])
    assert capsys.readouterr().out == "a\n1\n2\n"


def test_every_command_that_prints_a_table_prints_the_three_forms() -> None:
    without = []
    for path, command in all_commands():
        name = path.removeprefix("gputally ")
        if getattr(command, "commands", None) or path in ELSEWHERE or any(name.startswith(text) for text in TEXT):
            continue
        found = next((each for each in command.params if "--output" in each.opts), None)
        choices = getattr(getattr(found, "type_descriptor", None), "annotation", None)
        if not set(get_args(Output)) <= set(get_args(choices)):
            without.append(path)
    assert without == []
