"""Types what a page says, from its top: runs its commands, in order, in one folder.

`gputally` is called in this process, because a page has dozens of calls and a start of Python costs a second each;
whatever needs a shell gets one, with the same folder and environment."""

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
from tests.docs.code_blocks import COMMANDS, PAGES, ROOT, Fence, renewed, same, steps

SECONDS = 120
_SHELL = re.compile(r"[|<>;&`$(){}\n]")
_INTO = re.compile(r"\s>\s*(?P<file>[\w./-]+)\s*$")


@dataclass(frozen=True)
class Said:
    """What a command printed, both streams, and how it ended."""

    code: int
    printed: str


@dataclass
class Shell:
    """A folder, an environment, and commands in them. in_process: call `gputally` here instead of starting it."""

    folder: Path
    environ: dict[str, str]
    in_process: bool = True

    def run(self, command: str) -> Said:
        words = shlex.split(command.replace("\\\n", " "), comments=True)
        if words[:1] == ["export"]:
            for name, value in (word.split("=", 1) for word in words[1:]):
                self.environ[name] = os.path.expandvars(value)
            return Said(0, "")
        into = _INTO.search(command)
        plain = command[: into.start() if into else None].replace("\\\n", " ")
        if self.in_process and words[0].rsplit("/", 1)[-1] == "gputally" and not _SHELL.search(plain):
            return self._called(shlex.split(plain, comments=True)[1:], into["file"] if into else None)
        return self._started(command)

    def _called(self, arguments: list[str], into: str | None) -> Said:
        """into: the file that the command's output goes to; what it complains of does not."""
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
        return Said(code, written.getvalue().decode("utf-8", "replace"))

    @contextlib.contextmanager
    def _here(self) -> Iterator[None]:
        """This process in the folder, with the environment."""
        folder, environ = Path.cwd(), dict(os.environ)
        os.chdir(self.folder)
        os.environ.update(self.environ)
        try:
            yield
        finally:
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(environ)

    def _started(self, command: str) -> Said:
        environ = {**os.environ, **self.environ}
        environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command], cwd=self.folder, env=environ, text=True, timeout=SECONDS,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        return Said(done.returncode, done.stdout)


def put(folder: Path, fence: Fence) -> None:
    """The file that the page shows, where it names one."""
    if fence.language in ("yaml", "csv", "json") and fence.words:
        name = fence.words[-1]
        if "." in name:
            (folder / name).write_text(fence.text, "utf-8")


def follow(page: str, marks: Collection[str | None], shell: Shell, stands_for: Mapping[str, str] = {}) -> list[str]:
    """Type the blocks with one of these marks, top down. stands_for: what a reader puts for a word in capitals.

    Returns what came otherwise than the page shows."""
    names = re.compile("|".join(rf"(?<![\w-]){re.escape(name)}(?![\w-])" for name in stands_for) or r"(?!)")
    otherwise = []
    for fence in PAGES[page]:
        put(shell.folder, fence)
        if fence.language not in COMMANDS or fence.mark not in marks:
            continue
        for step in steps(fence):
            said = shell.run(names.sub(lambda found: stands_for[found[0]], step.command))
            good = said.code == 0 if step.expected is None else same(step.expected, said.printed)
            if not good and os.environ.get("GPUTALLY_UPDATE"):
                (ROOT / page).write_text(renewed((ROOT / page).read_text("utf-8"), step, said.printed), "utf-8")
            otherwise += [] if good else [f"{step.where}: {step.command}\n{said.printed}"]
    return otherwise
