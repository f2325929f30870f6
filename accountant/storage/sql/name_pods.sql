-- Pods of which no node is noted belong to the node that told of them: in a ledger rebuilt from an archive.
INSERT INTO pod_node
SELECT cluster, uid, content ->> '$.node', true FROM pod
WHERE coalesce(content ->> '$.node', '') != '' AND (cluster, uid) NOT IN (SELECT (cluster, uid) FROM pod_node)
