"""Stores the ledger in DuckDB. Only `accountant.storage.duckdb_engine` imports the engine."""

from __future__ import annotations

from accountant.storage.duckdb_ledger import DuckLedger, open_ledger

__all__ = ["DuckLedger", "open_ledger"]
