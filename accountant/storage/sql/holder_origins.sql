-- The queue that the pod of each holder requested. {payers}: a query for the ids of holders.
SELECT h.id,
       {pod_queue} AS queue_ref
FROM holder h
LEFT JOIN pod p ON p.cluster = h.cluster AND p.uid = h.uid
LEFT JOIN pod_seen s ON s.cluster = h.cluster AND s.uid = h.uid
WHERE h.id <> 0 AND h.id IN ({payers})
