"""Stores closed rows on the node's disk and uploads them until the accountant has stored them.

`spool.Outbox` is what the rest of the agent sees: the rows in order, with their sequence numbers. `spool_file` is its
file, which survives kills and power cuts. `uploader` sends and obeys the answers."""
