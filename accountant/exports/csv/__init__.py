"""CSV: the amounts of a report as records, for spreadsheets and scripts."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Final

from accountant.exports.protocol import CSV, ExportPlugin

if TYPE_CHECKING:
    from accountant.reports.report_builder import Report


def _write(report: Report, stream: IO[bytes]) -> None:
    from accountant.exports.csv.lines import render_csv

    stream.write(render_csv(report).encode())


EXPORT: Final = ExportPlugin(
    name="csv",
    title="CSV",
    media_type=CSV,
    suffix="csv",
    write=_write,
    reaches="nothing",
    page="docs/reports.md",
)
