"""From batches to rows: what is new, what is bad, whose it is, and how it is written."""
