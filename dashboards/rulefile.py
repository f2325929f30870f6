"""What a rule is to Prometheus, and the file that it reads rules from.

Names of records are level:metric:operation (prometheus.io/docs/practices/rules). No metric and no Grafana here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import yaml

Severity = Literal["critical", "warning", "info"]
"""critical: money or measurements are being lost. warning: they will be, or somebody waits. info: money to save."""

RUNBOOKS = "https://gputally.dev/docs/runbooks"
INTERVAL = "1m"


@dataclass(frozen=True, slots=True)
class Record:
    """A series that is computed once for all who ask."""

    name: str
    expr: str


@dataclass(frozen=True, slots=True)
class Alert:
    """`summary` and `description` may use the labels and the value of the alert, as Prometheus' templates do."""

    name: str
    expr: str
    wait: str
    severity: Severity
    summary: str
    description: str

    @property
    def runbook(self) -> str:
        return f"{RUNBOOKS}#{self.name.lower()}"


@dataclass(frozen=True, slots=True)
class Group:
    """Evaluated together, in order."""

    name: str
    rules: tuple[Record | Alert, ...]


def render(groups: Iterable[Group]) -> str:
    """The rule file; equal input gives equal bytes."""
    plain = [
        {"name": group.name, "interval": INTERVAL, "rules": [_plain(rule) for rule in group.rules]} for group in groups
    ]
    head = "# Written by `gputally dashboards build` from dashboards/rules.py; do not edit.\n"
    return head + yaml.safe_dump({"groups": plain}, sort_keys=False, width=4096, allow_unicode=True)


def _plain(rule: Record | Alert) -> dict[str, object]:
    if isinstance(rule, Record):
        return {"record": rule.name, "expr": rule.expr}
    return {
        "alert": rule.name,
        "expr": rule.expr,
        "for": rule.wait,
        "labels": {"severity": rule.severity},
        "annotations": {"summary": rule.summary, "description": rule.description, "runbook_url": rule.runbook},
    }
