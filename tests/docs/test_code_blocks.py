"""Every code block states its kind, every command runs or is marked, and no command hides in a block that is only
shown."""

from __future__ import annotations

import re
from pathlib import Path

import promql_parser
import pytest

from tests.docs.code_blocks import COMMANDS, MARKS, SHOWN, CodeBlock, code_blocks_of, renewed, same, steps
from tests.docs.yaml_validators import KINDS

PROGRAMS = (
    "gputally|kubectl|helm|make|docker|buildah|git|curl|pip|uv|nvidia-smi|systemctl|promtool|oc|gcloud|aws|az|eksctl|kind|"
    "python|sh|touch|export|sacct"
)
CALL = re.compile(rf"^(?:\$ )?(?:sudo )?(?:[\w./]*/)?(?:{PROGRAMS}) +\S")


@pytest.fixture(scope="session")
def blocks(pages: dict[Path, str]) -> list[CodeBlock]:
    return [block for page, text in pages.items() for block in code_blocks_of(page, text)]


def test_every_block_says_what_it_holds(blocks: list[CodeBlock]) -> None:
    wrong = []
    for block in blocks:
        if block.language in COMMANDS:
            known = len(block.words) == 0 or (len(block.words) == 1 and block.words[0] in MARKS)
        elif block.language == "yaml":
            known = 1 <= len(block.words) <= 2 and block.words[0] in KINDS
        else:
            known = block.language in SHOWN and len(block.words) <= 1
        if not known:
            wrong.append(f"{block.where}: {block.language} {' '.join(block.words)}")
    assert wrong == [], f"commands: sh or console, alone or with {', '.join(MARKS)}; yaml with {', '.join(KINDS)}"


def test_a_block_shows_the_plug_ins_that_it_needs(blocks: list[CodeBlock]) -> None:
    """Else it would not be checked because of a slip of the pen."""
    needing = [(block, name) for block in blocks for name in block.needs]
    assert needing
    for block, name in needing:
        of_page = [one.text for one in blocks if one.page == block.page and name in one.needs]
        assert any(name.rpartition(".")[2] in text for text in of_page), f"{block.where}: {name}"


def test_a_block_of_a_plug_in_that_is_not_there_is_not_checked() -> None:
    [there, absent] = code_blocks_of(
        Path("page.md"), "```sh host\ntouch x\n```\n```yaml policy a.yaml needs:no-such-one\nx: 1\n```\n"
    )
    assert (there.usable, there.mark, absent.usable, absent.words) == (True, "host", False, ("policy", "a.yaml"))


def test_no_command_hides_in_a_block_that_is_only_shown(blocks: list[CodeBlock]) -> None:
    hidden = [
        f"{block.where}: {line}"
        for block in blocks
        if block.language in SHOWN
        for line in block.text.splitlines()
        if CALL.match(line.strip())
    ]
    assert hidden == [], "make it a block of sh, with a mark if a test cannot run it"


def test_no_command_hides_in_an_indented_block(pages: dict[Path, str]) -> None:
    hidden = []
    for page, text in pages.items():
        outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        indented = [line[4:] for line in outside.splitlines() if line[:4] == "    "]
        hidden += [f"{page.name}: {line}" for line in indented if CALL.match(line)]
    assert hidden == []


def test_the_marks_are_explained(root: Path) -> None:
    index = (root / "docs" / "README.md").read_text("utf-8")
    for mark, meaning in MARKS.items():
        assert f"| `{mark}` | {meaning} |" in index


def test_a_console_is_cut_into_commands_and_what_they_print() -> None:
    text = "```console\n$ one \\\n  two\nprinted\n\nmore\n$ three\n```\n"
    [block] = code_blocks_of(Path("page.md"), text)
    first, second = steps(block)
    assert (first.command, first.expected) == ("one \\\n  two", "printed\n\nmore")
    assert (second.where, second.command, second.expected) == ("page.md:7", "three", "")


def test_a_here_document_belongs_to_its_command() -> None:
    [block] = code_blocks_of(Path("page.md"), "```sh\n# a word\ncat > file <<'END'\none\nEND\nnext\n```\n")
    assert [step.command for step in steps(block)] == ["cat > file <<'END'\none\nEND\n", "next"]


def test_a_page_takes_what_is_printed_now() -> None:
    page = "```console\n$ one\nold\n$ two\na … b\n```\n"
    first, second = steps(next(code_blocks_of(Path("page.md"), page)))
    assert renewed(page, first, "\nnew  \nlines\n\n") == page.replace("old", "new\nlines")
    assert renewed(page, second, "c") == page


@pytest.mark.parametrize(
    ("expected", "printed", "equal"),
    [
        ("a\nb", "\na  \nb\n\n", True),
        ("a\nb", "a\nb c", False),
        ("took … s", "took 3.2 s", True),
        ("a\n…\nz", "a\nb\nc\nz", True),
        ("a\n…\nz", "a\nz", True),
        ("a\n…", "b", False),
    ],
)
def test_what_is_shown_is_compared_but_for_ellipses(expected: str, printed: str, equal: bool) -> None:
    assert same(expected, printed) is equal


def test_the_questions_to_prometheus_are_ones(blocks: list[CodeBlock]) -> None:
    asked = [block for block in blocks if block.language == "promql"]
    assert asked
    for block in asked:
        promql_parser.parse(block.text)


def test_an_upgrade_takes_the_new_charts_defaults(blocks: list[CodeBlock]) -> None:
    """With the former values, a new key would be a nil pointer in the templates."""
    upgrades = [
        line for block in blocks for line in block.text.splitlines() if line.lstrip().startswith("helm upgrade")
    ]
    assert upgrades
    assert [line for line in upgrades if "--reuse-values" in line] == []
