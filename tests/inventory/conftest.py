"""A ledger on a virtual clock that receives inventories, and one of an API server in memory."""

from __future__ import annotations

import pytest

from accountant.inventory.kubernetes_inventory import ClusterInventory
from gputally.base.clock import VirtualClock
from tests.inventory.memory_api_server import PATHS, FakeApi
from tests.ledger.conftest import clock as clock
from tests.ledger.conftest import hand as hand
from tests.ledger.conftest import ledger as ledger
from tests.ledger.conftest import opened as opened
from tests.ledger.conftest import path as path
from tests.ledger.conftest import send as send


@pytest.fixture
def api() -> FakeApi:
    return FakeApi(served=set(PATHS))


@pytest.fixture
def inventory(api: FakeApi, clock: VirtualClock) -> ClusterInventory:
    return ClusterInventory(api, clock, "prod", team_keys=["team"])
