-- The tenures of GPUs of withdrawn rows: as stored, and as the remaining rows of imports have them (null if none remains).
SELECT w.gpu, w.node,
       (SELECT min(first_ms) FROM tenure t WHERE t.imported AND t.gpu = w.gpu AND t.node = w.node),
       (SELECT max(last_ms) FROM tenure t WHERE t.imported AND t.gpu = w.gpu AND t.node = w.node),
       min(r.start_ms), max(r.end_ms)
FROM (SELECT DISTINCT gpu, node FROM withdrawn) w
LEFT JOIN (
    SELECT r.gpu, s.node, r.start_ms, r.end_ms FROM received r JOIN stream s ON s.id = r.stream
    WHERE r.method != 'withdrawn' AND starts_with(s.epoch, 'import:')
) r ON r.gpu = w.gpu AND r.node = w.node
GROUP BY w.gpu, w.node
