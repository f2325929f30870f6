"""gputally's own engines pass the suite of engines. Those that run elsewhere are in tests/real."""

from __future__ import annotations

from accountant.lake.engines.protocol import SEAM, EnginePlugin
from gputally.base.plugins import usable
from gputally.testing.engines import EngineSuite


class TestDuckDb(EngineSuite):
    plugin = usable(SEAM, EnginePlugin)["duckdb"]
