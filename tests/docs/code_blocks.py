"""The fenced blocks of the pages people read: what they hold, and whether a test runs them.

The words behind the fence say it. `sh` and `console` are commands, run in order per page; a second word says that
they are not run by `make test`, and why. `yaml` is followed by what it is, and by a name where commands read the file.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
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
    "elsewhere": "needs an outside service: a Grafana, a registry, mail, a lake, a trace to download",
}
COMMANDS = ("sh", "console")
SHOWN = ("text", "csv", "json", "promql", "jsonc", "python", "ini", "sql")
_FENCE = re.compile(
    r"^(?P<in>[ ]*)(?P<ticks>```+)(?P<info>[^\n]*)\n(?P<text>.*?)^(?P=in)(?P=ticks)[ \t]*$", re.MULTILINE | re.DOTALL
)
"""Also those of a list, which are indented."""


@dataclass(frozen=True)
class Fence:
    """One block. words: what stands behind the first, the language."""

    page: Path
    line: int
    language: str
    words: tuple[str, ...]
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def mark(self) -> str | None:
        """Why `make test` does not run it; None: it does."""
        return self.words[0] if self.words else None


@dataclass(frozen=True)
class Step:
    """A command of a block with what it shall print: None where the page does not say."""

    where: str
    command: str
    expected: str | None


def fences(page: Path, text: str) -> Iterator[Fence]:
    """All blocks of a page, top down."""
    for found in _FENCE.finditer(text):
        language, *words = found["info"].split() or [""]
        line = text.count("\n", 0, found.start()) + 1
        yield Fence(page, line, language, tuple(words), textwrap.dedent(found["text"]))


def written() -> dict[Path, str]:
    """Every Markdown file that people read, with its text."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "helm").rglob("*.md")]
    return {path: path.read_text(encoding="utf-8") for path in sorted(found)}


PAGES = {str(page.relative_to(ROOT)): list(fences(page, text)) for page, text in written().items()}
"""The blocks of every page, by its place in the repository."""


def with_commands(mark: str | None) -> list[str]:
    """The pages that have commands with that mark; None: without one."""
    return [name for name, blocks in PAGES.items() if any(f.language in COMMANDS and f.mark == mark for f in blocks)]


def steps(fence: Fence) -> list[Step]:
    """The commands of a block. `sh`: one a line, continued by a backslash or a here-document. `console`: those behind
    `$ `, and between them what they print."""
    found: list[Step] = []
    lines = fence.text.splitlines()
    number = 0
    while number < len(lines):
        first, line = number, lines[number]
        number += 1
        if fence.language == "console":
            if not line.startswith("$ "):
                raise ValueError(f"{fence.where}: a console begins with `$ `")
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
        if fence.language == "console":
            shown = []
            while number < len(lines) and not lines[number].startswith("$ "):
                shown.append(lines[number])
                number += 1
            expected = "\n".join(shown)
        if line.strip() and not line.startswith("#"):
            found.append(Step(f"{fence.page.name}:{fence.line + 1 + first}", line, expected))
    return found


def same(expected: str, printed: str) -> bool:
    """Whether it printed what the page shows: `…` stands for anything inside a line, a line of it for any lines; spaces
    at the ends of lines, and empty lines at either end, are nobody's business."""
    pattern = ""
    for line in _trimmed(expected):
        if line.strip() == "…":
            pattern += r"(?:.*\n)*?"
        else:
            pattern += ".*?".join(re.escape(part) for part in line.split("…")) + r"\n"
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in _trimmed(printed))) is not None


def renewed(text: str, step: Step, printed: str) -> str:
    """The page with what the command printed in place of what it shows; as it is where that has an ellipsis."""
    if step.expected is None or "…" in step.expected:
        return text
    shown = f"$ {step.command}\n{step.expected}\n" if step.expected else f"$ {step.command}\n"
    return text.replace(shown, "\n".join([f"$ {step.command}", *_trimmed(printed), ""]), 1)


def _trimmed(text: str) -> list[str]:
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n").splitlines()
