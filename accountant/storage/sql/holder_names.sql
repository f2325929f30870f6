-- Holders with the known facts of their pods. incoming: id. The workload comes from the API server if possible, because
-- the API server reports all owners of a pod.
SELECT h.id, h.cluster, h.kind, h.uid, coalesce(nullif(h.namespace, ''), s.namespace, p.namespace, ''),
       coalesce(nullif(h.name, ''), s.name, p.name, ''), h.container,
       {pod_queue},
       coalesce(nullif(s.workload, ''), p.workload, '')
FROM holder h
JOIN incoming i ON h.id = i.id
LEFT JOIN pod p ON p.cluster = h.cluster AND p.uid = h.uid
LEFT JOIN pod_seen s ON s.cluster = h.cluster AND s.uid = h.uid
