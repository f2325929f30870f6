"""Rules for Prometheus: one source for `promtool`, for a plain Prometheus and for the chart's PrometheusRule."""

from __future__ import annotations

from dashboards import alerts, records, rulefile
from dashboards.rulefile import Alert, Record

GROUPS = (records.RECORDS, alerts.METERING, alerts.LEDGER, alerts.FAIRSHARE, alerts.SAVING)
ALERTS = tuple(rule for group in GROUPS for rule in group.rules if isinstance(rule, Alert))
RECORDS = tuple(rule for group in GROUPS for rule in group.rules if isinstance(rule, Record))


def render() -> str:
    """The rule file that is committed."""
    return rulefile.render(GROUPS)
