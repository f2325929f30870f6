-- Pods about which something arrived since the last part was written, as reported by nodes and by the API server.
SELECT 'node' AS source, cluster, uid, observed_ms, content FROM pod
WHERE $all OR (cluster, uid) IN (SELECT (cluster, uid) FROM incoming)
UNION ALL
SELECT 'cluster', cluster, uid, observed_ms, content FROM pod_seen
WHERE $all OR (cluster, uid) IN (SELECT (cluster, uid) FROM incoming)
UNION ALL
SELECT 'label', cluster, uid, observed_ms, labels FROM pod_label
WHERE $all OR (cluster, uid) IN (SELECT (cluster, uid) FROM incoming)
ORDER BY ALL
