-- The days in `incoming` (at_ms, their starts) have no sums any more.
DELETE FROM day WHERE at_ms IN (SELECT at_ms FROM incoming);
DELETE FROM kept_day WHERE start_ms IN (SELECT at_ms FROM incoming)
