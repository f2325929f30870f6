"""The lake's own engine passes the suite of engines. Those that run elsewhere are in tests/real."""

from __future__ import annotations

from accountant.lake.engines.duckdb import ENGINE
from gputally.testing.engines import EngineSuite


class TestDuckDb(EngineSuite):
    plugin = ENGINE
