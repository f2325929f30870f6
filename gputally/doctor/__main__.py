"""Runs `gputally doctor` and prints the findings.

It uses the standard library's parser, so it also runs where only the agent is installed: there it makes the checks of
the machine, and the other checks report what is missing. Exit codes: 0 nothing wrong, 1 warnings, 2 errors, 64 wrong
call."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from gputally.base.clock import SystemClock
from gputally.base.command_line import OUTPUTS, show
from gputally.doctor.check_inputs import Options, Sources, usual
from gputally.doctor.check_list import CHECKS, make_all
from gputally.doctor.findings import Result, Status, exit_code

if TYPE_CHECKING:
    from rich.console import RenderableType

_STYLE: dict[Status, str] = {"ok": "green", "warning": "yellow", "error": "bold red", "unknown": "dim"}
_MARK: dict[Status, str] = {"ok": "ok", "warning": "warning", "error": "ERROR", "unknown": "not made"}
"""Marks of the severities, which can be read without colours."""


def table(results: Sequence[Result]) -> RenderableType:
    """Render one line per check, then every finding with its figures and remedy, the worst first."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    overview = Table(title="Checks", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("check", "result"):
        overview.add_column(name, no_wrap=True)
    overview.add_column("looked at", overflow="fold")
    for result in results:
        said = Text(_MARK[result.status], _STYLE[result.status])
        overview.add_row(result.check, said, Text(result.unknown or result.seen, "dim" if result.unknown else ""))
    parts: list[RenderableType] = [overview]
    found = [(result.check, each) for result in results for each in result.findings]
    for check, each in sorted(found, key=lambda one: one[1].severity != "error"):
        mark = (f"{_MARK[each.severity]}  ", _STYLE[each.severity])
        parts.append(Text.assemble(mark, (f"{check}: ", "dim"), (each.what, "bold")))
        if each.evidence:
            parts.append(Padding(Text(each.evidence), (0, 0, 0, 4), expand=False))
        parts.append(Padding(Text(f"→ {each.remedy}", "cyan"), (0, 0, 0, 4), expand=False))
    return Group(*parts, Text(summary(results)))


def summary(results: Sequence[Result]) -> str:
    """`2 errors, 1 warning; 12 checks made, 2 not`."""
    counts = {
        severity: sum(1 for result in results for each in result.findings if each.severity == severity)
        for severity in ("error", "warning")
    }
    words = ", ".join(f"{count} {name}{'s' * (count != 1)}" for name, count in counts.items() if count)
    missed = sum(1 for result in results if result.unknown)
    made = f"{len(results) - missed} checks made" + (f", {missed} not" if missed else "")
    return f"{words or 'nothing wrong found'}; {made}"


def document(results: Sequence[Result]) -> dict[str, Any]:
    """Return all results for programs. exit_code: the command's."""
    return {
        "schema": 1,
        "exit_code": exit_code(results),
        "checks": [
            {
                "check": result.check,
                "status": result.status,
                "seen": result.seen,
                "unknown": result.unknown or None,
                "findings": [asdict(each) for each in result.findings],
            }
            for result in results
        ],
    }


def records(results: Sequence[Result]) -> Iterator[dict[str, object]]:
    """Yield one record for every finding, and one for every check without findings."""
    for result in results:
        for each in result.findings:
            yield {"check": result.check, **asdict(each)}
        if not result.findings:
            text = result.unknown or result.seen
            yield {"check": result.check, "severity": result.status, "what": "", "evidence": text, "remedy": ""}


CALLED_WRONGLY = 64
"""EX_USAGE of sysexits.h; 2 already means that there are errors."""
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(CALLED_WRONGLY, f"{self.prog}: {message}\n")


def parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    checks = "\n".join(f"  {check.name:<12} {check.about}" for check in CHECKS.values())
    made = _Parser(
        prog="gputally doctor",
        description="Look for what usually goes wrong; every finding with its figures and the command that mends it.",
        epilog=f"checks:\n{checks}\n\nexit codes: 0 nothing wrong, 1 warnings, 2 errors, 64 called wrongly",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--only", action="append", default=[], metavar="CHECK[,CHECK]", help="Only these checks (repeatable)."
    )
    made.add_argument("--output", choices=OUTPUTS, default="table", help="How to print what was found.")
    made.add_argument(
        "--url", default=os.environ.get("GPUTALLY_URL", Options.url), help="A running accountant (GPUTALLY_URL)."
    )
    made.add_argument("--token-file", type=Path, metavar="FILE", help="File with the bearer token for --url.")
    made.add_argument(
        "--ca-file",
        type=Path,
        metavar="FILE",
        default=_path(os.environ.get("GPUTALLY_CA_FILE")),
        help="Authorities trusted for https, PEM (GPUTALLY_CA_FILE; default: the system's).",
    )
    made.add_argument("--kubeconfig", type=Path, metavar="FILE", help="Instead of the default one.")
    made.add_argument("--policy", type=Path, metavar="FILE", help="Policy file instead of the one in force.")
    made.add_argument(
        "--namespace",
        default=_own_namespace(),
        help="Namespace of the release (default: this pod's, else %(default)s).",
    )
    made.add_argument(
        "--kubelet-socket", type=Path, metavar="PATH", default=Options.kubelet_socket, help="Its PodResources socket."
    )
    made.add_argument("--proc", type=Path, metavar="PATH", default=Options.proc, help="The host's process table.")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks; returns the exit code."""
    made = parser()
    try:
        given = made.parse_args(argv)
        only = [name for names in given.only for name in names.split(",") if name]
        unknown = [name for name in only if name not in CHECKS]
        if unknown:
            made.error(f"no check {unknown[0]!r}; one of {', '.join(CHECKS)}")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else CALLED_WRONGLY
    logging.basicConfig(level=logging.ERROR)
    options = Options(
        url=given.url,
        token_file=given.token_file,
        ca_file=given.ca_file,
        kubeconfig=given.kubeconfig,
        policy=given.policy,
        namespace=given.namespace,
        kubelet_socket=given.kubelet_socket,
        proc=given.proc,
    )
    return examine(usual(options, SystemClock()), only, given.output)


def examine(sources: Sources, only: Sequence[str], output: str) -> int:
    """Run the checks, print their findings, and return the exit code."""
    results = make_all(sources, only)
    form = next(each for each in OUTPUTS if each == output)
    show(form, lambda: table(results), document(results), records(results))
    return exit_code(results)


def _own_namespace() -> str:
    try:
        return _NAMESPACE_FILE.read_text(encoding="utf-8").strip() or Options.namespace
    except (OSError, UnicodeDecodeError):
        return Options.namespace


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None


if __name__ == "__main__":
    sys.exit(main())
