-- Pods with new facts since the last part, as nodes and the API server report them. incoming: cluster, uid.
SELECT 'node' AS source, cluster, uid, observed_ms, content FROM pod
WHERE $all OR (cluster, uid) IN (SELECT (cluster, uid) FROM incoming)
UNION ALL
SELECT 'cluster', cluster, uid, observed_ms, content FROM pod_seen
WHERE $all OR (cluster, uid) IN (SELECT (cluster, uid) FROM incoming)
UNION ALL
SELECT 'label', cluster, uid, observed_ms, labels FROM pod_label
WHERE $all OR (cluster, uid) IN (SELECT (cluster, uid) FROM incoming)
UNION ALL
SELECT 'exported', cluster, uid, since_ms, content FROM exported_label
WHERE $all OR (cluster, uid) IN (SELECT (cluster, uid) FROM incoming)
ORDER BY ALL
