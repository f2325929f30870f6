-- The spans of the rows inside some spans, each of which lies in one quarter-hour. incoming: tag, gpu (0: every GPU),
-- start_ms, end_ms.
SELECT DISTINCT i.tag, i.gpu, e.start_ms, e.end_ms
FROM entry e JOIN incoming i ON e.start_ms // 900000 = i.start_ms // 900000
WHERE e.start_ms >= i.start_ms AND e.end_ms <= i.end_ms AND i.gpu IN (0, e.gpu)
  AND e.start_ms >= $low AND e.start_ms < $high
