-- The start of the pods of holders with idle time between $low and $high. $low is one quarter-hour before the span. The
-- node's times take precedence, because the node runs the containers. The API server's times fill the gaps. Whole hours,
-- from $first to $last, are read from sums, and everything else from rows. Hours that are not folded lie in $raw_low to
-- $raw_high. $part of $parts selects a part of the workloads. The pods of one workload, and so a gang, stay together.
SELECT id, cluster, namespace, workload, coalesce(CAST(node[1] AS BIGINT), CAST(seen[1] AS BIGINT)),
       coalesce(CAST(node[2] AS BIGINT), CAST(seen[2] AS BIGINT)),
       coalesce(CAST(node[3] AS BIGINT), CAST(seen[3] AS BIGINT)), observed_ms
FROM (
SELECT h.id, h.cluster, coalesce(nullif(s.namespace, ''), p.namespace, '') AS namespace,
       coalesce(nullif(s.workload, ''), p.workload, '') AS workload,
       p.content ->> ['$.created_ms', '$.scheduled_ms', '$.started_ms'] AS node,
       s.content ->> ['$.created_ms', '$.scheduled_ms', '$.started_ms'] AS seen,
       greatest(coalesce(p.observed_ms, 0), coalesce(s.observed_ms, 0)) AS observed_ms
FROM (
    SELECT payer FROM hour_of_all WHERE at_ms >= $first AND at_ms < $last AND idle_us > 0
    UNION
    SELECT payer FROM entry WHERE start_ms > $low AND start_ms < $first AND idle_us > 0
    UNION
    SELECT payer FROM entry WHERE start_ms >= $last AND start_ms < $high AND idle_us > 0
    UNION
    SELECT payer FROM present
    WHERE start_ms >= $raw_low AND start_ms < $raw_high AND start_ms > $low AND start_ms < $high AND idle_us > 0
      AND start_ms - start_ms % 3600000 IN (FROM unfolded)
) held
JOIN holder h ON h.id = held.payer
LEFT JOIN pod p ON p.cluster = h.cluster AND p.uid = h.uid
LEFT JOIN pod_seen s ON s.cluster = h.cluster AND s.uid = h.uid
WHERE (p.uid IS NOT NULL OR s.uid IS NOT NULL)
  AND ($parts = 1 OR hash(h.cluster, coalesce(nullif(s.namespace, ''), p.namespace, ''),
                          coalesce(nullif(s.workload, ''), p.workload, CAST(h.id AS VARCHAR))) % $parts = $part)
)
