"""Contains the `gputally` command and the Python client, which import the other packages only when they are used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from gputally.base.version import __version__

if TYPE_CHECKING:
    from pathlib import Path

    from gputally.client import Client

__all__ = ["__version__", "connect"]


def connect(url: str, token: str | None = None, *, ca_file: str | Path | None = None) -> Client:
    """Return a client that returns the figures of the accountant at `url` as pandas DataFrames; see gputally.client.

    ca_file: PEM file of the CAs to trust for https, instead of the system's.

    The client imports only gputally, pandas and an HTTP client, so a module of your own named `agent` beside your
    notebook does not break it."""
    client: Client = import_module("gputally.client").connect(url, token, ca_file=ca_file)
    return client
