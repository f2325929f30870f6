-- Holders with what is known of their pods. incoming: id. The workload is the cluster's word, which has seen
-- the whole chain of owners; the queue the newest word of either.
SELECT h.id, h.cluster, h.kind, h.uid, coalesce(nullif(h.namespace, ''), s.namespace, p.namespace, ''),
       coalesce(nullif(h.name, ''), s.name, p.name, ''), h.container,
       CASE WHEN s.observed_ms > p.observed_ms OR starts_with(s.queue_ref, p.queue_ref || '@') THEN coalesce(nullif(s.queue_ref, ''), p.queue_ref)
            ELSE coalesce(nullif(p.queue_ref, ''), s.queue_ref, '') END,
       coalesce(nullif(s.workload, ''), p.workload, '')
FROM holder h
JOIN incoming i ON h.id = i.id
LEFT JOIN pod p ON p.cluster = h.cluster AND p.uid = h.uid
LEFT JOIN pod_seen s ON s.cluster = h.cluster AND s.uid = h.uid
