"""Spark, on a cluster or by Spark Connect: the manifest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from accountant.lake.engines.protocol import Engine, EnginePlugin

if TYPE_CHECKING:
    from accountant.core.settings import Lake


def _open(_lake: Lake, url: str) -> Engine:
    from accountant.lake.engines.spark.engine import SparkEngine

    return SparkEngine.connect(url)


ENGINE: Final = EnginePlugin(
    name="spark",
    open=_open,
    urls="spark://…, sc://…",
    reaches="connects to the address in --engine-url",
    page="docs/fleet.md",
)
