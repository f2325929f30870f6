"""PDF: the page of a report, printed."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Final

from accountant.exports.protocol import ExportPlugin

if TYPE_CHECKING:
    from accountant.reports.report_builder import Report


def _write(report: Report, stream: IO[bytes]) -> None:
    from accountant.exports.pdf.document import render_pdf

    stream.write(render_pdf(report))


EXPORT: Final = ExportPlugin(
    name="pdf",
    title="PDF",
    media_type="application/pdf",
    suffix="pdf",
    write=_write,
    reaches="reads the fonts of this machine",
    page="docs/reports.md",
    binary=True,
)
