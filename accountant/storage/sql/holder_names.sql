-- Holders with the known facts of their pods. incoming: id. The workload comes from the API server, which knows the
-- whole chain of owners. The queue is that of accountant.billing.queue_waits.queue_of.
SELECT h.id, h.cluster, h.kind, h.uid, coalesce(nullif(h.namespace, ''), s.namespace, p.namespace, ''),
       coalesce(nullif(h.name, ''), s.name, p.name, ''), h.container,
       CASE WHEN coalesce(s.queue_ref, '') = '' THEN coalesce(p.queue_ref, '')
            WHEN coalesce(p.queue_ref, '') IN ('', s.queue_ref) OR starts_with(s.queue_ref, p.queue_ref || '@') THEN s.queue_ref
            WHEN coalesce(CAST(s.content ->> 'queue_ms' AS BIGINT), 9000000000000000 - s.observed_ms)
                 <= coalesce(CAST(p.content ->> 'queue_ms' AS BIGINT), 9000000000000000 - p.observed_ms) THEN s.queue_ref
            ELSE p.queue_ref END,
       coalesce(nullif(s.workload, ''), p.workload, '')
FROM holder h
JOIN incoming i ON h.id = i.id
LEFT JOIN pod p ON p.cluster = h.cluster AND p.uid = h.uid
LEFT JOIN pod_seen s ON s.cluster = h.cluster AND s.uid = h.uid
