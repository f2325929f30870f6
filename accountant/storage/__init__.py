"""Stores the ledger in DuckDB.

`DuckLedger` writes. Its moments, which answer questions, are `read_snapshot.Snapshot`, and what is known without a
table is `commit_status.CommitStatus`."""

from __future__ import annotations

from accountant.storage.duckdb_ledger import DuckLedger, open_ledger

__all__ = ["DuckLedger", "open_ledger"]
