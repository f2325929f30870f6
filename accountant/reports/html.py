"""The report as one self-contained page: nothing loaded, no script, escaped throughout.

Names of teams, pods and jobs come from users: everything passes jinja2's autoescape, charts are built as element
trees, and a content security policy in the page forbids whatever would still slip through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from accountant.books.statements import Adjustment, Correction
from accountant.reports import charts, formats
from accountant.reports.model import Report
from agent.plaintext import for_page


class Named(Protocol):
    """A row that is about one job."""

    @property
    def cluster(self) -> str: ...
    @property
    def namespace(self) -> str: ...
    @property
    def job(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Links:
    """Where figures lead, on a page that has other pages beside it: addresses of the lines of a figure (by team,
    account, GPU model, …), of a job, of a team, and of whatever was booked beside the month's own time."""

    lines: Callable[..., str]
    job: Callable[[Named], str]
    team: Callable[[str], str]
    month: Callable[[str], str]
    act: Callable[[Correction | Adjustment], str]
    jobs: str


def render(report: Report, links: Links | None = None) -> str:
    """A whole HTML document. links: None for a file, which stands alone."""
    title = f"Allocated GPU-hours by day, {formats.span(report)}"
    return (
        _environment()
        .get_template("report.html")
        .render(
            report=report,
            links=links,
            f=formats,
            several_clusters=len({row.cluster for row in _of_jobs(report)}) > 1,
            series=charts.series(report.daily),
            daily=charts.daily(report.daily, title, capacity=report.team is None),
            hours=charts.hours(report.rhythm, "Held GPUs by hour of the day"),
            accounts=charts.accounts(report.accounts, f"Where the capacity of {formats.span(report)} went"),
        )
    )


def _of_jobs(report: Report) -> Iterator[Named]:
    yield from report.jobs_by_cost
    yield from report.jobs_by_waste
    yield from report.epochs
    yield from report.idle_holders
    yield from report.spot
    yield from (hint.job for hint in report.hints)


def shown(value: object) -> object:
    """What a template prints, without characters that turn the reading direction or are none: jinja2's `finalize`."""
    return for_page(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("accountant.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
