-- The nodes of pods: the node that first reported the pod, and the node to which it is bound according to the API
-- server. incoming: cluster, uid.
SELECT i.cluster, i.uid, n.node, n.by_row, coalesce(s.content ->> '$.node', '')
FROM incoming i
LEFT JOIN pod_node n ON n.cluster = i.cluster AND n.uid = i.uid
LEFT JOIN pod_seen s ON s.cluster = i.cluster AND s.uid = i.uid
