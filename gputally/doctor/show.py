"""Results as a table, as JSON and as CSV lines. Renders, asks nobody."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gputally.doctor.model import Result, Status, exit_code

if TYPE_CHECKING:
    from rich.console import RenderableType

_STYLE: dict[Status, str] = {"ok": "green", "warning": "yellow", "error": "bold red", "unknown": "dim"}
_MARK: dict[Status, str] = {"ok": "ok", "warning": "warning", "error": "ERROR", "unknown": "not made"}
"""Read without colours too."""


def table(results: Sequence[Result]) -> RenderableType:
    """One line a check, then every finding with its figures and what mends it; the worst first."""
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
    for check, severity, what, evidence, remedy in _findings(results):
        parts.append(Text.assemble((f"{_MARK[severity]}  ", _STYLE[severity]), (f"{check}: ", "dim"), (what, "bold")))
        if evidence:
            parts.append(Padding(Text(evidence), (0, 0, 0, 4), expand=False))
        parts.append(Padding(Text(f"→ {remedy}", "cyan"), (0, 0, 0, 4), expand=False))
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
    """Everything, for programs. exit_code: the command's."""
    return {
        "schema": 1,
        "exit_code": exit_code(results),
        "checks": [
            {
                "check": result.check,
                "status": result.status,
                "seen": result.seen,
                "unknown": result.unknown or None,
                "findings": [
                    {"severity": each.severity, "what": each.what, "evidence": each.evidence, "remedy": each.remedy}
                    for each in result.findings
                ],
            }
            for result in results
        ],
    }


def records(results: Sequence[Result]) -> Iterator[dict[str, object]]:
    """A line for every finding, and one for every check without any."""
    for result in results:
        for each in result.findings:
            yield {
                "check": result.check, "severity": each.severity, "what": each.what, "evidence": each.evidence,
                "remedy": each.remedy,
            }  # fmt: skip
        if not result.findings:
            text = result.unknown or result.seen
            yield {"check": result.check, "severity": result.status, "what": "", "evidence": text, "remedy": ""}


def _findings(results: Sequence[Result]) -> list[tuple[str, Status, str, str, str]]:
    rows: list[tuple[str, Status, str, str, str]] = [
        (result.check, each.severity, each.what, each.evidence, each.remedy)
        for result in results
        for each in result.findings
    ]
    return sorted(rows, key=lambda row: row[1] != "error")
