"""Our own readers of GPUs pass the suite that every reader passes."""

from __future__ import annotations

from agent.gpu_readers.chosen import own
from agent.gpu_readers.protocol import SEAM, GpuReaderPlugin
from gputally.base.plugins import OURS, plugins


def test_what_the_agent_finds_without_looking_for_plugins_is_what_is_registered() -> None:
    ours = {one.name: one.manifest for one in plugins(SEAM, GpuReaderPlugin) if one.package == OURS}
    assert ours, "the readers of this package are registered"
    assert {name: own(name) for name in ours} == ours
    assert [own(name) for name in ("protocol", "chosen", "nothing", "../nvml", "")] == [None] * 5
