"""Defines `Finding` and `CheckResult`, which a check returns, and the exit code of the doctor."""

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
    """The facts of a check cannot be read here. The message is the reason in one line."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault that a check found.

    what: the fault in one sentence, with the name of the object.
    evidence: the figures that show the fault.
    remedy: the command that fixes the fault or, if there is none, what to do."""

    severity: Severity
    what: str
    evidence: str
    remedy: str


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of a check.

    seen: what the check examined, with figures.
    examined: the number of things that it examined. A check that examined nothing and found nothing was not run.
    check: the name of the check; "" until `gputally.doctor.__main__.run_check` sets it.
    unknown: why the check could not run; "" if it could."""

    seen: str = ""
    findings: tuple[Finding, ...] = ()
    examined: int = 0
    check: str = ""
    unknown: str = ""

    @property
    def not_run(self) -> str:
        """Why the check was not run; "" if it was."""
        if self.unknown or self.examined or self.findings:
            return self.unknown
        return f"there is nothing to check: {self.seen}" if self.seen else "there is nothing to check"

    @property
    def status(self) -> Status:
        if self.not_run:
            return "unknown"
        return max((finding.severity for finding in self.findings), key=EXIT_CODE.__getitem__, default="ok")


def exit_code(results: Sequence[CheckResult]) -> int:
    """Return the exit code of the worst result: 0 nothing wrong, 1 warnings, 2 errors. A check that could not run is
    not a fault."""
    return max((EXIT_CODE[result.status] for result in results), default=0)


def first_findings(findings: Iterable[Finding], what: str) -> tuple[Finding, ...]:
    """Return at most `MOST_SHOWN` findings. If there are more, the last one counts the others (`5 more pods`).

    what: the noun after the count, in the plural."""
    all_findings = list(findings)
    if len(all_findings) <= MOST_SHOWN:
        return tuple(all_findings)
    shown, rest = all_findings[: MOST_SHOWN - 1], all_findings[MOST_SHOWN - 1 :]
    worst: Severity = "error" if any(finding.severity == "error" for finding in rest) else "warning"
    return (*shown, Finding(worst, f"{len(rest)} more {what}", rest[0].what, rest[0].remedy))
