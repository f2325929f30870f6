"""A published ledger for the engines that run elsewhere."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from accountant.core.settings import LakeCatalog
from tests.lake.comparison_queries import PublishedLedger, published


@pytest.fixture(scope="module")
def name() -> str:
    """Return a new catalog name, because Java's engines cache a catalog for as long as they run."""
    return f"books{uuid.uuid4().hex}"


@pytest.fixture(scope="module")
def known(name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PublishedLedger]:
    place = str(tmp_path_factory.mktemp("lake"))
    uri = f"sqlite:///{place}/catalog.db"
    with published(place, LakeCatalog(uri=uri, name=name)) as found:
        yield found
