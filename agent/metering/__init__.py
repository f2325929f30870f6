"""Turns readings into intervals of usage, without I/O or logging.

Read in this order: `meter`, which closes intervals; `reading_deltas`, what happened between two readings;
`usage_attribution`, which holder it belongs to."""
