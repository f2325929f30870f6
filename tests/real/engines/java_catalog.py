"""A lake's catalog as Java's engines read it."""

from __future__ import annotations

from collections.abc import Callable

from accountant.core.settings import Lake

Reach = Callable[[Lake], str]


def jdbc(lake: Lake) -> tuple[str, str]:
    """Return catalog and warehouse in the form for Java's engines."""
    return f"jdbc:sqlite:{lake.warehouse}/catalog.db", f"file://{lake.warehouse}"
