"""Parquet: the amounts of a report as records, for warehouses."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Final

from accountant.exports.protocol import ExportPlugin

if TYPE_CHECKING:
    from accountant.reports.report_builder import Report


def _write(report: Report, stream: IO[bytes]) -> None:
    from accountant.exports.parquet.table_file import render_parquet

    stream.write(render_parquet(report))


EXPORT: Final = ExportPlugin(
    name="parquet",
    title="Parquet",
    media_type="application/vnd.apache.parquet",
    suffix="parquet",
    write=_write,
    reaches="nothing",
    page="docs/reports.md",
    binary=True,
)
