-- Quarantined records that report a GPU of another node, by cluster, GPU and node, among the newest $limit quarantined
-- records.
SELECT s.cluster, q.gpu_uuid, s.node, count(*), max(q.received_ms)
FROM (
    SELECT stream, received_ms, content ->> '$.gpu_uuid' AS gpu_uuid FROM quarantine
    WHERE reason = 'foreign-gpu' ORDER BY received_ms DESC LIMIT $limit
) q JOIN stream s ON s.id = q.stream
WHERE q.gpu_uuid IS NOT NULL
GROUP BY ALL ORDER BY ALL
