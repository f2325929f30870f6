"""Imports usage from before the first agent: what other systems recorded, as intervals of method `imported`.

Nothing here writes to the ledger except through the accountant's HTTP API.
"""
