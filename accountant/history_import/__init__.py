"""Imports usage from before the first agent: records of other systems, as intervals with method `imported`.

Imports write to the ledger only through the accountant's HTTP API."""
