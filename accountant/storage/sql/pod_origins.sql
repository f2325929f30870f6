-- The queue that each pod requested. incoming: cluster, uid.
SELECT i.cluster, i.uid,
       {pod_queue}
FROM incoming i
LEFT JOIN pod p ON p.cluster = i.cluster AND p.uid = i.uid
LEFT JOIN pod_seen s ON s.cluster = i.cluster AND s.uid = i.uid
