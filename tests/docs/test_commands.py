"""Commands in the pages, and in the chart's containers, exist with every flag."""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from gputally.__main__ import COMMANDS, COMPLETION, main
from tests.docs.code_blocks import COMMANDS as COMMANDS_IN
from tests.docs.code_blocks import code_blocks_of, steps

GOLDEN = Path(__file__).parents[1] / "chart" / "golden" / "default.yaml"
RICHEST = GOLDEN.with_name("on-prem.yaml")


def lines(page: Path, text: str) -> list[str]:
    """Return the commands of all blocks of a page, with continued lines joined and comments dropped."""
    blocks = [block for block in code_blocks_of(page, text) if block.language in COMMANDS_IN and block.usable]
    found = [step for block in blocks for step in steps(block)]
    return [step.command.replace("\\\n", " ").split("  #")[0].strip() for step in found]


def ours(commands: list[str]) -> list[list[str]]:
    """Return the commands that call `gputally`, as arguments."""
    split = [shlex.split(command, comments=True) for command in commands if "<<" not in command]
    return [words[1:] for words in split if words and words[0].rsplit("/", 1)[-1] == "gputally"]


@pytest.fixture
def commands_of_pages(pages: dict[Path, str], root: Path) -> list[list[str]]:
    notes = (root / "helm" / "gputally" / "templates" / "NOTES.txt").read_text("utf-8")
    indented = [line.strip() for line in notes.splitlines() if line.startswith("     ")]
    return ours([line for page, text in pages.items() for line in lines(page, text)] + indented)


@pytest.fixture
def contained() -> list[list[str]]:
    """The arguments of the chart's containers."""
    specs = [m.get("spec", {}) for file in (GOLDEN, RICHEST) for m in yaml.safe_load_all(file.read_text("utf-8"))]
    specs = [spec.get("jobTemplate", {}).get("spec", spec) for spec in specs]
    return [c["args"] for spec in specs if "template" in spec for c in spec["template"]["spec"]["containers"]]


@functools.cache
def help_of(*path: str) -> str:
    """Return the help of a command, in lines wide enough for its flags."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):  # argparse leaves, typer's main returns
        main([*path, "--help"])
    return said.getvalue()


def unknown(arguments: list[str]) -> list[str]:
    """Return the flags of a call that the command's help does not name."""
    if arguments[0] in COMPLETION:
        return []
    assert arguments[0] in COMMANDS, arguments
    path = [arguments[0]]
    for word in arguments[1:]:
        if not re.fullmatch(r"[a-z]+(-[a-z]+)*", word):
            break
        path.append(word)
    text = help_of(*path)
    flags = {word.split("=")[0] for word in arguments if word.startswith("--")}
    return sorted(flag for flag in flags if not re.search(rf"(?<![\w-]){flag}(?![\w-])", text))


def test_make_targets_exist(pages: dict[Path, str], root: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text("utf-8"), re.MULTILINE))
    commands = [line for page, text in pages.items() for line in lines(page, text) if line.startswith("make ")]
    assert {"make demo", "make test"} <= {" ".join(command.split()[:2]) for command in commands}
    for command in commands:
        assert command.split()[1] in targets, command


def test_what_is_left_to_the_pipeline_is_a_step_of_it(pages: dict[Path, str], root: Path) -> None:
    """`ci` marks commands that no test may call, because they run all tests or need the whole machine."""
    pipeline = (root / ".ci" / "run").read_text("utf-8")
    left = [
        step for page, text in pages.items() for f in code_blocks_of(page, text) if f.mark == "ci" for step in steps(f)
    ]
    assert left
    for step in left:
        assert f"step {' '.join(step.command.split()[:2])}" in pipeline, step


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_written_commands_exist_with_their_flags(commands_of_pages: list[list[str]]) -> None:
    assert len(commands_of_pages) > 5
    for arguments in commands_of_pages:
        assert unknown(arguments) == [], arguments


def test_commands_in_texts_of_the_programs_exist_with_their_flags(root: Path) -> None:
    """Remedies and reasons tell people to run them."""
    command = re.compile(rf"gputally ((?:{'|'.join(COMMANDS)}) [^;`\n#()]*--[a-z][^;`\n#()]*)")
    told = [
        words
        for program in ("gputally", "accountant", "agent", "fairshare")
        for source in sorted((root / program).rglob("*.py"))
        for text in texts_of(source.read_text("utf-8"))
        for words in command.findall(text)
    ]
    assert len(told) > 5
    wrong = {words: flags for words in told if (flags := unknown(re.sub(r"[,.'\"]", " ", words).split()))}
    assert wrong == {}


def texts_of(source: str) -> Iterator[str]:
    """The texts of a Python module, with X for what a text is made with."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_containers_are_given_flags_that_exist(contained: list[list[str]]) -> None:
    assert {arguments[0] for arguments in contained} == {"agent", "accountant", "fairshare", "backup", "report"}
    for arguments in contained:
        assert unknown(arguments) == [], arguments


@pytest.mark.parametrize("program", ["agent", "accountant", "fairshare"])
def test_containers_are_given_values_that_are_accepted(
    program: str, contained: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """The settings of a container, as the program itself prints them."""
    arguments = next(a for a in contained if a[0] == program)
    assert main([*arguments, "--print-config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    expected = {"agent": ("interval_s", 60), "accountant": ("timezone", "UTC"), "fairshare": ("interval", 60)}
    key, value = expected[program]
    assert printed[key] == value


def test_the_policy_that_the_chart_begins_with_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    maps = {m["metadata"]["name"]: m for m in yaml.safe_load_all(GOLDEN.read_text("utf-8")) if m["kind"] == "ConfigMap"}
    file = tmp_path / "policy.yaml"
    file.write_text(maps["gputally-fairshare-policy"]["data"]["policy.yaml"], "utf-8")
    assert main(["fairshare", "check", str(file)]) == 0
    assert "1 queues" in capsys.readouterr().out


def test_the_first_screen_has_one_figure_and_two_commands(root: Path) -> None:
    first = (root / "README.md").read_text("utf-8").split("## ")[0]
    assert first.count("![") == 1
    assert "docs/img/report.png" in first
    [block] = code_blocks_of(root / "README.md", first)
    assert [step.command.split("  #")[0].strip() for step in steps(block)] == ["make demo", "make test"]


def test_every_figure_of_the_first_screen_stands_in_the_page_it_names(root: Path) -> None:
    """Measured rows only: this project's and others' figures, on the page that states how they were measured."""
    first = (root / "README.md").read_text("utf-8").split("## ")[0]
    rows = [line.strip("| ").split(" | ") for line in first.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 5
    page = ""
    for _, others, own, measured in rows:
        if target := re.search(r"\]\(([^)#]+)", measured):
            page = (root / target[1]).read_text("utf-8")
        for figure in re.findall(r"\d[\d,.]*\d|\b\d\b", re.sub(r"Prometheus \d", "", f"{others} {own}")):
            assert figure in page, f"{figure}: not in the page that the row names ({measured})"
