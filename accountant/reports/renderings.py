"""Every form a report comes in: who makes it, what it is called on the wire, and how its file ends.

Equal reports give equal bytes in every form. What a form needs beyond the standard library is imported when the form
is first asked for, so that nobody waits for, or has to install, what he does not use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from accountant.reports.model import Report


Form = Literal["html", "pdf", "csv", "xlsx", "parquet", "json", "focus", "focus-1.2"]
BINARY: Final = frozenset[Form](("pdf", "xlsx", "parquet", "focus"))
"""Forms that no terminal shows."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """render: the bytes. Raises accountant.errors.CannotRender where something is missing."""

    render: Callable[[Report], bytes]
    media_type: str
    extension: str
    inline: bool = False
    """Whether a browser shows it; else it is offered as a file."""
    charges: bool = False
    """Whether it lists every charge of a calendar month, for which the report has to be built with an issuer."""


def _html(report: Report) -> bytes:
    from accountant.reports import html

    return html.render(report).encode()


def _pdf(report: Report) -> bytes:
    from accountant.reports import pdf

    return pdf.render(report)


def _csv(report: Report) -> bytes:
    from accountant.reports import csv

    return csv.render(report).encode()


def _xlsx(report: Report) -> bytes:
    from accountant.reports import xlsx

    return xlsx.render(report)


def _parquet(report: Report) -> bytes:
    from accountant.reports import parquet

    return parquet.render(report)


def _json(report: Report) -> bytes:
    from accountant.reports import jsondoc

    return jsondoc.render(report).encode()


def _focus(report: Report) -> bytes:
    from accountant.reports.focus import bundle

    return bundle.render(report)


def _focus_1_2(report: Report) -> bytes:
    from accountant.reports.focus import projection

    return projection.render(report).encode()


RENDERINGS: Final[dict[Form, Rendering]] = {
    "html": Rendering(_html, "text/html; charset=utf-8", "html", inline=True),
    "pdf": Rendering(_pdf, "application/pdf", "pdf"),
    "csv": Rendering(_csv, "text/csv; charset=utf-8", "csv"),
    "xlsx": Rendering(_xlsx, "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet", "xlsx"),
    "parquet": Rendering(_parquet, "application/vnd.apache.parquet", "parquet"),
    "json": Rendering(_json, "application/json", "json", inline=True),
    "focus": Rendering(_focus, "application/zip", "focus.zip", charges=True),
    "focus-1.2": Rendering(_focus_1_2, "text/csv; charset=utf-8", "focus-1.2.csv", charges=True),
}
