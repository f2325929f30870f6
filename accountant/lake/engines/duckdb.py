"""DuckDB in this process: the manifest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from accountant.lake.engines.protocol import Engine, EnginePlugin

if TYPE_CHECKING:
    from accountant.core.settings import Lake


def _open(lake: Lake, _url: str) -> Engine:
    from accountant.lake.duckdb_engine import DuckDbEngine
    from accountant.lake.iceberg_catalog import Catalogue

    return DuckDbEngine(Catalogue.connect(lake))


ENGINE: Final = EnginePlugin(
    name="duckdb",
    open=_open,
    urls="",
    reaches="reads the lake's catalog and files",
    page="docs/fleet.md",
)
