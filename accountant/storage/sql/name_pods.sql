-- Gives each pod without a known node the node that reported it. Needed in a ledger that was rebuilt from an archive.
INSERT INTO pod_node
SELECT cluster, uid, content ->> '$.node', true FROM pod
WHERE coalesce(content ->> '$.node', '') != '' AND (cluster, uid) NOT IN (SELECT (cluster, uid) FROM pod_node)
