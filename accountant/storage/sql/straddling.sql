-- Rows that cross an edge of a span. The rows of a set stay together, and sets are in the order of their numbers.
-- {rows}: a query for the rows near the spans. {condition}: a condition on rows or sets.
SELECT i.tag, i.start_ms, i.end_ms, e.stream, e.set_seq, e.start_ms, e.end_ms, e.gpu, e.device, e.payer,
       {cells}
FROM ({rows}) e JOIN incoming i
  ON e.start_ms < i.end_ms AND e.end_ms > i.start_ms AND (i.gpu = 0 OR i.gpu = e.gpu)
 AND NOT (e.start_ms >= i.start_ms AND e.end_ms <= i.end_ms)
WHERE e.start_ms > $low AND e.start_ms < $high {condition}
ORDER BY i.tag, i.start_ms, e.stream, e.set_seq, e.start_ms, e.gpu, e.seq
