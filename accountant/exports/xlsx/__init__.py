"""XLSX: the tables of a report as sheets of a workbook."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Final

from accountant.exports.protocol import ExportPlugin

if TYPE_CHECKING:
    from accountant.reports.report_builder import Report


def _write(report: Report, stream: IO[bytes]) -> None:
    from accountant.exports.xlsx.workbook import render_xlsx

    stream.write(render_xlsx(report))


EXPORT: Final = ExportPlugin(
    name="xlsx",
    title="XLSX",
    media_type="application/vnd.openxmlformats-officedocument.spreadsheetml.sheet",
    suffix="xlsx",
    write=_write,
    reaches="nothing",
    page="docs/reports.md",
    binary=True,
)
