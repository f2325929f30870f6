-- When the pods of holders began, of those that hold something in the span. The node knows best when its containers
-- ran; the cluster may know what the node does not. $low is one quarter-hour before the span. $part of $parts: gangs
-- stay together, so do all pods of one workload.
SELECT h.id, h.cluster, coalesce(nullif(s.namespace, ''), p.namespace, ''),
       coalesce(nullif(s.workload, ''), p.workload, ''),
       coalesce(CAST(p.content ->> 'created_ms' AS BIGINT), CAST(s.content ->> 'created_ms' AS BIGINT)),
       coalesce(CAST(p.content ->> 'scheduled_ms' AS BIGINT), CAST(s.content ->> 'scheduled_ms' AS BIGINT)),
       coalesce(CAST(p.content ->> 'started_ms' AS BIGINT), CAST(s.content ->> 'started_ms' AS BIGINT)),
       greatest(coalesce(p.observed_ms, 0), coalesce(s.observed_ms, 0))
FROM (SELECT DISTINCT payer FROM entry WHERE start_ms > $low AND start_ms < $high AND idle_us > 0) held
JOIN holder h ON h.id = held.payer
LEFT JOIN pod p ON p.cluster = h.cluster AND p.uid = h.uid
LEFT JOIN pod_seen s ON s.cluster = h.cluster AND s.uid = h.uid
WHERE (p.uid IS NOT NULL OR s.uid IS NOT NULL)
  AND ($parts = 1 OR hash(h.cluster, coalesce(nullif(s.namespace, ''), p.namespace, ''),
                          coalesce(nullif(s.workload, ''), p.workload, CAST(h.id AS VARCHAR))) % $parts = $part)
