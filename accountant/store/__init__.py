"""The ledger on DuckDB. Only `accountant.store.database` imports the engine."""

from __future__ import annotations

from accountant.store.duck import DuckLedger, open_ledger

__all__ = ["DuckLedger", "open_ledger"]
