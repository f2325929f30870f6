-- By cluster, GPU and node: records of the newest $limit quarantined ones that another node's GPU was reported in.
SELECT s.cluster, q.gpu_uuid, s.node, count(*), max(q.received_ms)
FROM (
    SELECT stream, received_ms, content ->> '$.gpu_uuid' AS gpu_uuid FROM quarantine
    WHERE reason = 'foreign-gpu' ORDER BY received_ms DESC LIMIT $limit
) q JOIN stream s ON s.id = q.stream
WHERE q.gpu_uuid IS NOT NULL
GROUP BY ALL ORDER BY ALL
