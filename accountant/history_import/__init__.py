"""History from before any agent: what other systems recorded, as intervals of method `imported`.

`protocol` and `record` say what is sent and noted. Nothing here writes to the ledger but through the accountant's
HTTP interface.
"""
