"""Stores the ledger in DuckDB."""

from __future__ import annotations

from accountant.storage.duckdb_ledger import DuckLedger, open_ledger

__all__ = ["DuckLedger", "open_ledger"]
