"""A published ledger, of which each test gets a copy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lake.comparison_queries import KeptLedger, PublishedLedger, published


@pytest.fixture(scope="package")
def kept(tmp_path_factory: pytest.TempPathFactory) -> KeptLedger:
    with published() as found:
        return found.kept(tmp_path_factory.mktemp("kept") / "files")


@pytest.fixture(scope="package")
def kept_unpublished(tmp_path_factory: pytest.TempPathFactory) -> KeptLedger:
    with published(publish=False) as found:
        return found.kept(tmp_path_factory.mktemp("kept") / "files")


@pytest.fixture
def known(kept: KeptLedger) -> Iterator[PublishedLedger]:
    """A published ledger whose publisher has just started."""
    with kept.again() as found:
        yield found


@pytest.fixture
def unpublished(kept_unpublished: KeptLedger) -> Iterator[PublishedLedger]:
    """A ledger whose lake is still empty."""
    with kept_unpublished.again() as found:
        yield found
