"""Lists the file formats of a report with their media types and file names.

Equal reports give equal bytes in every format. The libraries of a format are imported on its first use, so unused
formats cost no time and need not be installed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from accountant.reports.report_builder import Report

Form = Literal["html", "pdf", "csv", "xlsx", "parquet", "json", "focus", "focus-1.2"]
BINARY: Final = frozenset[Form](("pdf", "xlsx", "parquet", "focus"))
"""Binary formats, which are not written to a terminal."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """One format. render: returns the bytes; raises accountant.core.errors.CannotRender if something is missing."""

    render: Callable[[Report], bytes]
    media_type: str
    extension: str
    inline: bool = False
    """Whether a browser displays it; otherwise it is offered as a download."""
    charges: bool = False
    """Whether it lists every charge of a calendar month; the report must then be built with an issuer."""


def _html(report: Report) -> bytes:
    from accountant.reports import html_and_pdf

    return html_and_pdf.render_html(report).encode()


def _pdf(report: Report) -> bytes:
    from accountant.reports import html_and_pdf

    return html_and_pdf.render_pdf(report)


def _csv(report: Report) -> bytes:
    from accountant.reports import csv_xlsx_parquet

    return csv_xlsx_parquet.render_csv(report).encode()


def _xlsx(report: Report) -> bytes:
    from accountant.reports import csv_xlsx_parquet

    return csv_xlsx_parquet.render_xlsx(report)


def _parquet(report: Report) -> bytes:
    from accountant.reports import csv_xlsx_parquet

    return csv_xlsx_parquet.render_parquet(report)


def _json(report: Report) -> bytes:
    from accountant.reports import report_tables

    return report_tables.render(report).encode()


def _focus(report: Report) -> bytes:
    from accountant.reports import focus_export

    return focus_export.render_bundle(report)


def _focus_1_2(report: Report) -> bytes:
    from accountant.reports import focus_export

    return focus_export.render_projection(report).encode()


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

_LONGEST: Final = 180
"""Maximum length in characters; with a digest and the longest extension it is below the limit of file systems."""


def file_name(extension: str, *parts: str | None) -> str:
    """The file name of a report: `gputally-2026-10-vision.pdf`; only letters, digits, `-`, `_` and `.`.

    If characters had to be replaced, the name ends in a digest of the original, so that two teams never share a
    file."""
    name = "-".join(part for part in ("gputally", *parts) if part)
    safe = "".join(char if char.isascii() and (char.isalnum() or char in "-_.") else "_" for char in name)[:_LONGEST]
    if safe != name:
        safe += "-" + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{safe}.{extension}"
