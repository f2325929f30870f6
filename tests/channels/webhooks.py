"""The suite of channels over a webhook, whose URL is in a file, and such a channel as a destination."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pytest

from gputally.testing.channels import ChannelSuite, Medium
from gputally.testing.http_receiver import http_receiver


class WebhookSuite(ChannelSuite):
    """markup: see Medium."""

    __test__ = False
    markup: ClassVar[Mapping[str, Callable[[bytes], Sequence[str]]]] = {}

    @pytest.fixture
    def medium(self, tmp_path: Path) -> Iterator[Medium]:
        with http_receiver() as server:
            (tmp_path / "url").write_text(f"{server.url}/services/s3cret")
            yield Medium({"url_file": str(tmp_path / "url")}, server, self.markup, ("s3cret",))


@contextmanager
def destination(folder: Path) -> Iterator[object]:
    """Yield the settings, as long as the server runs. folder: for the file with the URL."""
    with http_receiver() as server:
        place = folder / f"url-{server.url.rpartition(':')[2]}"
        place.write_text(f"{server.url}/services/s3cret")
        yield {"url_file": str(place)}
