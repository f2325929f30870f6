"""A Trino coordinator: the manifest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from accountant.lake.engines.protocol import Engine, EnginePlugin

if TYPE_CHECKING:
    from accountant.core.settings import Lake


def _open(_lake: Lake, url: str) -> Engine:
    from accountant.lake.engines.trino.engine import TrinoEngine

    return TrinoEngine.connect(url)


ENGINE: Final = EnginePlugin(
    name="trino",
    open=_open,
    urls="http(s)://…",
    reaches="connects to the address in --engine-url",
    page="docs/fleet.md",
)
