-- All received sets that overlap a region. incoming: tag, gpu, start_ms, end_ms.
SELECT DISTINCT r.gpu, r.stream, r.set_seq, r.start_ms, r.end_ms, CASE r.method WHEN 'carried' THEN 1 WHEN 'imported' THEN 2 ELSE 0 END, r.booked
FROM received r JOIN incoming i ON r.gpu = i.gpu AND r.start_ms < i.end_ms AND r.end_ms > i.start_ms
WHERE r.start_ms >= $low AND r.start_ms < $high AND r.method != 'withdrawn'
