"""Defines a finding, the result of a check, and the exit code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Severity = Literal["warning", "error"]
Status = Literal["ok", "warning", "error", "unknown"]
EXIT_CODE: dict[Status, int] = {"ok": 0, "unknown": 0, "warning": 1, "error": 2}
MOST_SHOWN = 10
"""Largest number of findings of one kind that are listed; the others are counted."""


class CannotCheck(Exception):
    """A check's facts are not available here; `str()` gives the reason in one line."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault.

    what: the fault in one sentence, with the name of the object.
    evidence: the figures behind it.
    remedy: the command that fixes it or, if there is none, what to do."""

    severity: Severity
    what: str
    evidence: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a check.

    seen: what was examined, with figures.
    unknown: why the check could not run, "" if it ran."""

    check: str
    seen: str = ""
    findings: tuple[Finding, ...] = ()
    unknown: str = ""

    @property
    def status(self) -> Status:
        if self.unknown:
            return "unknown"
        return (
            "error" if any(one.severity == "error" for one in self.findings) else "warning" if self.findings else "ok"
        )


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of a check before it gets the check's name."""

    seen: str
    findings: tuple[Finding, ...] = ()


def exit_code(results: Sequence[Result]) -> int:
    """Return the exit code of the worst result: 0 nothing wrong, 1 warnings, 2 errors. A check that could not run is
    not a fault."""
    return max((EXIT_CODE[result.status] for result in results), default=0)


def first_findings(findings: Iterable[Finding], what: str) -> tuple[Finding, ...]:
    """Return the first findings and, as the last one, how many more of `what` there are."""
    found = list(findings)
    if len(found) <= MOST_SHOWN:
        return tuple(found)
    shown, rest = found[: MOST_SHOWN - 1], found[MOST_SHOWN - 1 :]
    worst: Severity = "error" if any(one.severity == "error" for one in rest) else "warning"
    return (*shown, Finding(worst, f"{len(rest)} more {what}", rest[0].what, rest[0].remedy))


def joined_names(names: Iterable[str], shown: int = 4) -> str:
    """`a, b, c, d and 3 more`."""
    found = list(names)
    rest = len(found) - shown
    return ", ".join(found[:shown]) + (f" and {rest} more" if rest > 0 else "")
