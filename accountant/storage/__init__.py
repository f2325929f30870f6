"""Stores the ledger in DuckDB.

`duckdb_ledger.DuckLedger` writes; what it may do within one transaction is in `transactions`, and how a batch becomes
rows in `write`. Its moments, which answer questions, are `read_snapshot.Snapshot`, with one module for each question in
`query`. What is known without a table is `commit_status.CommitStatus`."""

from __future__ import annotations

from accountant.storage.duckdb_ledger import DuckLedger, open_ledger

__all__ = ["DuckLedger", "open_ledger"]
