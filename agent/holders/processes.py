"""Without another source, whoever has a process on a GPU holds it."""

from __future__ import annotations

from agent.holders.protocol import HolderPlugin

HOLDERS = HolderPlugin(
    name="processes",
    reaches="reads the process table of this machine",
    page="docs/attribution.md",
    open=lambda _place, _node: None,
)
