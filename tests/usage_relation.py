"""Reads relations of usage in tests."""

from __future__ import annotations

from collections.abc import Sequence

from accountant.ledger.usage import START_UP, Usage


def figures_of(usage: Usage, names: Sequence[str] | None = None) -> dict[tuple[str, ...], tuple[int, ...]]:
    """The figures by key of a relation of one span, without rows that have none. names: None for all figures."""
    return {key: row for (_, key), row in figures_by_span(usage, names).items()}


def figures_by_span(
    usage: Usage, names: Sequence[str] | None = None
) -> dict[tuple[int, tuple[str, ...]], tuple[int, ...]]:
    """The figures by span and key, without rows that have none."""
    rows = zip(usage.span.tolist(), usage.row_keys(), usage.columns(names or usage.names).tolist(), strict=True)
    found: dict[tuple[int, tuple[str, ...]], tuple[int, ...]] = {}
    for span, key, row in rows:
        assert (span, key) not in found
        found[span, key] = tuple(row)
    assert list(found) == sorted(found)
    return {at: row for at, row in found.items() if any(row)}


def start_up(usage: Usage) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Starting and gang waiting time by key."""
    return figures_of(usage, START_UP)
