"""Deliveries go to channels of gputally.testing, whichever others are installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.plugins.installed import fake_channels


@pytest.fixture(scope="module", autouse=True)
def channels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with fake_channels(tmp_path_factory.mktemp("channels")):
        yield
