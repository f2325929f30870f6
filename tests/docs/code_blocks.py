"""The fenced code blocks of the pages: their content, and whether a test runs them.

The words after the opening fence classify a block. `sh` and `console` are commands, which run in order on each page; a
second word names the reason for which `make test` does not run them. `yaml` is followed by the kind of file, and by a
file name if commands read it. A last word `needs:kueue,histories.slurm` names plug-ins: where one of them is deleted,
the block is neither run nor checked."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARKS = {
    "demo": "queries the pages of `make demo`; run by `make test-real` against a demo of a month",
    "slow": "run by `make test-real`, not by `make test`",
    "ci": "run by `.ci/run`",
    "long": "takes minutes or hours; its parts are tested at small size",
    "cluster": "run by `make test-real` with kubectl and helm on a real API server, whose nodes run no pods",
    "kubelet": "needs nodes that run pods",
    "gpu": "needs an NVIDIA GPU and its driver; run by `make test-real` on the simulated ones of the tests",
    "host": "changes the machine it runs on, or needs root on it",
    "tutorial": "builds a package; run by tests/plugins/test_tutorials.py",
    "elsewhere": "needs an outside service: a Grafana, a registry, mail, a lake, a trace to download",
}
COMMANDS = ("sh", "console")
SHOWN = ("text", "csv", "json", "promql", "jsonc", "python", "ini", "sql", "toml")
_NEEDS = "needs:"
_FENCE = re.compile(
    r"^(?P<in>[ ]*)(?P<ticks>```+)(?P<info>[^\n]*)\n(?P<text>.*?)^(?P=in)(?P=ticks)[ \t]*$", re.MULTILINE | re.DOTALL
)
"""Matches code blocks, also indented ones in lists."""


@dataclass(frozen=True)
class CodeBlock:
    """A fenced code block. words: the words after the language. needs: the plug-ins that it shows, by name or by seam
    and name."""

    page: Path
    line: int
    language: str
    words: tuple[str, ...]
    text: str
    needs: frozenset[str] = frozenset()

    @property
    def usable(self) -> bool:
        """Whether the plug-ins that it shows are there."""
        return self.needs <= plugin_names()

    @property
    def where(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def mark(self) -> str | None:
        """The reason for which `make test` does not run the block; None if it does."""
        return self.words[0] if self.words else None


@dataclass(frozen=True)
class Step:
    """A command with its expected output; None if the page shows no output."""

    where: str
    command: str
    expected: str | None


def code_blocks_of(page: Path, text: str) -> Iterator[CodeBlock]:
    """Return all code blocks of a page from top to bottom."""
    for found in _FENCE.finditer(text):
        language, *words = found["info"].split() or [""]
        needs = {name for word in words if word.startswith(_NEEDS) for name in word.removeprefix(_NEEDS).split(",")}
        plain = tuple(word for word in words if not word.startswith(_NEEDS))
        line = text.count("\n", 0, found.start()) + 1
        yield CodeBlock(page, line, language, plain, textwrap.dedent(found["text"]), frozenset(needs))


@cache
def plugin_names() -> frozenset[str]:
    """Return the names of all installed plug-ins, each also with its seam: `slurm`, `histories.slurm`."""
    seams = [group for group in entry_points().groups if group.startswith("gputally.")]
    found = [(seam.partition(".")[2], name) for seam in seams for name in entry_points(group=seam).names]
    return frozenset(word for seam, name in found for word in (name, f"{seam}.{name}"))


def pages_with_text() -> dict[Path, str]:
    """Return every Markdown file that users read, with its text."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "helm").rglob("*.md")]
    return {path: path.read_text(encoding="utf-8") for path in sorted(found)}


PAGES = {str(page.relative_to(ROOT)): list(code_blocks_of(page, text)) for page, text in pages_with_text().items()}
"""The code blocks of every page, by its path in the repository."""


def with_commands(mark: str | None) -> list[str]:
    """Return the pages with commands of this mark; None: commands without a mark."""
    return [name for name, blocks in PAGES.items() if any(f.language in COMMANDS and f.mark == mark for f in blocks)]


def steps(block: CodeBlock) -> list[Step]:
    """Return the commands of a block. In `sh` each line is a command, continued by a backslash or a here-document. In
    `console` a command follows `$ `, and the lines after it are its output."""
    found: list[Step] = []
    lines = block.text.splitlines()
    number = 0
    while number < len(lines):
        first, line = number, lines[number]
        number += 1
        if block.language == "console":
            if not line.startswith("$ "):
                raise ValueError(f"{block.where}: a console begins with `$ `")
            line = line[2:]
        while line.endswith("\\") and number < len(lines):
            line += "\n" + lines[number]
            number += 1
        if here := re.search(r"<<-? *['\"]?(\w+)['\"]?", line):
            while number < len(lines):
                line += "\n" + lines[number]
                number += 1
                if lines[number - 1] == here[1]:
                    line += "\n"
                    break
        expected = None
        if block.language == "console":
            shown = []
            while number < len(lines) and not lines[number].startswith("$ "):
                shown.append(lines[number])
                number += 1
            expected = "\n".join(shown)
        if line.strip() and not line.startswith("#"):
            found.append(Step(f"{block.page.name}:{block.line + 1 + first}", line, expected))
    return found


def same(expected: str, printed: str) -> bool:
    """Return whether the printed output matches the page. `…` matches any text within a line, and a line of its own any
    lines. Spaces at line ends, and empty lines at the start and the end, are ignored."""
    pattern = ""
    for line in _trimmed(expected):
        if line.strip() == "…":
            pattern += r"(?:.*\n)*?"
        else:
            pattern += ".*?".join(re.escape(part) for part in line.split("…")) + r"\n"
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in _trimmed(printed))) is not None


def renewed(text: str, step: Step, printed: str) -> str:
    """Return the page with the printed output in place of the shown one. Output with an ellipsis stays."""
    if step.expected is None or "…" in step.expected:
        return text
    shown = f"$ {step.command}\n{step.expected}\n" if step.expected else f"$ {step.command}\n"
    return text.replace(shown, "\n".join([f"$ {step.command}", *_trimmed(printed), ""]), 1)


def _trimmed(text: str) -> list[str]:
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n").splitlines()
