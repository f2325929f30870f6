"""Lists the file formats of a report with their media types and file names.

Equal reports give equal bytes in every format, with the same libraries and fonts. The libraries of a format are
imported on its first use, so unused formats cost no time and need not be installed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from accountant.reports.report_builder import Report

Form = Literal["html", "pdf", "csv", "xlsx", "parquet", "json", "focus", "focus-1.2"]
BINARY: Final = frozenset[Form](("pdf", "xlsx", "parquet", "focus"))
"""Binary formats."""
READABLE: Final = frozenset[Form](("csv", "json", "focus-1.2"))
"""The formats that may be written to a terminal."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """A file format. module, function: the function that writes the file, and its module in accountant.reports."""

    module: str
    function: str
    media_type: str
    extension: str
    inline: bool = False
    """Whether a browser displays it; otherwise it is offered as a download."""
    charges: bool = False
    """Whether it lists every charge of a calendar month; the report must then be built with an issuer."""

    def render(self, report: Report) -> bytes:
        """The file's content. Raises accountant.core.errors.CannotRender if the report lacks data that the format
        needs, or this machine lacks a library."""
        content = getattr(import_module(f"accountant.reports.{self.module}"), self.function)(report)
        return content.encode() if isinstance(content, str) else bytes(content)


_XLSX = "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet"
_CSV = "text/csv; charset=utf-8"
RENDERINGS: Final[dict[Form, Rendering]] = {
    "html": Rendering("html_and_pdf", "render_html", "text/html; charset=utf-8", "html", inline=True),
    "pdf": Rendering("html_and_pdf", "render_pdf", "application/pdf", "pdf"),
    "csv": Rendering("csv_and_parquet", "render_csv", _CSV, "csv"),
    "xlsx": Rendering("xlsx", "render_xlsx", _XLSX, "xlsx"),
    "parquet": Rendering("csv_and_parquet", "render_parquet", "application/vnd.apache.parquet", "parquet"),
    "json": Rendering("report_tables", "render", "application/json", "json", inline=True),
    "focus": Rendering("focus_export", "render_bundle", "application/zip", "focus.zip", charges=True),
    "focus-1.2": Rendering("focus_export", "render_projection", _CSV, "focus-1.2.csv", charges=True),
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
