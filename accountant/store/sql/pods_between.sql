-- Pods that existed in [$low, $high), as their nodes and as the API server show them. {{only}}: conditions on them.
SELECT coalesce(p.cluster, s.cluster), p.content, s.content
FROM pod p
FULL JOIN pod_seen s ON p.cluster = s.cluster AND p.uid = s.uid
WHERE coalesce(CAST(s.content ->> 'created_ms' AS BIGINT), CAST(p.content ->> 'created_ms' AS BIGINT)) < $high
  AND coalesce(CAST(s.content ->> 'ended_ms' AS BIGINT), CAST(p.content ->> 'ended_ms' AS BIGINT), $low) >= $low{only}
ORDER BY 1, coalesce(p.uid, s.uid)
