"""Imports usage from before the first agent: the records of other systems, as intervals of method `imported`.

This package writes to the ledger only through the accountant's HTTP API.
"""
