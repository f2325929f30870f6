-- The start of all pods of some workloads, with or without idle time, because a gang also waits for members whose GPUs
-- are busy. The columns are those of launches.sql. incoming: cluster, namespace, workload.
SELECT h.id, h.cluster, coalesce(nullif(s.namespace, ''), p.namespace, '') AS space,
       coalesce(nullif(s.workload, ''), p.workload, '') AS job,
       coalesce(CAST(p.content ->> 'created_ms' AS BIGINT), CAST(s.content ->> 'created_ms' AS BIGINT)),
       coalesce(CAST(p.content ->> 'scheduled_ms' AS BIGINT), CAST(s.content ->> 'scheduled_ms' AS BIGINT)),
       coalesce(CAST(p.content ->> 'started_ms' AS BIGINT), CAST(s.content ->> 'started_ms' AS BIGINT)),
       greatest(coalesce(p.observed_ms, 0), coalesce(s.observed_ms, 0))
FROM holder h
LEFT JOIN pod p ON p.cluster = h.cluster AND p.uid = h.uid
LEFT JOIN pod_seen s ON s.cluster = h.cluster AND s.uid = h.uid
JOIN incoming i ON i.cluster = h.cluster
    AND i.namespace = coalesce(nullif(s.namespace, ''), p.namespace, '')
    AND i.workload = coalesce(nullif(s.workload, ''), p.workload, '')
