"""The address of the documentation, to which pages and alerts link. Nothing is loaded from it."""

from __future__ import annotations

from typing import Final

DOCS: Final = "https://gputally.dev/docs/"


def docs_page(name: str) -> str:
    """The address of a page of `docs/`, or of a section of it: `closing`, `pages#pages-of-the-controller`."""
    return DOCS + name
