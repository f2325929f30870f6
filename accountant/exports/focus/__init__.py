"""FOCUS: the charges of a month, as a bundle of version 1.4 and as a table of version 1.2."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Final

from accountant.exports.protocol import CSV, ExportPlugin

if TYPE_CHECKING:
    from accountant.reports.report_builder import Report


def _write_bundle(report: Report, stream: IO[bytes]) -> None:
    from accountant.exports.focus.charge_tables import render_bundle

    stream.write(render_bundle(report))


def _write_table(report: Report, stream: IO[bytes]) -> None:
    from accountant.exports.focus.charge_tables import render_projection

    stream.write(render_projection(report).encode())


EXPORT: Final = ExportPlugin(
    name="focus",
    title="FOCUS 1.4",
    media_type="application/zip",
    suffix="focus.zip",
    write=_write_bundle,
    reaches="nothing",
    page="docs/reports.md",
    binary=True,
    charges=True,
)
EXPORT_1_2: Final = ExportPlugin(
    name="focus-1.2",
    title="FOCUS 1.2",
    media_type=CSV,
    suffix="focus-1.2.csv",
    write=_write_table,
    reaches="nothing",
    page="docs/reports.md",
    charges=True,
)
