"""Runs the commands of a page in order, from its top, in one folder.

`gputally` is called within this process, because a page has dozens of calls and a start of Python takes a second.
Commands that need a shell run in one, with the same folder and environment."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gputally.__main__ import main
from tests.docs.code_blocks import COMMANDS, PAGES, ROOT, CodeBlock, renewed, same, steps

SECONDS = 120
_SHELL = re.compile(r"[|<>;&`$(){}\n]")
_INTO = re.compile(r"\s>\s*(?P<file>[\w./-]+)\s*$")


@dataclass(frozen=True)
class CommandResult:
    """The result of a command: both streams and the exit code."""

    code: int
    printed: str


@dataclass
class Shell:
    """A folder and an environment in which commands run. in_process: call `gputally` in this process."""

    folder: Path
    environ: dict[str, str]
    in_process: bool = True

    def run(self, command: str) -> CommandResult:
        words = shlex.split(command.replace("\\\n", " "), comments=True)
        if words[:1] == ["export"]:
            for name, value in (word.split("=", 1) for word in words[1:]):
                self.environ[name] = os.path.expandvars(value)
            return CommandResult(0, "")
        into = _INTO.search(command)
        plain = command[: into.start() if into else None].replace("\\\n", " ")
        if self.in_process and words[0].rsplit("/", 1)[-1] == "gputally" and not _SHELL.search(plain):
            return self._called(shlex.split(plain, comments=True)[1:], into["file"] if into else None)
        return self._started(command)

    def _called(self, arguments: list[str], into: str | None) -> CommandResult:
        """Call the program in this process. into: the file for its standard output."""
        written = io.BytesIO()  # a report is bytes
        printed = io.TextIOWrapper(written, encoding="utf-8", write_through=True)
        with contextlib.ExitStack() as stack:
            output = stack.enter_context((self.folder / into).open("w", encoding="utf-8")) if into else printed
            stack.enter_context(self._here())
            stack.enter_context(contextlib.redirect_stdout(output))
            stack.enter_context(contextlib.redirect_stderr(printed))
            try:
                code = main(arguments)
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
        return CommandResult(code, written.getvalue().decode("utf-8", "replace"))

    @contextlib.contextmanager
    def _here(self) -> Iterator[None]:
        """Run the block with the shell's folder and environment in this process."""
        folder, environ = Path.cwd(), dict(os.environ)
        os.chdir(self.folder)
        os.environ.update(self.environ)
        try:
            yield
        finally:
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(environ)

    def _started(self, command: str) -> CommandResult:
        environ = {**os.environ, **self.environ}
        environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command], cwd=self.folder, env=environ, text=True, timeout=SECONDS,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        return CommandResult(done.returncode, done.stdout)


def put(folder: Path, block: CodeBlock) -> None:
    """Write the file that the page shows, if the block has a file name."""
    if block.language in ("yaml", "csv", "json") and block.words:
        name = block.words[-1]
        if "." in name:
            (folder / name).write_text(block.text, "utf-8")


def follow(page: str, marks: Collection[str | None], shell: Shell, stands_for: Mapping[str, str] = {}) -> list[str]:
    """Run the page's blocks with one of these marks in order. stands_for: values for the words in capitals.

    Returns the differences from the output that the page shows."""
    names = re.compile("|".join(rf"(?<![\w-]){re.escape(name)}(?![\w-])" for name in stands_for) or r"(?!)")
    otherwise = []
    for block in PAGES[page]:
        if not block.usable:
            continue
        put(shell.folder, block)
        if block.language not in COMMANDS or block.mark not in marks:
            continue
        for step in steps(block):
            said = shell.run(names.sub(lambda found: stands_for[found[0]], step.command))
            good = said.code == 0 if step.expected is None else same(step.expected, said.printed)
            if not good and os.environ.get("GPUTALLY_UPDATE"):
                (ROOT / page).write_text(renewed((ROOT / page).read_text("utf-8"), step, said.printed), "utf-8")
            otherwise += [] if good else [f"{step.where}: {step.command}\n{said.printed}"]
    return otherwise
