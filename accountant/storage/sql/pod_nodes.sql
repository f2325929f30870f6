-- The nodes of pods: the one that first named each, and the one that the API server says it is bound to. incoming:
-- cluster, uid.
SELECT i.cluster, i.uid, n.node, n.by_row, coalesce(s.content ->> '$.node', '')
FROM incoming i
LEFT JOIN pod_node n ON n.cluster = i.cluster AND n.uid = i.uid
LEFT JOIN pod_seen s ON s.cluster = i.cluster AND s.uid = i.uid
