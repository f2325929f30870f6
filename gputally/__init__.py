"""The `gputally` command and the Python client; composes the stages, imports them lazily."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gputally.client import Client

__version__ = version("gputally")
__all__ = ["__version__", "connect"]


def connect(url: str, token: str | None = None) -> Client:
    """The books of the accountant at `url` as pandas DataFrames; see gputally.client. Needs the extra `accountant`."""
    from gputally.client import connect

    return connect(url, token)
