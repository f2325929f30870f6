"""`gputally doctor`: look for what usually goes wrong, here and in the cluster, and say what mends it.

The standard library's parser, so that it also runs where only the agent is installed: then the checks of this machine
are made, and the others say what they lack. Exit codes: 0 nothing wrong, 1 warnings, 2 errors, 64 called wrongly.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from agent import logs
from agent.clock import SystemClock
from agent.output import OUTPUTS, show
from gputally.doctor import show as shown
from gputally.doctor.checks import CHECKS, make_all
from gputally.doctor.model import exit_code
from gputally.doctor.sources import Options, Sources, usual

CALLED_WRONGLY = 64
"""EX_USAGE of sysexits.h: 2 already says that there are errors."""
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
    logs.configure("ERROR")
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
    """Make the checks, print what they found, and answer the exit code."""
    results = make_all(sources, only)
    form = next(each for each in OUTPUTS if each == output)
    show(form, lambda: shown.table(results), shown.document(results), shown.records(results))
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
