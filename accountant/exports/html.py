"""HTML: the report as one page."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Final

from accountant.exports.protocol import ExportPlugin

if TYPE_CHECKING:
    from accountant.reports.report_builder import Report


def _write(report: Report, stream: IO[bytes]) -> None:
    from accountant.reports.html_page import render_html

    stream.write(render_html(report).encode())


EXPORT: Final = ExportPlugin(
    name="html",
    title="HTML",
    media_type="text/html; charset=utf-8",
    suffix="html",
    write=_write,
    reaches="nothing",
    page="docs/reports.md",
    inline=True,
)
