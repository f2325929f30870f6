-- The quarter-hours of the days with sums in [$low, $high), with the start of their day as at_ms.
SELECT q.* REPLACE (k.start_ms AS at_ms) FROM quarter q ASOF JOIN kept_day k ON q.at_ms >= k.start_ms
WHERE q.at_ms < k.end_ms AND q.at_ms >= $low AND q.at_ms < $high AND k.start_ms >= $low AND k.end_ms <= $high
