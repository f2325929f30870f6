"""Trino passes the suite of engines, on a coordinator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from accountant.core.settings import Lake
from accountant.lake.engines.protocol import SEAM, EnginePlugin
from accountant.lake.engines.sql_text import CATALOG_VARIABLE
from gputally.base.plugins import usable
from gputally.testing.engines import EngineSuite
from tests.real.engines.java_catalog import Reach, jdbc
from tests.real.trino import Trino

pytestmark = pytest.mark.real


class TestTrino(EngineSuite):
    plugin = usable(SEAM, EnginePlugin)["trino"]

    @pytest.fixture(scope="class")
    @classmethod
    def reach(cls, trino: Trino) -> Iterator[Reach]:
        with pytest.MonkeyPatch.context() as patch:

            def url_of(lake: Lake) -> str:
                trino.add_catalog(lake.catalog.name, *jdbc(lake))
                patch.setenv(CATALOG_VARIABLE, lake.catalog.name)
                return trino.url

            yield url_of
