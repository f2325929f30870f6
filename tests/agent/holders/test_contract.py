"""Our own sources of holders and ways to share GPUs can be used. Each passes its suite in its own folder."""

from __future__ import annotations

from agent.holders.protocol import SEAM, HolderPlugin
from gputally.base.plugins import OURS, plugins


def test_every_plugin_of_ours_can_be_used() -> None:
    ours = {one.name: one.fault for one in plugins(SEAM, HolderPlugin) if one.package == OURS}
    assert ours
    assert set(ours.values()) == {""}
