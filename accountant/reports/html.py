"""The report as one self-contained page: nothing loaded, no script, escaped throughout.

Names of teams, pods and jobs come from users: everything passes jinja2's autoescape, charts are built as element
trees, and a content security policy in the page forbids whatever would still slip through.
"""

from __future__ import annotations

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined

from accountant.reports import charts, formats
from accountant.reports.model import Report


def render(report: Report) -> str:
    """A whole HTML document."""
    title = f"Allocated GPU-hours by day, {formats.span(report)}"
    return (
        _environment()
        .get_template("report.html")
        .render(
            report=report,
            f=formats,
            series=charts.series(report.daily),
            daily=charts.daily(report.daily, title, capacity=report.team is None),
            hours=charts.hours(report.rhythm, "Held GPUs by hour of the day"),
            accounts=charts.accounts(report.accounts, f"Where the capacity of {formats.span(report)} went"),
        )
    )


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("accountant.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
