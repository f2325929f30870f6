-- Holders with what is known of their pods. incoming: id.
SELECT h.id, h.cluster, h.kind, h.uid, coalesce(nullif(h.namespace, ''), p.namespace, ''),
       coalesce(nullif(h.name, ''), p.name, ''), coalesce(p.queue_ref, ''), coalesce(p.workload, '')
FROM holder h
JOIN incoming i ON h.id = i.id
LEFT JOIN pod p ON p.cluster = h.cluster AND p.uid = h.uid
