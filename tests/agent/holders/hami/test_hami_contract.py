"""The virtual devices of HAMi pass the suite of ways to share GPUs."""

from __future__ import annotations

from agent.holders import hami
from gputally.testing.holders import PartsSuite


class TestHami(PartsSuite):
    plugin = hami.HOLDERS
    names = ("GPU-a-0", "GPU-a-17")
    limits = (
        ({"nvidia.com/gpucores": "30", "nvidia.com/gpumem-percentage": "20"}, 300_000),
        ({"nvidia.com/gpucores": "10", "nvidia.com/gpumem": "20480"}, 250_000),
        ({"nvidia.com/gpu": "1"}, 1_000_000),
    )
