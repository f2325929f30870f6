-- Rows that lie inside spans. incoming: tag, gpu (0: every), start_ms, end_ms, reference_ms, by_span (1: told apart by
-- the spans of the rows); one span lies in one quarter-hour.
SELECT i.tag, i.by_span, i.reference_ms, e.*
FROM entry e JOIN incoming i ON e.start_ms - e.start_ms % 900000 = i.start_ms - i.start_ms % 900000
WHERE e.start_ms >= i.start_ms AND e.end_ms <= i.end_ms AND (i.gpu = 0 OR i.gpu = e.gpu)
  AND e.start_ms >= $low AND e.start_ms < $high
